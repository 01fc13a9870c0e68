"""`Graphs`: CUDA graphs of one model, on one stream and in one pool of memory.

In:   functions that launch kernels.
Out:  a `Graph` of each, which launches the same kernels again.
Next: `engine/replay/recording.py` knows what a graph leaves behind in the engine.

A microbatch may save the state of the random generator, and restore it (`preserve_rng_state=True` of
`torch.utils.checkpoint`, `torch.random.fork_rng`), and a capture forbids both.  So an eager microbatch tells
how far the generator has got at each restore.  In a recording each restore begins a state of its own, and
before a replay all of them are put where the eager generator would be:

    eager      0 --draws--> 8 (saved) --draws--> 20 --restored--> 8 --draws--> 20 --restored--> 20 ...
    recorded   the generator's own state ----------> first, at 8 -----------> second, at 20 ...
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatfsdp.torch_private import random_states_by, uses_of_memory


@dataclass
class RandomMoves:
    """What a microbatch has done to the random state of its device.

    Attributes:
        restored: distance from the beginning of the microbatch after each restore.
        end: distance at its end.
        draws: whether it has drawn random numbers.
        reseeds: whether it has set a seed, or restored a state of another one, which no recording follows.
    """

    restored: list[int] = field(default_factory=list)
    end: int = 0
    draws: bool = False
    reseeds: bool = False


@contextmanager
def watched(generator: torch.Generator) -> Iterator[RandomMoves]:
    """Context of an eager microbatch; tells what it does to the generator's state."""
    moves = RandomMoves()
    begin, seed = generator.get_offset(), generator.initial_seed()

    def restore(state: Tensor) -> None:
        moves.draws |= generator.get_offset() - begin != moves.end
        generator.set_state(state)
        moves.end = generator.get_offset() - begin
        moves.reseeds |= generator.initial_seed() != seed
        moves.restored.append(moves.end)

    def reseeded() -> None:
        moves.reseeds = True

    with random_states_by(generator, generator.get_state, restore, reseeded):
        yield moves
    end = generator.get_offset() - begin
    moves.draws |= end != moves.end
    moves.end = end


class Graph:
    """A recording of the kernels that a microbatch launches, and the generator states that it draws from.

    Args:
        graph: the graph, before it records.
        generator: the device's default generator, which the microbatch draws from.
        moves: what an eager microbatch of this kind does to its state.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, generator: torch.Generator, moves: RandomMoves) -> None:
        self._graph, self._generator, self._moves = graph, generator, moves
        # Where nothing is drawn, there is no state to restore.
        restored = moves.restored if moves.draws else []
        self.states: Sequence[torch.Generator] = [torch.Generator(generator.device) for _ in restored]
        for state in self.states:
            graph.register_generator_state(state)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of the recording.

        Raises:
            RuntimeError: if it does not restore as often as the eager microbatch.
        """
        own, restores = self._generator.graphsafe_get_state(), 0

        def restore(_state: Tensor) -> None:
            nonlocal restores
            if restores < len(self.states):
                self._generator.graphsafe_set_state(self.states[restores])
            restores += 1

        try:
            # A saved state is not looked at: which one is restored is known from the eager microbatch.
            nothing = partial(torch.empty, 0, dtype=torch.uint8)
            with random_states_by(self._generator, nothing, restore, lambda: None):
                yield
        finally:
            self._generator.graphsafe_set_state(own)
        if restores != len(self._moves.restored):
            raise RuntimeError(
                f"it has restored the random state {restores} times, where an eager microbatch did so "
                f"{len(self._moves.restored)} times"
            )

    def replay(self) -> None:
        """Launches the kernels again: they read what is at the same addresses now, and draw as eager ones."""
        if not self.states:
            self._graph.replay()
            return
        begin, seed = self._generator.get_offset(), self._generator.initial_seed()
        for state, distance in zip(self.states, self._moves.restored, strict=True):
            state.manual_seed(seed)
            state.set_offset(begin + distance)
        self._graph.replay()
        self._generator.set_offset(begin + self._moves.end)

    def reset(self) -> None:
        """Frees the graph."""
        self._graph.reset()


class Graphs:
    """All recordings of one model.

    Eager microbatches run on the graphs' stream, too: autograd nodes stay on the stream they were made on.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
        self._begins, self._ends = torch.cuda.Event(), torch.cuda.Event()
        self._generator = torch.cuda.default_generators[device.index]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context that launches on the stream of the graphs, in order with the caller's stream."""
        caller = torch.cuda.current_stream(self._stream.device)
        self._begins.record(caller)
        self._begins.wait(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        self._ends.record(self._stream)
        self._ends.wait(caller)

    def watched(self) -> AbstractContextManager[RandomMoves]:
        """Context of an eager microbatch; tells what it does to the state of the generator."""
        return watched(self._generator)

    def record(self, function: Callable[[], Any], moves: RandomMoves) -> tuple[Graph, Any]:
        """Records what the function launches, without running it; returns the graph and the result.

        After a failure, the random numbers of earlier graphs are out of step with the generator.

        Args:
            function: runs a microbatch.
            moves: what the same microbatch did to the state of the generator when it was eager.
        """
        empty = torch.cuda.CUDAGraph()
        graph = Graph(empty, self._generator, moves)
        # Relaxed mode: a new table of addresses is copied beside the graph.
        relaxed = torch.cuda.graph(empty, self._pool, self._stream, capture_error_mode="relaxed")
        with _undisturbed(self._generator), relaxed, graph.recorded():
            result = function()
        return graph, result

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool, which PyTorch keeps for the graphs as long as there are any."""
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        return sum(segment["total_size"] for segment in segments)

    def require_nothing_kept(self, outputs: Sequence[Tensor]) -> None:
        """Checks that nothing holds tensors of a finished microbatch, which the next replay overwrites.

        Args:
            outputs: results of the recordings, which the engine itself holds.

        Raises:
            RuntimeError: if such a tensor is still alive.
        """
        gc.collect()
        known = [each.untyped_storage().data_ptr() for each in outputs]
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        blocks = [block for segment in segments for block in segment["blocks"]]
        in_use = [block for block in blocks if block["state"] == "active_allocated"]
        others = [block["size"] for block in in_use if block["address"] not in known]
        one = uses_of_memory(torch.empty((), device=self._stream.device))
        own = [one - 1 + known.count(address) for address in known]
        pairs = zip(outputs, own, strict=True)
        if kept := others + [each.nbytes for each, count in pairs if uses_of_memory(each) > count]:
            raise RuntimeError(
                f"after a microbatch that was recorded, {len(kept)} of its tensors are still there "
                f"({sum(kept)} bytes): the function, or a module, keeps them, and every replay would change "
                "them; keep a number, or a copy made outside of the microbatch"
            )


@contextmanager
def _undisturbed(generator: torch.Generator) -> Iterator[None]:
    """Context of a capture, without garbage collection; if it fails, the generator is restored."""
    before, was_enabled = generator.get_state(), gc.isenabled()
    # Freeing an event or a graph breaks a running capture.
    gc.collect()
    gc.disable()
    try:
        yield
    except BaseException:
        # A failed capture would leave it captured for good.
        fresh = torch.Generator(generator.device)
        fresh.set_state(before)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise
    finally:
        if was_enabled:
            gc.enable()


def graphs_on(device: torch.device) -> Graphs | None:
    """Graphs for this device; None on CPU, which has none."""
    return Graphs(device) if device.type == "cuda" else None
