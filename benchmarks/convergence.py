"""Does training in FP8 reach the loss of bf16?

Trains the example GPT in FlatFSDP's own layers on real text, once for each precision, with the same seed,
data and learning rates: bf16, FP8 with delayed and with current scaling, and with weights kept in FP8 in the
flat buffers.  Weight gradients are fused into FP32, FP8 weights are cast once a step.  The final loss is the
mean of the last tenth of the steps.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, progress_bar, publish
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.training.choices import PrecisionName
from flatfsdp.training.gpt import TrainSettings, train

PRECISIONS = (
    PrecisionName.bf16_fused,
    PrecisionName.fp8_delayed,
    PrecisionName.fp8_current,
    PrecisionName.fp8_weights,
)


def train_all(rank: Rank, settings: TrainSettings) -> dict[str, list[float]]:
    """The losses of every step, by precision."""
    sampler = settings.sampler()
    losses = {}
    with progress_bar(visible=rank.index == 0) as bar:
        for precision in PRECISIONS:
            task = bar.add_task(precision.value, total=settings.steps)
            of_precision = replace(settings, precision=precision)
            trained = train(of_precision, sampler, rank, on_step=lambda *_, task=task: bar.advance(task))
            losses[precision.value] = trained.losses()
    return losses


def summary(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a precision; `against_bf16` is the relative difference of the final loss."""
    final = {name: statistics.fmean(run[-max(1, len(run) // 10) :]) for name, run in losses.items()}
    reference = final[PrecisionName.bf16_fused.value]
    return [
        {
            "precision": name,
            "first_loss": run[0],
            "final_loss": final[name],
            "against_bf16": final[name] / reference - 1,
            "losses": run,
        }
        for name, run in losses.items()
    ]


def show(rows: list[dict[str, Any]], steps: int) -> None:
    table = Table(
        "precision", "first loss", "final loss", "against bf16", title=f"{steps} steps", title_justify="left"
    )
    for row in rows:
        table.add_row(
            row["precision"],
            f"{row['first_loss']:.4f}",
            f"{row['final_loss']:.4f}",
            f"{100 * row['against_bf16']:+.2f} %",
        )
    Console().print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss curves above, their difference from bf16 below."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    reference = rows[0]["losses"]
    styles: list[dict[str, Any]] = [
        {"linewidth": 4, "color": "#f2b880"},
        {"color": "#4e79a7"},
        {"color": "#59a14f", "linestyle": ":"},
        {"color": "#e15759", "linestyle": "--", "linewidth": 1},
    ]
    for row, style in zip(rows, styles, strict=True):
        above.plot(row["losses"], label=row["precision"], **style)
        relative = [100 * (loss / base - 1) for loss, base in zip(row["losses"], reference, strict=True)]
        below.plot(relative, **style)
    above.set_ylabel("loss (nats a byte)")
    above.legend()
    below.set_ylabel("% from bf16")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    above.set_title("The example GPT on real text", loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Loss curves of the example GPT in bf16 and FP8.",
    epilog="""Examples:

    python benchmarks/convergence.py

    python benchmarks/convergence.py --device cpu --layers 2 --hidden 64 --heads 2 --seq 64 --steps 20""",
)
def main(
    steps: Annotated[int, typer.Option(min=2)] = 300,
    layers: options.Layers = 6,
    hidden: options.Hidden = 512,
    heads: options.Heads = 8,
    seq: options.Seq = 512,
    batch: options.Batch = 8,
    microbatches: options.Microbatches = 2,
    lr: Annotated[float, typer.Option(help="Of the first step; it falls linearly to zero.")] = 1e-3,
    ranks: options.Ranks = 1,
    device: options.OnDevice = Device.auto,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    try:
        settings = TrainSettings(
            model=GPTConfig(layers, hidden, heads, seq),
            precision=PrecisionName.fp8_delayed,
            batch=batch,
            microbatches=microbatches,
            steps=steps,
            lr=lr,
            decays=True,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    launch = launch_of(ranks, device)
    losses = run_on_ranks(train_all, settings, launch)
    if not is_main():
        return
    rows = summary(losses)
    payload = {
        "environment": environment("cuda" if launch.use_cuda() else "cpu"),
        "ranks": launch.world,
        "model": asdict(settings.model),
        "batch": batch,
        "microbatches": microbatches,
        "lr": lr,
        "rows": rows,
    }
    publish(
        payload,
        out,
        "convergence",
        draw=partial(draw, rows),
        show=partial(show, rows, steps),
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
