"""`Graphs`: CUDA graphs of one model, on one stream and in one pool of memory.

In:   functions that launch kernels.
Out:  a `Graph` of each, which launches the same kernels again.
Next: `recording.py` knows what a graph leaves behind in the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from flatfsdp.torch_private import uses_of_memory


class Graph(Protocol):
    """What was launched by a function."""

    def replay(self) -> None:
        """Launches it again, with what is in the same memory now."""

    def reset(self) -> None:
        """Frees it."""


class Graphs:
    """All recordings of one model.

    Eager microbatches run on their stream, too: autograd's nodes stay on the stream that made them.
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
        """The graph of what the function launches, which has not run yet, and its result.

        If that fails, random numbers of earlier graphs are not in step with the generator any more.
        """
        graph = torch.cuda.CUDAGraph()
        # Relaxed: a table of addresses that is new is copied beside the graph.
        with (
            _sound_generator(self._device),
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"),
        ):
            result = function()
        return graph, result

    @property
    def nbytes(self) -> int:
        """Bytes of the memory pool, which PyTorch keeps for the graphs as long as there are any."""
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        return sum(segment["total_size"] for segment in segments)

    def kept(self, outputs: Sequence[Tensor]) -> list[int]:
        """Bytes of the tensors that are still there of those that recorded functions have made.

        Args:
            outputs: all that may be there.
        """
        gc.collect()
        known = [each.untyped_storage().data_ptr() for each in outputs]
        segments = torch.cuda.memory.memory_snapshot(mempool_id=self._pool)
        blocks = [block for segment in segments for block in segment["blocks"]]
        others = [
            block["size"]
            for block in blocks
            if block["state"] == "active_allocated" and block["address"] not in known
        ]
        one = uses_of_memory(torch.empty((), device=self._device))
        uses = (uses_of_memory(each) - one + 1 for each in outputs)
        aliased = [
            each.nbytes
            for each, address, count in zip(outputs, known, uses, strict=True)
            if count > known.count(address)
        ]
        return others + aliased


@contextmanager
def _sound_generator(device: torch.device) -> Iterator[None]:
    """A capture that fails would leave the device's default generator captured for good."""
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        yield
    except BaseException:
        fresh = torch.Generator(device)
        fresh.set_state(before)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise


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
