"""A stand-in for CUDA graphs on the CPU: records every operator with its tensors, and runs them again.

In:   a function that runs a microbatch.
Out:  the same operators, buffers that come and go, and collectives once more, in the same memory.

As in a capture, the host may not read a value.  Unlike one, what is recorded has run: the first replay does
nothing.  It shows nothing of streams, of memory that a graph uses again, or of NCCL.

Where a replay relies on a count of changes instead of looking, the tape looks, too, and compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import flatfsdp.comm.collectives as collectives
from flatfsdp.comm.cuda_graphs import RandomMoves
from flatfsdp.engine.replay.preconditions import Surroundings
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.torch_private import uses_of_memory

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
EMPTY = {
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.empty_like.default,
    aten.empty_strided.default,
}


class TapeGraph(TorchDispatchMode):
    """Mode that records the operators called while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._has_run = True
        self.aliases: Counter[int] = Counter()
        _tapes.add(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"the host reads a value while a microbatch is recorded: {func}")
        result = func(*args, **kwargs)
        made = _tensors(result)
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        is_view = made and not func._schema.is_mutable
        is_view = is_view and all(each.untyped_storage()._cdata in given for each in made)
        if not is_view and func not in EMPTY:
            again, outputs = self.aliased((args, kwargs)), self.aliased(made)
            self.call(lambda: _run(func, *again, outputs))
        return result

    def call(self, function: Callable[[], Any]) -> None:
        """Adds what a replay calls here."""
        self._calls.append(function)

    def aliased(self, tree: Any) -> Any:
        """The same with other tensors in the same memory: a parameter changes when its unit is freed."""
        return tree_map(self._alias, tree)

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.aliases[value.untyped_storage()._cdata] += 1
        return value.detach()

    def replay(self) -> None:
        """Runs everything again, except the first time."""
        if not self._has_run:
            with torch.no_grad():
                for call in self._calls:
                    call()
        self._has_run = False

    def reset(self) -> None:
        """Does nothing: tensors are freed with the tape."""
        self._calls.clear()
        self.aliases.clear()


class TapeGraphs:
    """Stands in for `flatfsdp.comm.cuda_graphs.Graphs`."""

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    @contextmanager
    def watched(self) -> Iterator[RandomMoves]:
        yield RandomMoves()

    def record(self, function: Callable[[], Any], moves: RandomMoves) -> tuple[TapeGraph, Any]:
        graph = TapeGraph()
        with ExitStack() as patches:
            for name in ("_all_gather", "_reduce_scatter"):
                patches.enter_context(mock.patch.object(collectives, name, _again(graph, collectives, name)))
            for name in ("all_reduce", "all_to_all_single"):
                again = _again(graph, collectives.dist, name)
                patches.enter_context(mock.patch.object(collectives.dist, name, again))
            resized = {name: _resizing(graph, name) for name in ("allocate", "free")}
            patches.enter_context(mock.patch.multiple(FlatBuffer, **resized))
            with graph:
                return graph, function()

    nbytes = 0

    def require_nothing_kept(self, outputs: Sequence[Tensor]) -> None:
        pass


def _again(graph: TapeGraph, owner: Any, name: str) -> Callable[..., Any]:
    """A collective, recorded as a whole: it may copy from memory of its own."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        again = graph.aliased(args)
        graph.call(lambda: function(*again, **kwargs))
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _resizing(graph: TapeGraph, name: str) -> Callable[[FlatBuffer], None]:
    method = getattr(FlatBuffer, name)

    def call(buffer: FlatBuffer) -> None:
        method(buffer)
        nbytes = buffer._storage.nbytes()
        graph.call(lambda: buffer._storage.resize_(nbytes))

    return call


def _run(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    for output, found in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
        if output.data_ptr() != found.data_ptr():
            output.copy_(found)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


_tapes: WeakSet[TapeGraph] = WeakSet()
"""Those that hold tensors of their own, which are no uses by others."""


def _uses_of_memory(tensor: Tensor) -> int:
    memory = tensor.untyped_storage()._cdata
    return uses_of_memory(tensor) - sum(tape.aliases[memory] for tape in _tapes)


_collected = Surroundings._collected
_are_in_place: Any = Surroundings.markers_are_in_place
_end_microbatch = Root.end_microbatch


def _collecting(surroundings: Surroundings) -> Any:
    found = _collected(surroundings)
    surroundings._known = None
    again = _collected(surroundings)
    assert found.of_groups == again.of_groups, "a group has changed, and no change was counted"
    surroundings._known = found
    return found


def _looking_at_markers(surroundings: Surroundings) -> bool:
    found: bool = _are_in_place.fget(surroundings)
    if found:
        assert not any(group.master.marks.were_zeroed for group in surroundings.root.groups)
    return found


def _looking_at_watches(root: Root) -> None:
    _end_microbatch(root)
    assert root.microbatch.index == 0 or all(g.master.marks.is_on for g in root.groups if g.state.takes_part)


@contextmanager
def taped() -> Iterator[None]:
    """Context in which `flatfsdp.replayed` replays on the CPU."""
    with (
        mock.patch("flatfsdp.engine.replay.eager_or_replayed.graphs_on", side_effect=lambda _: TapeGraphs()),
        mock.patch("flatfsdp.engine.storage.master.uses_of_memory", _uses_of_memory),
        mock.patch.object(Surroundings, "_collected", _collecting),
        mock.patch.object(Surroundings, "markers_are_in_place", property(_looking_at_markers)),
        mock.patch.object(Root, "end_microbatch", _looking_at_watches),
    ):
        yield
