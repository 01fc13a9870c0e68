"""Timing of the host for `replay.py`: one microbatch after the other, each with an idle GPU.

In:   a `Job`: depths of a model.
Out:  a `HostTime` for each depth, precision and place in a step.
Next: `replay.py` shows and draws them.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp import microbatches, replayed
from flatfsdp.comm.launch import Rank
from lib.device import free_memory
from lib.hf_engines import Engine, TrainedHFLlama, Variant
from lib.hf_models import SIZES
from lib.llama import LlamaConfig
from lib.measuring import SEED

MICROBATCHES = 4
WARM_UP = 6
"""Number of steps before all microbatches are replayed: eager ones, and one that records."""

ENGINES = (Engine.flat_fused_replay, Engine.flat_fused_fp8_replay)


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        layers: depths of the model, each measured separately.
        tokens: tokens of a microbatch.
        reshard: True for ZeRO-3, False for ZeRO-2.
        steps: number of timed steps of `MICROBATCHES` microbatches each.
    """

    layers: tuple[int, ...]
    tokens: int
    reshard: bool
    steps: int

    def config(self, layers: int) -> LlamaConfig:
        """The sizes of `hf.py --size 1b`, with a smaller vocabulary, which does not affect the host."""
        return replace(SIZES["1b"], layers=layers, seq=self.tokens, vocab=32_000)


@dataclass(frozen=True)
class HostTime:
    """Times of one kind of microbatch; microseconds, medians, on the slowest rank.

    Attributes:
        layers: depth of the model.
        engine: bf16 or FP8.
        place: first, middle or last of its step.
        nodes: number of nodes of its graph: kernels, copies, collectives.
        replay_us: time of a replayed microbatch.
        launch_us: the part of it inside the CUDA driver's launch of the graph.
        eager_us: time of an eager one.
    """

    layers: int
    engine: str
    place: str
    nodes: int
    replay_us: float
    launch_us: float
    eager_us: float


class Launched(NamedTuple):
    """A launched graph, and its launch time."""

    nodes: int
    microseconds: float


class CountedGraph(torch.cuda.CUDAGraph):
    """Records its launches; the graph is kept as recorded, so that its nodes can be counted."""

    launches: list[Launched]

    def __init__(self) -> None:
        super().__init__(True)  # type: ignore[call-arg]

    def capture_end(self) -> None:
        """Ends the capture, and counts the nodes."""
        super().capture_end()
        self._nodes = _nodes_of(self)

    def replay(self) -> None:
        """Replays, and records the time of the launch."""
        start = time.perf_counter()
        super().replay()
        self.launches.append(Launched(self._nodes, 1e6 * (time.perf_counter() - start)))


def _nodes_of(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes returned {error}")
    return count.value


def measure_all(rank: Rank, job: Job) -> list[HostTime]:
    """Measures all depths; all ranks return the same."""
    return [
        each for layers in job.layers for engine in ENGINES for each in measure(rank, job, layers, engine)
    ]


def measure(rank: Rank, job: Job, layers: int, engine: Engine) -> Iterator[HostTime]:
    """Measures one model, eager and replayed."""
    mine = _on_rank(rank, job, layers, engine)
    free_memory(rank.device)
    everyones: list[Any] = [None] * rank.world
    dist.all_gather_object(everyones, mine)
    for place, (nodes, *_) in mine.items():
        slowest = (max(times) for times in zip(*(found[place][1:] for found in everyones), strict=True))
        yield HostTime(layers, engine.value, place, nodes, *slowest)


def _on_rank(rank: Rank, job: Job, layers: int, engine: Engine) -> dict[str, tuple[int, float, float, float]]:
    workload = TrainedHFLlama(job.config(layers))
    batches = workload.batches(rank, MICROBATCHES)
    launches: list[Launched] = []
    torch.manual_seed(SEED)
    with workload.start(Variant(engine), job.reshard, rank.device) as (model, optimizer, loss_of, _):

        def forward_backward(batch: Any) -> Tensor:
            loss = loss_of(batch)
            loss.backward()
            return loss.detach()

        def times_of(run: Callable[[Any], Tensor]) -> dict[str, float]:
            times: dict[str, list[float]] = defaultdict(list)
            for step in range(WARM_UP + job.steps):
                if step == WARM_UP:
                    launches.clear()
                for index, batch in enumerate(microbatches(model, batches)):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    run(batch)
                    microseconds = 1e6 * (time.perf_counter() - start)
                    if step >= WARM_UP:
                        times[_place(index)].append(microseconds)
                optimizer.step()
                optimizer.zero_grad()
            return {place: statistics.median(of_place) for place, of_place in times.items()}

        eager = times_of(forward_backward)
        CountedGraph.launches = launches
        with mock.patch("torch.cuda.CUDAGraph", CountedGraph):
            step = replayed(model, forward_backward)
            taken = times_of(step)
    if len(launches) != job.steps * MICROBATCHES:
        raise RuntimeError(f"{len(launches)} of {job.steps * MICROBATCHES} microbatches were replayed")
    found = {}
    for place in taken:
        of_place = [launch for index, launch in enumerate(launches) if _place(index % MICROBATCHES) == place]
        launch_us = statistics.median(launch.microseconds for launch in of_place)
        found[place] = (of_place[0].nodes, taken[place], launch_us, eager[place])
    return found


def _place(index: int) -> str:
    return "first" if index == 0 else "last" if index == MICROBATCHES - 1 else "middle"
