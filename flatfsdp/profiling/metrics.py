"""`Metrics`: speed, memory and replayed microbatches of a training run, over all ranks.

In:   the tokens of each microbatch, counted by the training loop.
Out:  figures as a dict, each time the loop asks for them.
Next: `logs.py` writes them; trainers pass them to their own loggers.

Only `report` and `paused` wait for the GPU:

    | data | microbatches | optimizer | data | microbatches | optimizer | report | checkpoint | data ...
    |<----------------------- one interval, by the wall clock ------------------->|   paused   |<----
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_gather
from flatfsdp.comm.device import indexed
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.engine.replay.eager_or_replayed import Replayed

GemmName = Literal["fp32", "bf16", "fp8"]
"""Precision of a model's GEMMs."""

# NVIDIA's data sheets give twice as many, with 2:4 sparsity; the first one's decimals are of the white paper.
_HOPPER_SXM = {"bf16": 989.4e12, "fp8": 1978.9e12}  # resources.nvidia.com/en-us-tensor-core
_HOPPER_NVL = {"bf16": 835.5e12, "fp8": 1670.5e12}  # 1,671 and 3,341: nvidia.com/en-us/data-center/h200
_A100 = {"bf16": 312e12}  # with SXM and PCIe: nvidia.com/en-us/data-center/a100
PEAKS = {
    "NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H100 PCIe": {"bf16": 756.5e12, "fp8": 1513e12},  # 1,513 and 3,026: H100's data sheet of 2022
    "NVIDIA H200": _HOPPER_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    "NVIDIA B200": {"bf16": 2250e12, "fp8": 4500e12},  # HGX, 1,000 W: nvdam.widen.net/s/wwnsxrhm2w
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
}
"""Operations per second of dense GEMMs, from NVIDIA's data sheets, by the name that CUDA gives the GPU.

Names are compared as a whole: a part of a GPU (MIG) has a longer one, and another peak.  FP32 has no entry,
as TF32 decides what it is.
"""

Figures = dict[str, float | None]
"""Figures by name; None for what is not known."""


class Metrics:
    """Speed and memory of a training loop, over all ranks, for as long as it runs.

        metrics = Metrics(device, flops_per_token=flops_per_token(config))
        for step, batch in enumerate(batches):
            model(batch).backward()
            metrics.count(batch.numel())
            optimizer.step()
            if step % 10 == 9:
                print(metrics.report(grad_norm=optimizer.grad_norm))

    An interval lasts from one `report` to the next, by the wall clock.  `report` waits for the GPU, and sends
    one small message; nothing else does in a step.

    Args:
        device: device of this rank's model.
        flops_per_token: operations of forward and backward of the whole model, per token; None: `count` says
            how many, or there is no MFU.
        gemms: precision of the model's GEMMs, which decides the peak of a GPU.
        replayed: function that runs the microbatches, made by `flatfsdp.replayed`.
        peak_flops: dense operations per second of this rank's GPU; None: that of `PEAKS` by its name.

    Attributes:
        peak_flops: the same number; None if it is not known, and on CPUs.

    Raises:
        ValueError: for an unknown precision, or a number that is not positive.
        TypeError: if `replayed` is another function.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        flops_per_token: float | None = None,
        gemms: GemmName = "bf16",
        replayed: Replayed[Any, Any] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if gemms not in get_args(GemmName):
            raise ValueError(f"gemms is {gemms!r}; it has to be one of {', '.join(get_args(GemmName))}")
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and not value > 0:
                raise ValueError(f"Metrics: {name} is {value}; it has to be more than 0, or None")
        if replayed is not None and not isinstance(replayed, Replayed):
            raise TypeError(f"Metrics: replayed is {replayed!r}; pass what flatfsdp.replayed returns")
        self._device = indexed(torch.device(device))
        self._flops_per_token, self._replayed, self._gemms = flops_per_token, replayed, gemms
        if peak_flops is None and self._device.type == "cuda":
            peak_flops = PEAKS.get(torch.cuda.get_device_name(self._device), {}).get(gemms)
        self.peak_flops = peak_flops
        self._ranks = Ranks.of(default_group())
        self.restart()

    def __repr__(self) -> str:
        """What MFU is a share of."""
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        peak = "no known peak" if self.peak_flops is None else f"a peak of {self.peak_flops / 1e12:g} TFLOP/s"
        return f"Metrics({gpu}, {self._gemms}: {peak})"

    def restart(self) -> None:
        """Begins a new interval, and forgets what was counted since the last report."""
        self._tokens = self._flops = self._loading = self._paused = 0.0
        self._replays, self._calls = self._counts()
        self._start = time.perf_counter()

    def count(self, tokens: float, flops: float | None = None) -> None:
        """Counts tokens that this rank has trained on.

        Args:
            tokens: number of tokens.  Ranks that share a sequence, by tensor or pipeline parallelism, count a
                part each, so that all parts add up to it.
            flops: operations of their forward and backward; default: `flops_per_token` for each.
        """
        self._tokens += tokens
        self._flops += tokens * (self._flops_per_token or 0.0) if flops is None else flops

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which this rank waits for data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._loading += time.perf_counter() - begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count, between two steps: an evaluation, or a checkpoint."""
        # Steps before it may still run on the GPU, and their time counts.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def report(self, **values: Tensor | float | None) -> Figures:
        """Figures of all ranks since the last report; collective over all ranks, between two steps.

        Args:
            values: more figures of this rank, such as a loss or the gradient norm: 0-dim tensors, which are
                read along with the others, or numbers.

        Returns:
            `values` as numbers, and, None if not known:

            - tokens_per_s: of all ranks together.
            - tflops_per_rank: mean of the ranks, in 10^12 operations per second.
            - mfu: the same as a share of the peak, from 0 to 1.
            - peak_gib: most memory that a rank's tensors took since the program began or reset its peaks; on
                CPUs the process's memory.
            - peak_reserved_gib: most memory that PyTorch reserved for a rank since then.
            - replayed: share of microbatches that were replayed, of all microbatches of all ranks.
            - data_s: seconds in `loading` of the rank that waited longest.
            - data_share: their share of the interval.

        Raises:
            RuntimeError: on all ranks, if others make another collective call.
        """
        ranks, (replays, calls) = self._ranks, self._counts()
        peak = float("nan") if self.peak_flops is None else self.peak_flops
        counted = (self._tokens, self._flops, replays - self._replays, calls - self._calls, self._loading)
        figures = (*counted, peak, *self._memory(), self._elapsed())
        own = torch.tensor(figures, dtype=torch.float64, device=self._device)
        everyones = own.new_empty(ranks.size * len(own))
        if ranks.size == 1:
            everyones.copy_(own)
        else:
            with launch(ranks, Identity(Action.FIGURES), self._device):
                all_gather(everyones, own, ranks)
        tensors = {key: each for key, each in values.items() if isinstance(each, Tensor)}
        scalars = [each.detach().to(everyones).reshape(1) for each in tensors.values()]
        # The one wait for the GPU.
        read = torch.cat([everyones, *scalars]).tolist()
        elapsed = self._elapsed()
        self.restart()
        # One column a figure, with a number of each rank.
        columns = [read[column : len(everyones) : len(own)] for column in range(len(own))]
        tokens, flops, replays, calls, _, peak, *_ = map(sum, columns)
        loading, allocated, reserved = (max(columns[column]) for column in (4, 6, 7))
        # Ranks come here together, but some may have begun their first interval earlier.
        elapsed = max(elapsed, *columns[8])
        return {
            **values,
            **dict(zip(tensors, read[len(everyones) :], strict=True)),
            "tokens_per_s": tokens / elapsed if tokens else None,
            "tflops_per_rank": flops / elapsed / ranks.size / 1e12 if flops else None,
            # A sum with NaN is NaN: a rank without a known peak leaves all without one.
            "mfu": flops / elapsed / peak if flops and peak == peak else None,
            "peak_gib": allocated / 2**30,
            "peak_reserved_gib": reserved / 2**30 if reserved else None,
            "replayed": replays / calls if calls else None,
            "data_s": loading,
            "data_share": loading / elapsed,
        }

    def _elapsed(self) -> float:
        """Seconds of the interval so far."""
        return time.perf_counter() - self._start - self._paused

    def _counts(self) -> tuple[int, int]:
        """Microbatches replayed, and all that could have been."""
        return (0, 0) if self._replayed is None else (self._replayed.replays, self._replayed.calls)

    def _memory(self) -> tuple[int, int]:
        """Most bytes of this process: allocated and reserved on the GPU; without one, on the host, and 0."""
        if self._device.type == "cuda":
            peaks = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            allocated, reserved = (int(peak(self._device)) for peak in peaks)
            return allocated, reserved
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10, 0
