"""Output of the commands: a table, a JSON file and the loss curves.

In:   rows of comparisons, and losses.
Out:  a table for the terminal, text, and a PNG.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from rich import box
from rich.table import Table

from flatfsdp.parity import Parity
from flatfsdp.parity.evidence import KINDS


def table(parity: Parity) -> Table:
    """Table with one row a comparison; off above on within a cell."""
    result = Table(
        box=box.SIMPLE_HEAD,
        title="The same bits?",
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
    has_lanes = any(row.same_as_one_rank is not None for row in parity.rows)
    if has_lanes:
        result.add_column("same\nas one\nrank")
    words = {True: "[green]yes", False: "[bold red]NO", None: "-"}
    for row in parity.rows:
        runs = (row.off, row.on)
        result.add_row(
            row.about["name"].replace(", ", "\n"),
            "\n".join(row.ends),
            "\n".join(run.final_loss_hex for run in runs),
            "\n".join(f"{run.ms:.1f}" for run in runs),
            "\n".join(f"{run.local_bytes:.2f}" for run in runs),
            *("[bold red]DIFFER" if places else "[green]equal" for places in row.differences.values()),
            "yes" if row.on.falling else "no",
            *([words[row.same_as_one_rank]] if has_lanes else []),
            end_section=row is not parity.rows[-1],
        )
    return result


def verdict_lines(parity: Parity) -> list[str]:
    """Lines that name the differences, or one line that says there are none."""
    if not parity.equal:
        return parity.differences()
    options = parity.about["options"]
    if "worlds" in options:
        worlds = ", ".join(map(str, options["worlds"]))
        return [
            f"The same bits on {worlds} ranks: {len(parity.rows)} comparisons of {options['steps']} steps, "
            f"each of {options['microbatches']} microbatches in {options['lanes']} lanes."
        ]
    worlds = " and ".join(str(environment["world_size"]) for environment in parity.about["environments"])
    one_rank = sum(row.same_as_one_rank is not None for row in parity.rows)
    beside = f" ({one_rank} beside one rank)" if one_rank else ""
    return [
        f"On equals off, bit for bit: {len(parity.rows)} comparisons{beside} on {worlds} ranks, "
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
    """Writes a PNG with the losses of both runs, one panel for each row.

    The first curve of a panel is broad and pale, the second a dark dashed line on top of it, so that both are
    visible where they are equal.
    """
    # Imported here, because it takes half a second, in every command and on every rank.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = min(2, len(parity.rows))
    lines = -(-len(parity.rows) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.2 * lines + 0.6), layout="constrained")
    figure.suptitle(f"Bit for bit the same? World size {parity.about['environments'][0]['world_size']}")
    for position, row in enumerate(parity.rows, start=1):
        axes = figure.add_subplot(lines, columns, position)
        off, on = row.ends
        axes.plot(row.off.losses, label=off, linewidth=6, color="#f2b880")
        axes.plot(row.on.losses, label=on, linewidth=1.5, color="#1f3a68", linestyle="--")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{row.about['name']}: {off} / {on}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats a byte)")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
