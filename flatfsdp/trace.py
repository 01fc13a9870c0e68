"""What a GPU did during one step: time by class of kernel, and time without any.

In:   a torch.profiler recording of one rank's step.
Out:  spans, and a `Breakdown` of them.
Next: `timeline.py` draws the spans.

    |--- GEMM ---|   |-- memory-bound --|                    busy: length of the union of a class's kernels
             |------ communication ------|                   alone: the part of it beside no other class
                ^ overlap                    ^ gap
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

COMMUNICATION, ATTENTION, GEMM, MEMORY = "communication", "attention", "GEMM", "memory-bound"
CLASSES = (GEMM, ATTENTION, MEMORY, COMMUNICATION)

PATTERNS = (
    (COMMUNICATION, r"nccl|gloo|^c10d::"),
    # Inductor names its kernels after what they replace, such as casts for `_scaled_mm`.
    (MEMORY, r"^triton_(poi|red|per|for)_"),
    (ATTENTION, r"sdpa|fmha|flash|attention|cudnn::fusion"),
    (GEMM, r"gemm|nvjet|cutlass|xmma|splitk|^triton_tem_|^aten::((add|b|_scaled_)?mm|matmul|linear)$"),
)
"""The first that is found in the name of a kernel, or of a CPU's operator, says its class; all others are
memory-bound."""


class Span(NamedTuple):
    """One kernel, or one copy by the GPU; times in microseconds.

    `lane` is the number of its stream; of what ran on a CPU, that of its thread.
    """

    name: str
    start: float
    end: float
    lane: int = 0


@dataclass(frozen=True)
class Share:
    """Of one class, in milliseconds.

    Attributes:
        busy: time in which at least one of its kernels ran.
        alone: the part of it in which no other class's did.
        kernels: their number.
    """

    busy_ms: float
    alone_ms: float
    kernels: int


@dataclass(frozen=True)
class Breakdown:
    """One step.

    Attributes:
        step_ms: from the first kernel's start to the last one's end; the sum of what follows, with each
            class's time alone.
        gaps_ms: no kernel ran.
        overlap_ms: kernels of two classes or more ran.
        shares: by class.
        longest: kernels that took most time: their class, name and milliseconds, all calls together.
    """

    step_ms: float
    gaps_ms: float
    overlap_ms: float
    shares: dict[str, Share]
    longest: list[tuple[str, str, float]]


def kernel_class(name: str) -> str:
    return next((found for found, pattern in PATTERNS if re.search(pattern, name.lower())), MEMORY)


def spans_of(recorded: profile) -> list[Span]:
    """Everything that ran on the GPU; the profiler lists annotations there, too."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end, event.device_resource_id or 0)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def cpu_spans_of(recorded: profile) -> list[Span]:
    """The outermost operators that ran on the CPU: instead of kernels, where there is no GPU."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end, event.thread)
        for event in recorded.events() or ()
        if _is_operator(event) and not _is_operator(event.cpu_parent)
    ]


def _is_operator(event: FunctionEvent | None) -> bool:
    """Neither a range nor a node of autograd."""
    return event is not None and not event.is_async and re.match(r"\w+::|gloo:", event.name) is not None


def breakdown(spans: Sequence[Span], longest: int = 12) -> Breakdown | None:
    """None if nothing ran."""
    if not spans:
        return None
    by_class: dict[str, list[Span]] = {name: [] for name in CLASSES}
    by_name: dict[str, float] = {}
    for span in spans:
        by_class[kernel_class(span.name)].append(span)
        by_name[span.name] = by_name.get(span.name, 0.0) + span.end - span.start
    step = max(span.end for span in spans) - min(span.start for span in spans)
    busy = _covered(spans)
    shares = {}
    for name, members in by_class.items():
        others = _covered(span for other, found in by_class.items() if other != name for span in found)
        shares[name] = Share(_covered(members) / 1e3, (busy - others) / 1e3, len(members))
    top = sorted(by_name.items(), key=lambda item: -item[1])[:longest]
    return Breakdown(
        step_ms=step / 1e3,
        gaps_ms=(step - busy) / 1e3,
        overlap_ms=busy / 1e3 - sum(share.alone_ms for share in shares.values()),
        shares=shares,
        longest=[(kernel_class(name), name, us / 1e3) for name, us in top],
    )


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
