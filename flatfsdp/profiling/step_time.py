"""Figures of a training run: a GPU's time during one step, the environment of a run, and both as JSON.

In:   a torch.profiler recording of one rank's step.
Out:  spans, and a `Breakdown` of them by class of kernel.
Next: `examples/timeline.py` draws the spans.

    |--- GEMM ---|   |-- memory-bound --|                    busy: length of the union of a class's kernels
             |------ communication ------|                   alone: the part of it beside no other class
                ^ overlap                    ^ gap
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import profile

from flatfsdp.comm.launch import Rank

COMMUNICATION, ATTENTION, GEMM, MEMORY = "communication", "attention", "GEMM", "memory-bound"
CLASSES = (GEMM, ATTENTION, MEMORY, COMMUNICATION)

PATTERNS = (
    # With `tp_overlap`, copies between GPUs are part of a GEMM.
    (COMMUNICATION, r"nccl|gloo|^c10d::|memcpy ptop"),
    # Inductor names its kernels after what they replace, such as casts for `_scaled_mm`.
    (MEMORY, r"^triton_(poi|red|per|for)_"),
    (ATTENTION, r"sdpa|fmha|flash|attention|cudnn::fusion"),
    (GEMM, r"gemm|nvjet|cutlass|xmma|splitk|^triton_tem_|^aten::((add|b|_scaled_)?mm|matmul|linear)$"),
)
"""The first pattern found in a kernel's or CPU operator's name gives its class; others are memory-bound."""


class Span(NamedTuple):
    """One kernel, or one copy by the GPU; times in microseconds.

    `lane` is the number of its stream or, on a CPU, of its thread.  `group` names the rank group of a
    collective, such as "TP", if it is known.
    """

    name: str
    start: float
    end: float
    lane: int = 0
    group: str = ""


class Interval(NamedTuple):
    """A span of time, in microseconds."""

    start: float
    end: float


@dataclass(frozen=True)
class Share:
    """Time of one class of kernels, in milliseconds.

    Attributes:
        busy_ms: time in which at least one of its kernels ran.
        alone_ms: the part of it in which no other class's ran.
        kernels: number of kernels.
    """

    busy_ms: float
    alone_ms: float
    kernels: int


@dataclass(frozen=True)
class Breakdown:
    """The time of one step.

    Attributes:
        step_ms: from the first kernel's start to the last one's end; the sum of the following, with each
            class's time alone.
        gaps_ms: time without a kernel.
        overlap_ms: time with kernels of two classes or more.
        shares: by class.
        longest: kernels that took most time: class, name and milliseconds, all calls together.
    """

    step_ms: float
    gaps_ms: float
    overlap_ms: float
    shares: dict[str, Share]
    longest: list[tuple[str, str, float]]


def kernel_class(name: str) -> str:
    """The class of a kernel, by its name."""
    return next((found for found, pattern in PATTERNS if re.search(pattern, name.lower())), MEMORY)


def spans_of(recorded: profile) -> list[Span]:
    """Everything that ran on the GPU, without annotations, which the profiler lists there, too."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end, event.device_resource_id or 0)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def breakdown(spans: Sequence[Span], longest: int = 12) -> Breakdown | None:
    """Sums up spans by class; None if nothing ran."""
    if not spans:
        return None
    by_class: dict[str, list[Span]] = {name: [] for name in CLASSES}
    by_name: dict[str, float] = {}
    for span in spans:
        by_class[kernel_class(span.name)].append(span)
        by_name[span.name] = by_name.get(span.name, 0.0) + span.end - span.start
    step = max(span.end for span in spans) - min(span.start for span in spans)
    busy = length(union(spans))
    shares = {}
    for name, members in by_class.items():
        others = union(span for other, found in by_class.items() if other != name for span in found)
        shares[name] = Share(length(union(members)) / 1e3, (busy - length(others)) / 1e3, len(members))
    top = sorted(by_name.items(), key=lambda item: -item[1])[:longest]
    return Breakdown(
        step_ms=step / 1e3,
        gaps_ms=(step - busy) / 1e3,
        overlap_ms=busy / 1e3 - sum(share.alone_ms for share in shares.values()),
        shares=shares,
        longest=[(kernel_class(name), name, us / 1e3) for name, us in top],
    )


def union(spans: Iterable[Span | Interval]) -> list[Interval]:
    """The intervals in which at least one of them runs: disjoint, in order."""
    found: list[Interval] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if found and start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(end, found[-1].end))
        else:
            found.append(Interval(start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The total length of the intervals."""
    return sum(end - start for start, end in intervals)


def environment(rank: Rank) -> dict[str, Any]:
    """Versions, device and ranks; collective over all ranks."""
    cuda = rank.device.type == "cuda"
    gpus: list[str | None] = [None] * rank.world
    if cuda:
        dist.all_gather_object(gpus, str(torch.cuda.get_device_properties(rank.device).uuid))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(rank.device) if cuda else f"CPU ({platform.machine()})",
        "backend": dist.get_backend(),
        "world_size": rank.world,
        "gpus": len(set(gpus) - {None}),  # ranks of several hosts may be emulated on one, and share its GPUs
    }


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serializes to JSON with null for NaN and infinite numbers, which JSON lacks; paths become strings."""
    return json.dumps(_plain(value), indent=indent, default=str, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
