"""A picture of one step: when it computes, when it communicates, and where it does both.

In:   a torch.profiler recording of one rank's step.
Out:  a PNG, and a small JSON file from which it can be drawn again.

    compute         |GEMM|cast| attention |GEMM|      |GEMM|        colored by class
    all-gather        |====== under ======|== alone ==|             colored by whether something is computed
                      |......... shaded ..|                         meanwhile
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from flatfsdp.profiling.step_time import (
    ATTENTION,
    COMMUNICATION,
    GEMM,
    MEMORY,
    Interval,
    Span,
    kernel_class,
    union,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {GEMM: "#4e79a7", ATTENTION: "#f28e2b", MEMORY: "#76b7b2", COMMUNICATION: "#e15759"}
UNDER, ALONE = "communication under computation", "communication alone"
OF_COMMUNICATION = {UNDER: "#59a14f", ALONE: COLORS[COMMUNICATION]}
SHADE = "#f7e9a8"
CLOSE_UP = 0.05


COLLECTIVES = (
    ("all-gather", r"all_?gather"),
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-reduce", r"all_?reduce"),
    ("send/recv", r"send|recv"),
    ("broadcast", r"broadcast"),
    ("copy between GPUs", r"memcpy ptop"),
    ("barrier", r"barrier"),
)
"""Kinds of communication; the first pattern found in a name counts."""


def collective_kind(span: Span) -> str:
    """The kind of a span of communication, such as "all-gather", or "TP all-gather"."""
    name = span.name.lower()
    kind = next((found for found, pattern in COLLECTIVES if re.search(pattern, name)), "other")
    return f"{span.group} {kind}".strip()


def spans_in(chrome_trace: Path, groups: Mapping[str, str]) -> list[Span]:
    """Reads spans from a file of `export_chrome_trace`, which knows process groups, too.

    Args:
        chrome_trace: the file.
        groups: names for process groups, by `ProcessGroup.group_name`.
    """
    events = json.loads(chrome_trace.read_text())["traceEvents"]
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, arguments = float(event["ts"]), event["args"]
            group = groups.get(arguments.get("Process Group Name"), "")
            found.append(Span(event["name"], start, start + float(event["dur"]), arguments["stream"], group))
    return found


def cpu_spans_of(recorded: profile) -> list[Span]:
    """The outermost operators that ran on the CPU, for machines without a GPU."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end, event.thread)
        for event in recorded.events() or ()
        if _is_operator(event) and not _is_operator(event.cpu_parent)
    ]


def _is_operator(event: FunctionEvent | None) -> bool:
    """Whether it is neither a range nor a node of autograd."""
    return event is not None and not event.is_async and re.match(r"\w+::|gloo:", event.name) is not None


@dataclass(frozen=True)
class Track:
    """One kind of communication.

    Attributes:
        kind: the kind.
        busy: when it runs.
        under: when computation runs as well.
    """

    kind: str
    busy: list[Interval]
    under: list[Interval]


@dataclass(frozen=True)
class Overlap:
    """The part of a step's communication that is hidden by its computation.

    Attributes:
        begin, end: of the step, in microseconds of the trace's clock.
        compute: spans of computation, by class.
        tracks: by kind, the busiest first.
        everything: all kinds together.
    """

    begin: float
    end: float
    compute: dict[str, list[Span]]
    tracks: list[Track]
    everything: Track

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the time in which something is sent; None if nothing is."""
        busy = length(self.everything.busy)
        return length(self.everything.under) / busy if busy else None


def overlap_of(spans: Sequence[Span]) -> Overlap:
    """Sorts spans into computation and kinds of communication.

    Raises:
        ValueError: if there are no spans.
    """
    if not spans:
        raise ValueError("the trace has no spans, so there is nothing to draw")
    compute: dict[str, list[Span]] = {name: [] for name in (GEMM, ATTENTION, MEMORY)}
    sent: dict[str, list[Span]] = {}
    for span in spans:
        name = kernel_class(span.name)
        if name == COMMUNICATION:
            sent.setdefault(collective_kind(span), []).append(span)
        else:
            compute[name].append(span)
    computing = union(span for found in compute.values() for span in found)

    def track(kind: str, members: Iterable[Span]) -> Track:
        busy = union(members)
        return Track(kind, busy, intersection(busy, computing))

    tracks = [track(kind, members) for kind, members in sent.items()]
    return Overlap(
        min(span.start for span in spans),
        max(span.end for span in spans),
        compute,
        sorted(tracks, key=lambda found: -length(found.busy)),
        track("all", (span for members in sent.values() for span in members)),
    )


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intervals in which both run; arguments and result are those of `union`."""
    found = []
    a, b = 0, 0
    while a < len(first) and b < len(second):
        start, end = max(first[a].start, second[b].start), min(first[a].end, second[b].end)
        if start < end:
            found.append(Interval(start, end))
        # The interval that ends first meets nothing more.
        if first[a].end < second[b].end:
            a += 1
        else:
            b += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The total length of the intervals."""
    return sum(end - start for start, end in intervals)


def draw_timeline(spans: Sequence[Span], path: Path, title: str) -> None:
    """Draws one row of computation and one of each kind of communication; the title states the hidden share.

    Below the whole step there is a close-up, if communication and computation overlap anywhere.

    Raises:
        ValueError: if there are no spans.
    """
    # Imported late: traces are also sorted, and saved, where nothing is drawn.
    from matplotlib.figure import Figure

    found = overlap_of(spans)
    closer = _close_up(found)
    windows = [Interval(found.begin, found.end), *([] if closer is None else [closer])]
    height = 0.6 * (1 + len(found.tracks))
    figure = Figure(figsize=(13, 1.2 + (0.9 + height) * len(windows)), layout="constrained")
    panels = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
    for axes, window in zip(panels, windows, strict=True):
        _draw_window(axes, found, window)
    panels[0].set_title(f"{title}\n{_summary(found)}", loc="left", fontsize=11)
    if closer is not None:
        panels[1].set_title("Close-up: where most of it is under computation", loc="left", fontsize=10)
    panels[-1].set_xlabel("ms since the step began (a collective's time includes waiting for other ranks)")
    _legend(figure, panels[0], found)
    figure.savefig(path, dpi=130)


def _draw_window(axes: Axes, found: Overlap, window: Interval) -> None:
    rows = 1 + len(found.tracks)

    def bars(
        intervals: Iterable[Interval | Span], row: float, height: float, color: str, **style: Any
    ) -> None:
        pieces = [
            ((i.start - found.begin) / 1e3, (i.end - i.start) / 1e3)
            for i in intervals
            if i.start < window.end and i.end > window.start
        ]
        # Snapped to pixels, the shortest ones would disappear.
        axes.broken_barh(pieces, (row - height / 2, height), color=color, snap=False, **style)

    bars(found.everything.under, (rows - 1) / 2, rows, SHADE, linewidth=0, zorder=1)
    # Long kernels first, or they would cover short ones of another stream.
    for order, name in enumerate((GEMM, ATTENTION, MEMORY), start=2):
        bars(union(found.compute[name]), 0, 0.7, COLORS[name], linewidth=0, zorder=order)
    for row, track in enumerate(found.tracks, start=1):
        bars(track.busy, row, 0.7, OF_COMMUNICATION[ALONE], linewidth=0.3, zorder=2)
        bars(track.under, row, 0.7, OF_COMMUNICATION[UNDER], linewidth=0.3, zorder=3)
    axes.set_yticks(range(rows), ["compute", *map(_label, found.tracks)])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim((window.start - found.begin) / 1e3, (window.end - found.begin) / 1e3)
    axes.spines[["top", "right"]].set_visible(False)


def _close_up(found: Overlap) -> Interval | None:
    """The part of the step, `CLOSE_UP` of its length, with most communication under computation."""
    width = CLOSE_UP * (found.end - found.begin)
    windows = [Interval(under.start, under.start + width) for under in found.everything.under]
    return max(
        windows, key=lambda window: length(intersection(found.everything.under, [window])), default=None
    )


def _label(track: Track) -> str:
    busy, under = length(track.busy), length(track.under)
    return f"{track.kind}\n{busy / 1e3:.1f} ms, {under / busy if busy else 0:.0%} under"


def _summary(found: Overlap) -> str:
    step = f"{(found.end - found.begin) / 1e3:.1f} ms"
    share = found.hidden_share
    if share is None:
        return f"{step}, no communication"
    busy = length(found.everything.busy) / 1e3
    return f"{share:.0%} of communication time under computation (communication {busy:.1f} ms of {step})"


def _legend(figure: Figure, axes: Axes, found: Overlap) -> None:
    colors = {name: COLORS[name] for name, members in found.compute.items() if members}
    if found.tracks:
        colors |= {**OF_COMMUNICATION, "both run": SHADE}
    patches = [axes.barh(0, 0, color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


# -- kept for later --------------------------------------------------------------------------------------


def save_spans(spans: Sequence[Span], path: Path, title: str) -> None:
    """Writes the input of `redraw` as JSON: about 25 bytes per span, times in tenths of a microsecond."""
    begin = min((span.start for span in spans), default=0.0)
    names = {key: index for index, key in enumerate(dict.fromkeys((s.name, s.group) for s in spans))}
    rows = [
        [names[s.name, s.group], round(s.start - begin, 1), round(s.end - s.start, 1), s.lane] for s in spans
    ]
    kept = {"title": title, "names": list(names), "spans": rows}
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def load_spans(path: Path) -> tuple[list[Span], str]:
    """Reads what `save_spans` wrote, with its title; times begin at 0."""
    kept = json.loads(path.read_text())
    spans = [
        Span(kept["names"][index][0], start, start + duration, lane, kept["names"][index][1])
        for index, start, duration, lane in kept["spans"]
    ]
    return spans, kept["title"]


def redraw(path: Path) -> Path:
    """Draws what `save_spans` wrote, beside it; returns the picture's path."""
    spans, title = load_spans(path)
    picture = path.with_suffix(".png")
    draw_timeline(spans, picture, title)
    return picture
