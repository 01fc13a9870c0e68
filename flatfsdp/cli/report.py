"""Output of the commands: a table, a JSON file and the loss curves.

In:   rows of comparisons, and losses.
Out:  a table for the terminal, text, and a PNG.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from flatfsdp.parity import Parity
from flatfsdp.parity.evidence import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def table(parity: Parity) -> Table:
    """Table with one row a comparison; off above on within a cell."""
    result = Table(
        box=box.SIMPLE_HEAD,
        title="One switch off and on: the same bits?",
        pad_edge=False,
        collapse_padding=True,
    )
    result.add_column("config", overflow="fold")
    for heading in ("switch", "final loss"):
        result.add_column(heading, no_wrap=True)
    for heading in ("ms\na step", "bytes copied\na parameter"):
        result.add_column(heading, justify="right", no_wrap=True)
    for kind in (*KINDS, "loss falls"):
        result.add_column(kind.replace(" ", "\n"))
    for row in parity.rows:
        runs = (row.off, row.on)
        result.add_row(
            row.about["name"].replace(", ", "\n"),
            "\n".join(row.switch.ends),
            "\n".join(run.final_loss_hex for run in runs),
            "\n".join(f"{run.ms:.1f}" for run in runs),
            "\n".join(f"{run.local_bytes:.2f}" for run in runs),
            *("[bold red]DIFFER" if places else "[green]equal" for places in row.differences.values()),
            "yes" if row.on.falling else "no",
            end_section=row is not parity.rows[-1],
        )
    return result


def verdict_lines(parity: Parity) -> list[str]:
    """Lines that name the differences, or one line that says there are none."""
    if not parity.equal:
        return parity.differences()
    options = parity.about["options"]
    worlds = " and ".join(str(environment["world_size"]) for environment in parity.about["environments"])
    return [
        f"On equals off, bit for bit: {len(parity.rows)} configurations on {worlds} ranks, "
        f"{options['steps']} steps of {options['microbatches']} microbatches each."
    ]


def left_out_lines(parity: Parity) -> list[str]:
    """One line for each reason, with what it leaves out; rows are counted by their ways to share a model."""
    by_reason: dict[str, Counter[str]] = defaultdict(Counter)
    for name, why in parity.left_out.items():
        by_reason[why][name.partition(", ")[0]] += 1
    return [
        f"Left out, as {why}: {', '.join(f'{name} ({rows})' for name, rows in names.items())}."
        for why, names in by_reason.items()
    ]


def plot_comparisons(path: Path, parity: Parity) -> None:
    """Writes a PNG with the losses of both runs, one panel for each row."""
    plot_losses(
        path,
        f"Bit for bit the same? World size {parity.about['environments'][0]['world_size']}",
        {
            f"{row.about['name']}: {' / '.join(row.switch.ends)}": dict(
                zip(row.switch.ends, (row.off.losses, row.on.losses), strict=True)
            )
            for row in parity.rows
        },
    )


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
