"""A picture of one step: what ran when on each stream, by class of kernel.

In:   spans of `trace.py`.
Out:  a PNG.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from flatfsdp.trace import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    GEMM,
    MEMORY,
    Breakdown,
    Span,
    breakdown,
    kernel_class,
)

COLORS = {GEMM: "#4e79a7", ATTENTION: "#f28e2b", MEMORY: "#76b7b2", COMMUNICATION: "#e15759"}


def draw_timeline(spans: Sequence[Span], path: Path, title: str, lane: str = "stream") -> None:
    """One row a stream, all on one scale of time; below the title, how much communication was hidden.

    Args:
        lane: what a row is called, "stream" or "thread".

    Raises:
        ValueError: if there are no spans.
    """
    found = breakdown(spans)
    if found is None:
        raise ValueError("the trace has no spans, so there is nothing to draw")
    begin = min(span.start for span in spans)
    lanes = list(dict.fromkeys(span.lane for span in sorted(spans, key=lambda span: span.start)))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in spans:
        of_lane = bars.setdefault((lanes.index(span.lane), kernel_class(span.name)), [])
        of_lane.append(((span.start - begin) / 1e3, (span.end - span.start) / 1e3))
    figure = Figure(figsize=(12, 1.8 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for (row, name), pieces in bars.items():
        axes.broken_barh(pieces, (row - 0.4, 0.8), color=COLORS[name])
    axes.set_yticks(range(len(lanes)), [f"{lane} {number}" for number in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.set_title(f"{title}\n{_summary(found)}", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    used = [name for name in CLASSES if found.shares[name].kernels]
    patches = [axes.barh(0, 0, color=COLORS[name], label=name) for name in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(used), frameon=False)
    figure.savefig(path, dpi=150)


def _summary(found: Breakdown) -> str:
    communication = found.shares[COMMUNICATION]
    # Differences of sums may be less than nothing by a rounding.
    hidden = max(0.0, communication.busy_ms - communication.alone_ms)
    return (
        f"{found.step_ms:.1f} ms; communication {communication.busy_ms:.1f} ms, of which {hidden:.1f} beside "
        f"other kernels; nothing runs for {found.gaps_ms:.1f} ms"
    )
