"""The private parts of PyTorch that the engine relies on: of autograd, process groups, and Dynamo.

`torch.compile` sees nothing of the engine.  A model that was wrapped and then compiled as a whole, or whose
modules were compiled one by one, becomes graphs of the modules inside each unit; the engine runs between them
as it is written.  Traced, its collectives would be replaced by functional ones, which copy, and every step
would be recompiled.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils import checkpoint as checkpoints

P = ParamSpec("P")
R = TypeVar("R")


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group have found each other."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """All that this process is in and that are not destroyed."""
    return list(dist.distributed_c10d._world.pg_map)


@contextmanager
def time_limit(group: dist.ProcessGroup | None, seconds: float | None) -> Iterator[None]:
    """Collectives that begin inside over gloo wait for other ranks that long; None: as long as ever."""
    backend: Any = None if group is None else group._get_backend(torch.device("cpu"))
    if seconds is None or not isinstance(backend, dist.ProcessGroupGloo):
        yield
        return
    before = backend.options._timeout
    backend._set_default_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        backend._set_default_timeout(before)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives over a process group wait for other ranks; None for backends that do not say."""
    for device in group._device_types:
        # Some classes of backends have no options, and some raise.
        with suppress(AttributeError, RuntimeError):
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return None


def new_group(
    global_ranks: Sequence[int], name: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """A process group of some ranks, which is shut down before others.  Collective over these ranks only.

    `dist.new_group(use_local_synchronization=True)` makes the name from the ranks and from the number of
    groups that this process is in.  Ranks that are in unequally many wait for each other in vain then.  And a
    group that is made after another one has ended can have its name, under which the store still says where
    the ranks of that one listened.

    Args:
        name: the same on all of them; no other group of theirs from here has it, or has had it.
        backend: None takes that of the default process group.
        timeout: of its collectives; None takes PyTorch's default for the backend.
    """
    c10d = dist.distributed_c10d
    from_ranks = c10d._process_group_name
    digest = hashlib.sha256(repr(tuple(global_ranks)).encode()).hexdigest()
    # A tilde, because PyTorch destroys all groups backwards by name.
    full = f"~flatfsdp {name} {digest[:16]}"
    c10d._process_group_name = lambda ranks, use_hashed_name: full  # type: ignore[assignment, return-value]
    try:
        return dist.new_group(
            list(global_ranks), backend=backend, timeout=timeout, use_local_synchronization=True
        )
    finally:
        c10d._process_group_name = from_ranks


def call_before_shutdown(group: dist.ProcessGroup, method: Callable[[], None], *, also_at_exit: bool) -> None:
    """Calls a bound method, if its object still lives, before a process group is destroyed.

    PyTorch has no hook for that.

    Args:
        also_at_exit: or before Python ends without destroying it, perhaps on this rank alone.
    """
    if not hasattr(dist.ProcessGroup.shutdown, "__wrapped__"):
        dist.ProcessGroup.shutdown = _calling_first(  # type: ignore[method-assign, assignment]
            dist.ProcessGroup.shutdown
        )
        atexit.register(_call_all_at_exit)
    _before_shutdown.setdefault(group, []).append(_Call(WeakMethod(method), also_at_exit))


class _Call(NamedTuple):
    method: WeakMethod[Callable[[], None]]
    also_at_exit: bool


def _calling_first(shutdown: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    @wraps(shutdown)
    def calls_and_shuts_down(group: dist.ProcessGroup) -> None:
        _call(_before_shutdown.pop(group, ()))
        shutdown(group)

    return calls_and_shuts_down


def _call_all_at_exit() -> None:
    for calls in list(_before_shutdown.values()):
        _call(call for call in calls if call.also_at_exit)


def _call(calls: Iterable[_Call]) -> None:
    for call in calls:
        if (method := call.method()) is not None:
            method()


_before_shutdown: WeakKeyDictionary[dist.ProcessGroup, list[_Call]] = WeakKeyDictionary()


def running_backward() -> int:
    """Number of the backward that runs in this thread, -1 if none; one inside another has its own."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd is running: a forward that runs now is a recomputation."""
    return running_backward() != -1


class CheckpointRun(NamedTuple):
    """A run of a function inside `torch.utils.checkpoint.checkpoint`.

    Attributes:
        owner: what the checkpoint keeps for backward, of which there is one a call.
        recomputation: something else for each run in backward; None in the forward.
        trains: whether a backward may follow; a reentrant checkpoint runs its function without gradients.
    """

    owner: object
    recomputation: object
    trains: bool


def may_run_in_checkpoint() -> bool:
    """Whether the code that runs now could be inside a checkpoint; costs less than to look for one."""
    return in_backward() or not torch.is_grad_enabled() or _has_saved_tensors_hooks()


def _has_saved_tensors_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def running_checkpoints(until: CodeType) -> Iterator[CheckpointRun | None]:
    """The calls of PyTorch's checkpoint that run on this Python stack, innermost first.

    The last one is a recomputation, if there is one: what is around it runs the backward.

    Args:
        until: a function behind which nobody looks; None stands for it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is until:
            yield None
            return
        # Code objects are hashed by all that is in them.
        if id(code) in _CHECKPOINT_CODES:
            run = _run_in(code, frame.f_locals)
            if run is not None:
                yield run
                if run.recomputation is not None:
                    return
        frame = frame.f_back


def _run_in(code: CodeType, variables: Any) -> CheckpointRun | None:
    """What runs in a frame with these variables; None: nothing that has a backward."""
    if code is _CHECKPOINT:
        generator = variables.get("gen")
        if generator is None or generator.gi_frame is None:
            return None  # reentrant
        # Called without gradients it leaves no hooks.
        trains = torch.is_grad_enabled() or _has_saved_tensors_hooks()
        return CheckpointRun(generator.gi_frame.f_locals["new_frame"], None, trains)
    if code is _UNPACK:
        return CheckpointRun(variables["frame"], variables["gid"], trains=True)
    owner = variables["ctx"]
    if code is _REENTRANT_FORWARD:
        return CheckpointRun(owner, None, trains=bool(owner.next_functions))
    return CheckpointRun(owner, running_backward(), trains=True)


_CHECKPOINT = inspect.unwrap(checkpoints.checkpoint).__code__
_REENTRANT_FORWARD = checkpoints.CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = checkpoints.CheckpointFunction.backward.__code__
_UNPACK = next(
    code
    for code in checkpoints._checkpoint_hook.__init__.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "unpack_hook"
)
_CHECKPOINT_CODES = frozenset(
    id(code) for code in (_CHECKPOINT, _UNPACK, _REENTRANT_FORWARD, _REENTRANT_BACKWARD)
)


def receives_gradient(tensor: Tensor, node: Node | None = None) -> bool:
    """Whether the running backward brings `tensor` a gradient; `autograd.grad` asks for some tensors only.

    Args:
        node: what takes the gradient, if that is known: to find the node of a leaf takes a view of it.
    """
    base = None if tensor.is_leaf else tensor._base
    if not (tensor if base is None else base).requires_grad:
        # Frozen since the forward; a view of a flat leaf says of itself what was true when it was made.
        return False
    if node is None:
        node = _accumulation_into(tensor) if tensor.grad_fn is None else tensor.grad_fn
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # autograd.grad with respect to this very tensor, which nothing accumulates.
        return False


def _accumulation_into(leaf: Tensor) -> Node:
    with torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
    assert view is not None
    return view.next_functions[0][0]  # type: ignore[return-value]


def nodes_behind(tensor: Tensor, count: int) -> Sequence[Node | None]:
    """What takes the gradients of the last `count` tensors that `tensor` was computed from, in order."""
    assert tensor.grad_fn is not None
    return [node for node, _ in tensor.grad_fn.next_functions[-count:]]


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """PyTorch's `once_differentiable` without the 3 us it takes to switch off gradients that are off."""
    checked = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def without_graph(*args: Any) -> R:
        return checked(*args) if torch.is_grad_enabled() else backward(*args)

    return without_graph


def run_as_soon_as_ready(tensor: Tensor, depth: int) -> None:
    """Lets the last `depth` operations behind `tensor` run in backward as soon as their gradients are there.

    As the accumulation into a leaf does; other operations wait for all that were recorded after them.
    """
    node = tensor.grad_fn
    for _ in range(depth):
        assert node is not None
        node._set_sequence_nr(2**63)  # type: ignore[attr-defined]
        node = node.next_functions[0][0]


def run_post_accumulate_hooks(parameter: Tensor) -> None:
    """Runs what `register_post_accumulate_grad_hook` has left, for a gradient that autograd did not bring."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        with torch.no_grad():
            # One that removes itself changes the dict.
            for hook in list(hooks.values()):
                hook(parameter)


def shares_memory(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether `tensor` is in this memory; a detached view is, too.

    Sparse tensors, and those inside torch.vmap and torch.func.jvp, have no memory that one could ask for.
    """
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == storage._cdata


def uses_of_memory(tensor: Tensor) -> int:
    """How many tensors there are in this memory, and a constant."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def is_profiling() -> bool:
    """Whether a profiler records now."""
    return torch.autograd._profiler_enabled()


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, forward or backward."""
    return torch.nn.modules.module._has_any_global_hook()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the running backward is over, and drops it uncalled if that raises."""
    Variable._execution_engine.queue_callback(callback)


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Neither `function` nor what it calls is compiled.

    As `torch.compiler.disable`, which would import the compiler along with this package, rather than in the
    first forward; it takes a second.
    """
    return _disable_dynamo(function)


def traced_inside(function: Callable[P, R]) -> Callable[P, R]:
    """No caller's graph has `function` in it; what it calls is compiled, each by itself."""
    return _disable_dynamo(function, recursive=False)


def begin_imagined_ranks(world: int) -> None:
    """Makes a default process group of `world` ranks of which only rank 0 exists; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


def backward_within_modes(loss: Tensor) -> None:
    """`loss.backward()` of a scalar that keeps modes of torch functions on: checkpoints run forwards in it.

    `Tensor.backward` is a torch function itself, and a mode is off while it handles one.
    """
    engine = Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
