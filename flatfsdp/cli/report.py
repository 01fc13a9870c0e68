"""What the commands leave behind: a run's summary, the environment, a JSON file and the loss curves.

In:   a `Trained`, or several summaries.
Out:  plain values that JSON can hold, and a PNG.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from flatfsdp.cli.training import Trained
from flatfsdp.launch import Rank

LOCAL_COPIES = ("cast", "concat", "accumulate")
"""The ledger's counters of bytes that move within one rank's memory; the others travel."""


@dataclass(frozen=True)
class RunSummary:
    """The numbers of one run, as rank 0 saw them.

    Attributes:
        losses: one a step, mean over ranks and microbatches; exact FP32 values.
        final_loss_hex: the last of them as `float.hex`, which shows every bit.
        ms: median of a step.
        bytes_per_parameter: the byte ledger of the last step.
        local_bytes: its sum over the copies within a rank.
    """

    losses: list[float]
    grad_norms: list[float]
    final_loss_hex: str
    ms: float
    bytes_per_parameter: dict[str, float]
    local_bytes: float

    @staticmethod
    def of(trained: Trained) -> RunSummary:
        losses, ledger = trained.losses(), trained.bytes_per_parameter
        return RunSummary(
            losses,
            [step.grad_norm for step in trained.steps],
            losses[-1].hex(),
            trained.ms(),
            ledger,
            sum(ledger.get(name, 0.0) for name in LOCAL_COPIES),
        )

    @property
    def falling(self) -> bool:
        """Whether the last quarter of the steps has a lower mean loss than the first one."""
        quarter = max(1, len(self.losses) // 4)
        return sum(self.losses[-quarter:]) < sum(self.losses[:quarter])


def environment(rank: Rank) -> dict[str, Any]:
    """Where the numbers were measured; every rank must call it."""
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


def to_json(value: Mapping[str, Any]) -> str:
    """Indented JSON; paths become strings."""
    return json.dumps(value, indent=2, default=str)


def verdict(good: bool, yes: str, no: str) -> Text:
    """A cell of a table."""
    return Text(yes, style="green") if good else Text(no, style="bold red")


def comparison_table(title: str, headings: Sequence[str], verdicts: Sequence[str]) -> Table:
    """Empty, for one row a comparison of two runs.

    Args:
        headings: up to that of the final loss.
        verdicts: those of the last columns.
    """
    result = Table(box=box.SIMPLE_HEAD, title=title, pad_edge=False, collapse_padding=True)
    for heading in headings:
        result.add_column(heading)
    for heading in ("ms\na step", "bytes copied\na parameter"):
        result.add_column(heading, justify="right")
    for heading in verdicts:
        result.add_column(heading.replace(" ", "\n"))
    return result


def compared_cells(off: RunSummary, on: RunSummary, differences: Mapping[str, list[str]]) -> list[str | Text]:
    """Off above on: final loss, time and bytes; then a verdict for each kind of evidence."""
    return [
        f"{off.final_loss_hex}\n{on.final_loss_hex}",
        f"{off.ms:.1f}\n{on.ms:.1f}",
        f"{off.local_bytes:.2f}\n{on.local_bytes:.2f}",
        *(verdict(not places, "equal", "DIFFER") for places in differences.values()),
    ]


def difference_lines(name: str, differences: Mapping[str, list[str]]) -> list[str]:
    """Where two runs differ, by kind of evidence."""
    return [
        f"{name}, {kind}: first difference on {place}"
        for kind, places in differences.items()
        for place in places
    ]


def plot_losses(path: Path, title: str, panels: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Writes a PNG with one panel for each key of `panels`, holding one curve for each key inside.

    The first curve of a panel is broad and pale and the second a dark dashed line on top of it, so that
    both are visible where they are equal.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.2 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    for position, (name, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        _draw(axes, name, curves)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, name: str, curves: Mapping[str, list[float]]) -> None:
    styles = ({"linewidth": 6, "color": "#f2b880"}, {"linewidth": 1.5, "color": "#1f3a68", "linestyle": "--"})
    for (label, losses), style in zip(curves.items(), styles, strict=False):
        axes.plot(range(len(losses)), losses, label=label, **style)  # type: ignore[arg-type]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
