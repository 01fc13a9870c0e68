"""Output of the commands: tables, a JSON file and the loss curves.

In:   summaries of runs.
Out:  tables for the terminal, text, and a PNG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from flatfsdp.parity.summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def verdict(good: bool, yes: str, no: str) -> Text:
    """Makes a coloured cell of a table."""
    return Text(yes, style="green") if good else Text(no, style="bold red")


def comparison_table(title: str, headings: Sequence[str], verdicts: Sequence[str]) -> Table:
    """Makes an empty table with one row for each comparison of two runs.

    Args:
        title: title of the table.
        headings: headings up to that of the final loss.
        verdicts: headings of the last columns.
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
    """Cells of one comparison, off above on: final loss, time, bytes, then verdicts by kind of evidence."""
    return [
        f"{off.final_loss_hex}\n{on.final_loss_hex}",
        f"{off.ms:.1f}\n{on.ms:.1f}",
        f"{off.local_bytes:.2f}\n{on.local_bytes:.2f}",
        *(verdict(not places, "equal", "DIFFER") for places in differences.values()),
    ]


def plot_losses(path: Path, title: str, panels: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Writes a PNG with one panel for each key of `panels`, and one curve for each key inside.

    The first curve of a panel is broad and pale, the second a dark dashed line on top of it, so that both are
    visible where they are equal.
    """
    # Imported here, because it takes half a second, in every command and on every rank.
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.2 * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    for position, (name, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        _draw(axes, name, curves)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, name: str, curves: Mapping[str, list[float]]) -> None:
    from matplotlib.ticker import MaxNLocator

    styles = ({"linewidth": 6, "color": "#f2b880"}, {"linewidth": 1.5, "color": "#1f3a68", "linestyle": "--"})
    for (label, losses), style in zip(curves.items(), styles, strict=False):
        axes.plot(range(len(losses)), losses, label=label, **style)  # type: ignore[arg-type]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
