"""Table and picture of README.md: tokens per second of FlatFSDP and of FSDP2, from committed results.

Nothing is measured here: each cell names the file in `results` and the row in it that has the number.  Run it
after a new measurement, and paste the table that it prints.  A test compares the README with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from lib.common import RESULTS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ENGINES = ("FSDP2 + compile", "FSDP2 + torchao FP8 + compile", "FlatFSDP")
COLORS = ("#bab0ac", "#f28e2b", "#4e79a7")


class Cell(NamedTuple):
    """A measured row, and what the table says about it."""

    file: str
    row: str
    note: str = ""

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        rows = json.loads((RESULTS / f"{self.file}.json").read_text())["rows"]
        (row,) = (row for row in rows if self.row in (row.get("name"), row.get("engine")))
        return float(row["tokens_per_s_per_rank"])


class Job(NamedTuple):
    """What is trained, and one cell for each of `ENGINES`; None was not measured."""

    title: str
    cells: tuple[Cell | None, Cell | None, Cell]
    drawn_as: str = ""


HF, SMALL, STEP, FLAG, TRAINER = (
    "hf-8b8-m8-reshard",
    "hf-1b-m8-reshard",
    "step-8b-m1-reshard-fp8",
    "step-70b-l2-vocab-m16-keep",
    "trainer-1b-m4-2",
)
JOBS = (
    Job(
        "Hugging Face Llama, 8 layers of 8B's width, 2 GPUs",
        (
            Cell(HF, "fsdp2-compile"),
            Cell(HF, "fsdp2-float8-compile"),
            Cell(HF, "flat-fused-fp8", "fused, FP8"),
        ),
        "Hugging Face Llama,\n8 layers of 8B's width",
    ),
    Job(
        "Hugging Face Llama, 1.5B, 2 GPUs",
        (
            None,
            Cell(SMALL, "fsdp2-float8-compile"),
            Cell(SMALL, "flat-fused-fp8-replay", "fused, FP8, CUDA graphs"),
        ),
        "Hugging Face Llama,\n1.5B parameters",
    ),
    Job(
        "Llama-8B from our layers, 4 GPUs",
        (None, Cell(STEP, "fsdp2-float8-compile"), Cell(STEP, "flat-fp8-delayed", "FP8")),
    ),
    Job(
        "`Trainer`, Llama of 1.5B, 2 GPUs",
        (
            Cell(TRAINER, "fsdp2", "not compiled"),
            None,
            Cell(TRAINER, "flat-fused-fp8-replay", "fused, FP8, CUDA graphs"),
        ),
    ),
    Job(
        "the same, **slower** without CUDA graphs",
        (Cell(TRAINER, "fsdp2", "not compiled"), None, Cell(TRAINER, "flat-fused-fp8", "fused, FP8")),
    ),
    Job(
        "two Llama-70B layers in bf16, 4 GPUs: **level**",
        (Cell(FLAG, "fsdp2-compile"), None, Cell(FLAG, "flat-on-compile", "bf16")),
        "Two Llama-70B layers",
    ),
)


def shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.speed:,.0f}" + (f" ({cell.note})" if cell.note else "")


def table() -> str:
    """The table of README.md, in Markdown."""
    head = ["tokens/s a GPU, H200", *ENGINES[:-1], f"**{ENGINES[-1]}**"]
    body = [[job.title, *map(shown, job.cells[:-1]), f"**{shown(job.cells[-1])}**"] for job in JOBS]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


def draw(path: Path) -> None:
    """Draws one group of bars for each job that has a name for the picture."""
    jobs = [job for job in JOBS if job.drawn_as]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    place, ticks = 0.0, []
    for job in jobs:
        bars = [(color, cell) for color, cell in zip(COLORS, job.cells, strict=True) if cell is not None]
        ticks.append(place + (len(bars) - 1) / 2)
        for color, cell in bars:
            axis.barh(place, cell.speed, color=color, height=0.85)
            axis.text(cell.speed, place, f" {cell.speed:,.0f}", va="center", fontsize=14)
            axis.text(600, place, cell.note, va="center", fontsize=12, color="white")
            place += 1
        place += 0.8
    axis.set_yticks(ticks, [job.drawn_as for job in jobs], fontsize=14)
    axis.tick_params(axis="y", length=0)
    axis.set_xticks([])
    axis.set_xlim(right=1.18 * max(cell.speed for job in jobs for cell in job.cells if cell is not None))
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.invert_yaxis()
    handles = [Patch(color=color) for color in COLORS]
    figure.legend(handles, ENGINES, loc="outside lower left", ncols=2, fontsize=13, frameon=False)
    figure.suptitle("Tokens per second a GPU, H200", x=0.01, ha="left", fontsize=16)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(RESULTS / "headline.png")
    print(table())
