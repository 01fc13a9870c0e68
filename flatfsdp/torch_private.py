"""Private parts of PyTorch that the engine relies on: of autograd, process groups, and Dynamo.

`torch.compile` does not see the engine.  If a model is wrapped and then compiled as a whole, or its modules
are compiled one by one, the graphs are of the modules inside each unit, and the engine runs between them,
uncompiled.  If the engine were traced, its collectives would be replaced by functional ones, which copy, and
every step would be recompiled.
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
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils import checkpoint as checkpoints

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def default_store() -> dist.Store:
    """Store through which the ranks of the default process group found each other."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def time_limit(group: dist.ProcessGroup | None, seconds: float | None) -> Iterator[None]:
    """Context in which gloo collectives wait that many seconds for other ranks; None: as long as usual."""
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
    """Timeout of collectives over a process group; None for backends that do not tell."""
    for device in group._device_types:
        # Some classes of backends have no options, and some raise.
        with suppress(AttributeError, RuntimeError):
            timeout: timedelta = group._get_backend(device).options._timeout
            return timeout
    return None


def new_group(
    global_ranks: Sequence[int], name: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Makes a process group that is shut down before others.  Collective over its ranks only.

    `dist.new_group(use_local_synchronization=True)` derives the name from the ranks and from the number of
    groups that this process is in.  If these numbers differ, ranks wait for each other in vain.  A new group
    can also get the name of one that has ended, for which the store still has the old addresses.

    Args:
        global_ranks: numbers of the ranks in the default process group.
        name: name of the group, equal on all its ranks, and never used by them for another group.
        backend: backend of the group; None takes that of the default process group.
        timeout: timeout of its collectives; None takes PyTorch's default for the backend.
    """
    c10d = dist.distributed_c10d
    from_ranks = c10d._process_group_name
    digest = hashlib.sha256(repr(tuple(global_ranks)).encode()).hexdigest()
    # A tilde, because PyTorch destroys all groups in reverse order of their names.
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
        group: the process group.
        method: bound method to call.
        also_at_exit: call it also if Python ends without destroying the group, perhaps on this rank alone.
    """
    shutdown = dist.ProcessGroup.shutdown
    if not hasattr(shutdown, "__wrapped__"):
        dist.ProcessGroup.shutdown = _calling_first(shutdown)  # type: ignore[method-assign, assignment]
        atexit.register(_call_all_at_exit)
    _before_shutdown.setdefault(group, []).append((WeakMethod(method), also_at_exit))


def _calling_first(shutdown: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    @wraps(shutdown)
    def calls_and_shuts_down(group: dist.ProcessGroup) -> None:
        _call(_before_shutdown.pop(group, ()))
        shutdown(group)

    return calls_and_shuts_down


def _call_all_at_exit() -> None:
    for calls in list(_before_shutdown.values()):
        _call(call for call in calls if call[1])


_Call = tuple[WeakMethod[Callable[[], None]], bool]
"""A method, and whether to call it at the exit of Python, too."""


def _call(calls: Iterable[_Call]) -> None:
    for reference, _ in calls:
        if (method := reference()) is not None:
            method()


_before_shutdown: WeakKeyDictionary[dist.ProcessGroup, list[_Call]] = WeakKeyDictionary()


def running_backward() -> int:
    """Number of the backward that runs in this thread, -1 if none does; a nested one has its own."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd is running: a forward that runs now is a recomputation."""
    return running_backward() != -1


class CheckpointRun(NamedTuple):
    """A run of a function inside `torch.utils.checkpoint.checkpoint`.

    Attributes:
        owner: object that the checkpoint keeps for backward, one for each call.
        recomputation: object that differs for each run in backward; None in the forward.
        trains: whether a backward may follow; a reentrant checkpoint runs its function without gradients.
    """

    owner: object
    recomputation: object
    trains: bool


def may_run_in_checkpoint() -> bool:
    """Whether the running code could be inside a checkpoint; cheaper than looking for one."""
    return in_backward() or not torch.is_grad_enabled() or _has_saved_tensors_hooks()


def _has_saved_tensors_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def running_checkpoints(until: CodeType) -> Iterator[CheckpointRun | None]:
    """Yields the calls of PyTorch's checkpoint on this Python stack, innermost first.

    The last one is a recomputation, if there is one: frames around it run the backward.

    Args:
        until: code of a function at which the search ends; None is yielded for it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is until:
            yield None
            return
        # By id, because code objects are hashed by all their contents.
        if id(code) in _CHECKPOINT_CODES:
            run = _run_in(code, frame.f_locals)
            if run is not None:
                yield run
                if run.recomputation is not None:
                    return
        frame = frame.f_back


def _run_in(code: CodeType, variables: Any) -> CheckpointRun | None:
    """The checkpoint run in a frame with these variables; None if it has no backward."""
    if code is _CHECKPOINT:
        generator = variables.get("gen")
        if generator is None or generator.gi_frame is None:
            return None  # reentrant
        # If called without gradients, the checkpoint leaves no hooks.
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


next_operation: Callable[[], int] = torch.autograd._get_sequence_nr
"""Number of the next differentiable operation in this thread, see `Node._sequence_nr`."""


def receives_gradient(tensor: Tensor, node: Node | None = None) -> bool:
    """Whether the running backward brings `tensor` a gradient; `autograd.grad` asks for some tensors only.

    Args:
        tensor: the tensor.
        node: node that takes the gradient, if known: to find that of a leaf takes a view of it.
    """
    base = None if tensor.is_leaf else tensor._base
    if not (tensor if base is None else base).requires_grad:
        # Frozen since the forward; a view of a flat leaf has the flag from when it was made.
        return False
    if node is None:
        node = _accumulation_into(tensor) if tensor.grad_fn is None else tensor.grad_fn
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # autograd.grad with respect to this very tensor, which accumulates nothing.
        return False


def _accumulation_into(leaf: Tensor) -> Node:
    with torch.enable_grad():
        view = leaf.view_as(leaf).grad_fn
    assert view is not None
    return view.next_functions[0][0]  # type: ignore[return-value]


def node_after(node: Node, leaf: Tensor) -> Node | None:
    """The node that accumulates into `leaf`, an input of `node`; None if `leaf` is no leaf."""
    for each, _ in node.next_functions:
        if getattr(each, "variable", None) is leaf:
            return each
    return None


def nodes_behind(tensor: Tensor, count: int) -> Sequence[Node | None]:
    """Nodes that take the gradients of the last `count` inputs of the function behind `tensor`, in order."""
    assert tensor.grad_fn is not None
    return [node for node, _ in tensor.grad_fn.next_functions[-count:]]


class Function(torch.autograd.Function):
    """PyTorch's, with `run`: `apply` for less host time.

    `apply` searches its arguments for wrappers of functorch's transforms that have ended.
    """

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Applies the function; inside a transform of functorch, it raises as `apply` does."""
        if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
            return cls.apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def once_differentiable(backward: Callable[..., R]) -> Callable[..., R]:
    """Wraps `once_differentiable`, without the 3 us it takes to switch off gradients that are off."""
    checked = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def without_graph(*args: Any) -> R:
        return checked(*args) if torch.is_grad_enabled() else backward(*args)

    return without_graph


def run_as_soon_as_ready(tensor: Tensor, depth: int) -> None:
    """Lets the last `depth` operations behind `tensor` run in backward as soon as their gradients are there.

    The accumulation into a leaf does so, too; other operations wait for all that were recorded after them.
    """
    node = tensor.grad_fn
    for _ in range(depth):
        assert node is not None
        node._set_sequence_nr(2**63)  # type: ignore[attr-defined]
        node = node.next_functions[0][0]


def weakly(owner: T, method: Callable[..., None], *first: Any) -> Callable[[Tensor], None]:
    """A hook that calls `method(owner, *first, tensor)` as long as `owner` lives, without keeping it alive.

    The garbage collector does not look into the hooks of tensors: if a hook held its object, and that the
    tensor, it would keep the model, its buffers and its process groups for good.
    """
    reference = ref(owner)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *first, tensor)

    return hook


def run_post_accumulate_hooks(parameter: Tensor) -> None:
    """Runs a user's post-accumulate-grad hooks; the first hook is the engine's (`weakly`)."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and len(hooks) > 1:
        with torch.no_grad():
            # A hook that removes itself changes the dict.
            for hook in list(hooks.values())[1:]:
                hook(parameter)


def shares_memory(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether `tensor` is in this memory; true for a detached view, too.

    Sparse tensors, and tensors inside torch.vmap and torch.func.jvp, have no memory to compare.
    """
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata == storage._cdata


def uses_of_memory(tensor: Tensor) -> int:
    """Number of tensors in the memory of `tensor`, plus a constant."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_VERSION = attrgetter("_version")

FREED = 2**30
"""What `mark_freed` adds to a version, so that an error of autograd shows it."""


def mark_freed(tensors: tuple[Tensor, ...], *, is_freed: bool) -> None:
    """Makes a backward raise that reads these tensors, or views of them, from a graph that has saved them.

    Autograd saves the version of a tensor, and compares it.

    Args:
        tensors: the tensors.
        is_freed: False restores the versions; writes that were counted in between stay counted.
    """
    step = FREED if is_freed else -FREED
    versions = tuple([version + step for version in map(_VERSION, tensors)])
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def copied_on_write(tensor: Tensor) -> Tensor:
    """A copy of `tensor` that shares its memory until something writes to either of them, or to a view."""
    return torch._lazy_clone(tensor)


is_copied_on_write: Callable[[Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]
"""Whether nothing has written to the memory of a tensor that is `copied_on_write`; does not wait."""


def is_profiling() -> bool:
    """Whether a profiler records now."""
    return torch.autograd._profiler_enabled()


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules, forward or backward."""
    return torch.nn.modules.module._has_any_global_hook()


def allows_tf32() -> bool | str:
    """`torch.backends.cuda.matmul.allow_tf32`, or `fp32_precision`, if a program has set that one."""
    try:
        return torch._C._get_cublas_allow_tf32()
    except RuntimeError:
        # PyTorch refuses to answer the older question where the newer setting is used.
        return torch.backends.cuda.matmul.fp32_precision


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the running backward is over, and drops it uncalled if that raises."""
    Variable._execution_engine.queue_callback(callback)


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `function`, and what it calls, from being compiled.

    `torch.compiler.disable` does the same, but would import the compiler, which takes a second, along with
    this package rather than in the first forward.
    """
    return _disable_dynamo(function)


def traced_inside(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps `function` out of its caller's graph; functions that it calls are compiled separately."""
    return _disable_dynamo(function, recursive=False)


def begin_imagined_ranks(world: int) -> None:
    """Makes a default process group of `world` ranks, of which only rank 0 exists; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)


@contextmanager
def random_states_by(
    generator: torch.Generator,
    save: Callable[[], Tensor],
    restore: Callable[[Tensor], object],
    reseeded: Callable[[], object],
) -> Iterator[None]:
    """Context in which the state of a GPU's default generator is saved and restored by these functions.

    Activation checkpoints and `torch.random.fork_rng` look both up in `torch.cuda`, also in a backward's
    threads.

    Args:
        generator: the default generator of a GPU.
        save: returns its state.
        restore: is given such a state.
        reseeded: called after a seed was set, as by `torch.manual_seed`.
    """
    get_rng_state, set_rng_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def is_of_generator(device: int | str | torch.device) -> bool:
        index = device if isinstance(device, int) else torch.device(device).index
        return generator.device.index == (torch.cuda.current_device() if index is None else index)

    def saved(device: int | str | torch.device = "cuda") -> Tensor:
        return save() if is_of_generator(device) else get_rng_state(device)

    def restored(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
        if is_of_generator(device):
            restore(new_state)
        else:
            set_rng_state(new_state, device)

    def noticed(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result = function(*args, **kwargs)
            reseeded()
            return result

        return call

    replaced: dict[str, Any] = {"get_rng_state": saved, "set_rng_state": restored}
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        replaced[name] = noticed(getattr(torch.cuda, name))
    originals = {name: getattr(torch.cuda, name) for name in replaced}
    vars(torch.cuda).update(replaced)
    try:
        yield
    finally:
        vars(torch.cuda).update(originals)
