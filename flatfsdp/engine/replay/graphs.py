"""`Graphs`: CUDA graphs of one model, on one stream and in one pool of memory.

In:   functions that launch kernels.
Out:  a `Graph` of each, which launches the same kernels again.
Next: `recording.py` knows what a graph leaves behind in the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """What was launched by a function."""

    def replay(self) -> None:
        """Launches it again, with what is in the same memory now."""


class Graphs:
    """All recordings of one model.

    Eager microbatches run on their stream, too: autograd's nodes stay on the stream on which they were made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside runs on the stream of the graphs, in order with the caller's."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def record(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of what the function launches, which has not run yet, and its result."""
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a table of addresses that is new is copied beside the graph.
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"),
        ):
            result = function()
        return graph, result

    @property
    def nbytes(self) -> int:
        """Of the pool: PyTorch gives it to nobody else as long as there are graphs."""
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        return sum(segment["total_size"] for segment in segments)

    def kept(self, known: Collection[int]) -> list[int]:
        """Bytes of the tensors that are still there of those that recorded functions have made.

        Args:
            known: addresses that may be there.
        """
        gc.collect()
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        blocks = (block for segment in segments for block in segment["blocks"])
        return [
            block["size"]
            for block in blocks
            if block["state"] == "active_allocated" and block["address"] not in known
        ]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An event or a graph that is freed while another one is captured breaks the capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def graphs_on(device: torch.device) -> Graphs | None:
    """None where there are no graphs: on CPU."""
    return Graphs(device) if device.type == "cuda" else None
