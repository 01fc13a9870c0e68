"""`Graphs`: CUDA graphs of one model, on one stream and in one pool of memory.

In:   functions that launch kernels.
Out:  a `Graph` of each, which launches the same kernels again.
Next: `recording.py` knows what a graph leaves behind in the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from flatfsdp.engine.replay.random_state import RandomMoves, RecordedRandomStates, watched
from flatfsdp.torch_private import uses_of_memory


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
        graph = torch.cuda.CUDAGraph()
        random = RecordedRandomStates(self._generator, moves)
        for state in random.states:
            graph.register_generator_state(state)
        # Relaxed mode: a new table of addresses is copied beside the graph.
        relaxed = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="relaxed")
        with _undisturbed(self._generator), relaxed, random.recorded():
            result = function()
        return Graph(graph, random), result

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool, which PyTorch keeps for the graphs as long as there are any."""
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        return sum(segment["total_size"] for segment in segments)

    def kept(self, outputs: Sequence[Tensor]) -> list[int]:
        """Bytes of each tensor from a recording that something other than the engine still holds.

        Args:
            outputs: results of the recordings, which the engine itself holds.
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
        return others + [each.nbytes for each, count in pairs if uses_of_memory(each) > count]


class Graph:
    """A recording of the kernels that a function launches, and the generator states that it draws from."""

    def __init__(self, graph: torch.cuda.CUDAGraph, random: RecordedRandomStates) -> None:
        self._graph, self._random = graph, random

    def replay(self) -> None:
        """Launches the kernels again; they read what is at the same addresses now."""
        with self._random.replayed():
            self._graph.replay()

    def reset(self) -> None:
        """Frees the graph."""
        self._graph.reset()


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
