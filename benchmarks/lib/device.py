"""Measurements of a step on a device: its time, the host's, and its memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

GIB = 2**30


class Clock:
    """Marks on the device's own time line, so that the host may run ahead; on CPU, wall-clock time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        """Adds a mark."""
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between consecutive marks; waits for the last one."""
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in zip(self._times, self._times[1:], strict=False)]


def timed(step: Callable[[], object], steps: int, device: torch.device, *, warmup: int = 0) -> list[float]:
    """Milliseconds of each of `steps` steps, back to back, so that the host runs ahead of the device.

    Args:
        step: runs one step.
        steps: number of timed steps.
        device: where they run.
        warmup: number of steps before those.
    """
    for _ in range(warmup):
        step()
    clock = Clock(device)
    clock.mark()
    for _ in range(steps):
        step()
        clock.mark()
    return clock.gaps()


def in_a_row(call: Callable[[], object], count: int, device: torch.device) -> Callable[[], object]:
    """Makes a function that calls another one several times; on a GPU as one CUDA graph.

    Args:
        call: launches kernels and collectives, and waits for nothing.
        count: number of calls.
        device: where they run.
    """

    def calls() -> None:
        for _ in range(count):
            call()

    if device.type != "cuda":
        return calls
    call()
    graph = torch.cuda.CUDAGraph()
    # Relaxed: NCCL's own thread may ask for the state of events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        calls()
    return graph.replay


def start_together(device: torch.device) -> None:
    """Waits for all ranks and their devices; peaks of memory count from here."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def host_ms(step: Callable[[], object]) -> float:
    """Milliseconds that the host takes to launch one step on a GPU."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return min(times)


def allocated_gib(device: torch.device) -> float:
    """Memory allocated now; 0 on CPUs, like all of the following."""
    return torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0


def peak_gib(device: torch.device) -> float:
    """Peak of allocated memory since `start_together`."""
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


def peak_reserved_gib(device: torch.device) -> float:
    """Peak of memory that PyTorch reserved since `start_together`, including memory pools of CUDA graphs."""
    return torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else 0.0


def free_memory(device: torch.device) -> None:
    """Frees unreferenced models: they are full of cycles, and compiled code keeps what was traced."""
    torch._dynamo.reset()
    # Twice: objects kept by a tensor's graph are found only after that tensor is gone.
    for _ in range(2):
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
