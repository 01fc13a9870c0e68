"""`Recording`: one microbatch as a CUDA graph, with its inputs and outputs at fixed addresses.

In:   a function that runs a microbatch, inputs at addresses of their own.
Out:  the same kernels and collectives again, for other inputs, with one launch by the host.
Next: `restored_state.py` restores the engine's state after each replay; `eager_or_replayed.py` decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.cuda_graphs import Graphs, RandomMoves
from flatfsdp.engine.replay.preconditions import Facts, Surroundings
from flatfsdp.engine.replay.restored_state import RestoredState
from flatfsdp.engine.step.reduce import Reduced
from flatfsdp.engine.step.root import Root
from flatfsdp.fp8.delayed_scaling import Arena

Outputs = list[Any]
Run = Callable[[Sequence[Tensor]], Outputs]
"""Runs a microbatch on these inputs, and returns its outputs."""


class Recording:
    """One kind of microbatch, of one shape.

    Args:
        run: runs the microbatch.
        inputs: tensors on the device; replays read them at these addresses.
        moves: what an eager microbatch of this kind does to the random state.

    Attributes:
        facts: what it takes for granted; set by who keeps it.
        graph: the graph; to free it is to reset it, once the kernels that it has launched have ended.
        outputs: tensors that the next replay overwrites.
        state: what it leaves in the engine.

    Raises:
        RuntimeError: if something in the microbatch cannot be recorded.
    """

    def __init__(
        self, graphs: Graphs, surroundings: Surroundings, run: Run, inputs: list[Tensor], moves: RandomMoves
    ) -> None:
        self.facts: Facts = ()
        self._root = root = surroundings.root
        self._inputs = inputs
        self._arenas = surroundings.arenas
        # Facts tell them by their numbers, which no other object may get.
        self._keeps = surroundings.buffers_of_scales()
        from_autograd = autograds_of(root)
        self.state = RestoredState(root)
        # What is cached was made outside of the graph, and no replay would refresh it.
        self._renew()
        with _recorded(root, self._arenas, self.state.reduced), self.state.noted(surroundings.scalings):
            before = root.microbatch
            ended = (before.step + 1, 0) if before.is_last else (before.step, before.index + 1)
            self.graph, self.outputs = graphs.record(partial(run, inputs), moves)
            if (root.microbatch.step, root.microbatch.index) != ended:
                raise RuntimeError("it ran no backward of the model, or several, and a microbatch has one")
            if autograds_of(root) != from_autograd:
                raise RuntimeError("it adds a penalty on model.parameters(), whose gradients are not reduced")

    def replay(self, inputs: list[Tensor], *, is_first: bool = False) -> Outputs:
        """Runs another microbatch of the same kind and shape; returns copies of its outputs.

        Args:
            inputs: its tensors.
            is_first: runs the microbatch that was just recorded, whose inputs are there, and after which the
                engine's state is already.
        """
        if not is_first and inputs:
            torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self.graph.replay()
        # What is cached belongs to this recording: others, and eager microbatches, read the scales again.
        self._renew()
        if is_first:
            self._root.publish(self.state.reduced)
        else:
            self.state.restore()
        return [each.clone() if isinstance(each, Tensor) else each for each in self.outputs]

    def _renew(self) -> None:
        """Makes casts read this recording's scales instead of cached ones."""
        for arena in self._arenas:
            arena.renew()


@contextmanager
def _recorded(root: Root, arenas: Sequence[Arena], reduced: list[Reduced]) -> Iterator[None]:
    """Context that records a microbatch; if that fails, the engine is left as after any failed step.

    Args:
        reduced: gets what the microbatch reduces.
    """
    # Nothing has run when it is published: there is no gradient yet that an optimizer could take.
    publish, root.publish = root.publish, reduced.extend
    # A recorded collective runs later, and more than once: the number that it carries would be an old one.
    root.shared.checks = False
    for arena in arenas:
        arena.is_recorded = True
    try:
        yield
    except BaseException as error:
        # None of it will run, so nothing may wait for it: events of a capture that was given up never happen.
        root.reducer.forget(waits=False)
        for group in root.groups:
            # Gathered, for all that is known: nothing waits for the event of a gather that never runs.
            group.become(group.state.facts())
        # The whole step, also where gradients are off around the microbatch, which may turn them on inside.
        with torch.enable_grad():
            root.fail_forward()
        if not isinstance(error, RuntimeError):
            raise
        raise RuntimeError(
            "the microbatch cannot be recorded as a CUDA graph: it, or a module, waits for the GPU (.item(), "
            f"a branch on a tensor), or runs another number of backwards than one ({error}); compute that "
            "outside of it, or train without flatfsdp.replayed"
        ) from error
    finally:
        root.publish, root.shared.checks = publish, True
        for arena in arenas:
            arena.is_recorded = False


def autograds_of(root: Root) -> int:
    """Number of gradients that autograd has brought to the optimizer's parameters itself so far."""
    return sum(group.state.from_autograd for group in root.groups)
