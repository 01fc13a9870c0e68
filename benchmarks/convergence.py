"""Final losses of training in FP8 and bf16.

Trains on real text, once for each precision and seed, with the same data and learning rates: the example GPT
in FlatFSDP's own layers, or Hugging Face's `LlamaForCausalLM`, plain in bf16 and then fused.  bf16 is
followed by FP8 with delayed and with current scaling, and with weights stored in FP8 in the flat buffers.
Weight gradients are fused into FP32.  A seed determines initial weights and the order of the data.  The final
loss is the mean of the last tenth of the steps, and then of the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, progress_bar, publish
from lib.device import free_memory
from lib.hf_training import decaying, hf_job, llama_of
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parity.loop import train
from flatfsdp.training.choices import PrecisionName
from flatfsdp.training.jobs import Configuration, Settings, check_sizes, gpt_job


class Model(str, Enum):
    """The trained model."""

    gpt = "gpt"
    hf_llama = "hf-llama"


OWN_LAYERS = (
    PrecisionName.bf16_fused,
    PrecisionName.fp8_delayed,
    PrecisionName.fp8_current,
    PrecisionName.fp8_weights,
)

PRECISIONS = {Model.gpt: OWN_LAYERS, Model.hf_llama: (PrecisionName.bf16, *OWN_LAYERS)}
"""The precisions of each model; the others are compared with the first."""

NAMES = {Model.gpt: "convergence", Model.hf_llama: "convergence-hf-llama"}
TITLES = {Model.gpt: "The example GPT on real text", Model.hf_llama: "LlamaForCausalLM on real text"}

Losses = dict[str, list[list[float]]]
"""Losses [seeds][steps], by precision."""


class Runs(NamedTuple):
    """All runs, with seeds 0, 1, ..."""

    model: Model
    settings: Settings[GPTConfig]
    warm_up: int
    precisions: tuple[PrecisionName, ...]
    seeds: int


def train_all(rank: Rank, runs: Runs) -> Losses:
    """Trains everything; returns the losses of every step, by precision."""
    losses: Losses = {precision.value: [] for precision in runs.precisions}
    with progress_bar(visible=rank.index == 0) as bar:
        for seed in range(runs.seeds):
            of_seed = replace(runs.settings, seed=seed)
            sampler = of_seed.sampler()
            for precision in runs.precisions:
                task = bar.add_task(f"{precision.value}, seed {seed}", total=runs.settings.steps)
                how = Configuration(None, precision)
                sharding = how.sharding
                if runs.model is Model.hf_llama:
                    # Each FP8 weight is cast in every microbatch, as in most programs.
                    sharding = replace(sharding, cache=False, fusion=None)
                    job = hf_job(of_seed, how, sampler, rank)
                else:
                    job = gpt_job(of_seed, how, sampler, rank)
                job = replace(job, optimizer=partial(decaying, of_seed.steps, runs.warm_up))
                trained = train(job.trainee, sharding, rank, lambda *_, task=task: bar.advance(task))
                losses[precision.value].append(trained.summary.losses)
                del trained
                free_memory(rank.device)
    return losses


def final_loss(run: list[float]) -> float:
    return statistics.fmean(run[-max(1, len(run) // 10) :])


def means(runs: Iterable[list[float]]) -> list[float]:
    """Averages [seeds][steps] to [steps]."""
    return [statistics.fmean(of_step) for of_step in zip(*runs, strict=True)]


def summary(losses: Losses) -> list[dict[str, Any]]:
    """One row per precision, with losses averaged over the seeds.

    `against_bf16` is the relative difference of the final loss from the first row's; `spread` is the range of
    the seeds' final losses, relative to the same.
    """
    finals = {name: [final_loss(run) for run in runs] for name, runs in losses.items()}
    reference = statistics.fmean(next(iter(finals.values())))
    rows = []
    for name, runs in losses.items():
        curve, final = means(runs), statistics.fmean(finals[name])
        rows.append(
            {
                "precision": name,
                "first_loss": curve[0],
                "final_loss": final,
                "against_bf16": final / reference - 1,
                "spread": (max(finals[name]) - min(finals[name])) / reference,
                "final_losses": finals[name],
                "losses": curve,
                "runs": runs,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], steps: int) -> None:
    seeds = len(rows[0]["runs"])
    columns = ("precision", "first loss", "final loss", f"against {rows[0]['precision']}", "spread of seeds")
    title = f"{steps} steps, {seeds} seed{'s' * (seeds > 1)}"
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            row["precision"],
            f"{row['first_loss']:.4f}",
            f"{row['final_loss']:.4f}",
            f"{100 * row['against_bf16']:+.2f} %",
            f"{100 * row['spread']:.2f} %",
        )
    Console().print(table)


STYLES: dict[str, dict[str, Any]] = {
    "bf16": {"color": "#9c9c9c", "linewidth": 6},
    "bf16-fused": {"linewidth": 4, "color": "#f2b880"},
    "fp8-delayed": {"color": "#4e79a7"},
    "fp8-current": {"color": "#59a14f", "linestyle": ":"},
    "fp8-weights": {"color": "#e15759", "linestyle": "--", "linewidth": 1},
}


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws mean loss curves above and their difference from the first below, with bands from min to max."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for row in rows:
        relative = [
            [100 * (loss / base - 1) for loss, base in zip(run, reference, strict=True)]
            for run, reference in zip(row["runs"], rows[0]["runs"], strict=True)
        ]
        for axis, runs in ((above, row["runs"]), (below, relative)):
            style = STYLES[row["precision"]]
            axis.plot(means(runs), label=row["precision"], **style)
            least, most = ([pick(step) for step in zip(*runs, strict=True)] for pick in (min, max))
            axis.fill_between(range(len(least)), least, most, color=style["color"], alpha=0.15, linewidth=0)
    above.set_ylabel("loss (nats a byte)")
    above.legend()
    below.set_ylabel(f"% from {rows[0]['precision']}")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    above.set_title(title, loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Loss curves of the example GPT, or of a fused Hugging Face Llama, in bf16 and FP8.",
    epilog="""Examples:

    python benchmarks/convergence.py

    python benchmarks/convergence.py --device cpu --layers 2 --hidden 64 --heads 2 --seq 64 --steps 20

    python benchmarks/convergence.py --model hf-llama --seeds 3 --lr 6e-4 --warm-up 30

    python benchmarks/convergence.py --model hf-llama --device cpu --hidden 64 --heads 2 --seq 64""",
)
def main(
    model: Annotated[Model, typer.Option(help="hf-llama needs transformers.")] = Model.gpt,
    steps: Annotated[int, typer.Option(min=2)] = 300,
    layers: options.Layers = 6,
    hidden: options.Hidden = 512,
    heads: options.Heads = 8,
    seq: options.Seq = 512,
    batch: options.Batch = 8,
    microbatches: options.Microbatches = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs, of other weights and data.")] = 1,
    lr: Annotated[float, typer.Option(help="The highest; it falls linearly to zero.")] = 1e-3,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps in which the learning rate rises.")] = 0,
    ranks: options.RanksToStart = 1,
    device: options.OnDevice = Device.auto,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    if model is Model.hf_llama and find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed")
    try:
        settings = Settings(GPTConfig(layers, hidden, heads, seq), batch, microbatches, steps, lr)
        check_sizes(settings, PrecisionName.fp8_delayed)
        if model is Model.hf_llama:
            _ = llama_of(settings.model)  # raises what is wrong with its sizes
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    launch = launch_of(ranks, device)
    losses = run_on_ranks(train_all, Runs(model, settings, warm_up, PRECISIONS[model], seeds), launch)
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
        "warm_up": warm_up,
        "seeds": seeds,
        "rows": rows,
    }
    publish(
        payload,
        out,
        NAMES[model],
        draw=partial(draw, rows, TITLES[model]),
        show=partial(show, rows, steps),
        as_json=as_json,
    )


if __name__ == "__main__":
    app()
