"""Whether training has the same bits on any number of ranks: a covering list of runs, compared bit for bit.

A run is a model, a precision, a number of lanes, a number of ranks, a way to shard, and the option
`optimize_backward_concat`.  The list has every pair of values of these that can occur together; runs that
differ only in ranks, sharding and the option are compared with the one on a single rank: losses, whole
gradients of each step before clipping, parameters, buffers (with FP8 scales) and optimizer state.  A hybrid
mesh adds lanes in blocks, and is compared with a single rank that adds them so, too.

With one microbatch in each lane, weights in FP32 are also compared with those of the plain program: one
process, PyTorch's loop, nothing sharded, and nothing clipped, as PyTorch adds up norms in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from enum import Enum
from itertools import combinations, groupby, islice, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, progress_bar, publish
from lib.device import free_memory
from lib.hf_training import hf_job
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import Lanes
from flatfsdp.comm.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.contract.any_model import loss_of
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.models.text import Sampler
from flatfsdp.parity.any_model import ModelJob
from flatfsdp.parity.loop import train
from flatfsdp.parity.world import Spread, verify_world
from flatfsdp.training.choices import PrecisionName
from flatfsdp.training.jobs import Configuration, Settings, gpt_job


class Model(str, Enum):
    """The trained model."""

    gpt = "gpt"
    hf_llama = "hf-llama"

    @property
    def job(self) -> Callable[[Settings[GPTConfig], Configuration, Sampler, Rank], ModelJob]:
        """Makes its job."""
        return hf_job if self is Model.hf_llama else gpt_job


class Sharded(str, Enum):
    """Extent of sharding; with several microbatches ZeRO-2 is ZeRO-1, see docs/zero.md."""

    dp = "dp"
    zero2 = "zero2"
    zero3 = "zero3"
    hybrid = "hybrid 2 x 2"


PRECISIONS = (PrecisionName.fp32, PrecisionName.bf16, PrecisionName.fp8_delayed, PrecisionName.fp8_current)
RANKS = {12: (1, 2, 3, 4, 6), 8: (1, 2, 4, 8)}
"""Numbers of ranks, by number of lanes."""

PER_LANE = 2
"""Microbatches in each lane."""


class Run(NamedTuple):
    """One training; runs with the first four alike have to have the same bits."""

    model: Model
    precision: PrecisionName
    lanes: int
    block: int
    ranks: int
    sharded: Sharded
    flag: bool

    @property
    def group(self) -> tuple[Model, PrecisionName, int, int]:
        """What runs that are compared have in common."""
        return self[:4]

    @property
    def first(self) -> Run:
        """The run that it is compared with, on one rank."""
        return Run(*self.group, 1, Sharded.zero3, True)

    @property
    def pairs(self) -> set[Any]:
        """Pairs of values of different kinds that occur in it."""
        values = self.model, self.precision, self.lanes, (self.lanes, self.ranks), self.sharded, self.flag
        return set(combinations(enumerate(values), 2))

    def spread(self) -> Spread:
        """The same for `verify_world`."""
        sharding = Configuration(None, self.precision).sharding
        if self.model is Model.hf_llama:
            sharding = replace(sharding, cache=False, fusion=None)
        sharding = replace(sharding, flag=self.flag, reshard=self.sharded in (Sharded.zero3, Sharded.hybrid))
        replicas = {Sharded.dp: self.ranks, Sharded.hybrid: 2}.get(self.sharded, 1)
        name = f"{self.ranks} ranks, {self.sharded.value}, flag {'on' if self.flag else 'off'}"
        return Spread(name, sharding, self.ranks, replicas)


def possible(
    models: tuple[Model, ...], precisions: tuple[PrecisionName, ...], most_ranks: int
) -> Iterator[Run]:
    """Yields all runs that there could be, but for those that others are compared with."""
    for model, precision, lanes, sharded, flag in product(models, precisions, RANKS, Sharded, (True, False)):
        is_hybrid = sharded is Sharded.hybrid
        for ranks in (4,) if is_hybrid else RANKS[lanes]:
            run = Run(model, precision, lanes, 2 if is_hybrid else 1, ranks, sharded, flag)
            if ranks <= most_ranks and run != run.first:
                yield run


def covering(
    models: tuple[Model, ...], precisions: tuple[PrecisionName, ...], most_ranks: int = 8
) -> list[Run]:
    """A short list in which every pair of values occurs; each group begins with a run on one rank."""
    candidates = list(possible(models, precisions, most_ranks))
    missing = set().union(*(run.pairs for run in candidates))
    chosen: list[Run] = []
    while missing:
        # The one with most of the pairs that are missing; of several, the first.
        best = max(candidates, key=lambda run: len(run.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
    firsts = {run.first for run in chosen}
    return sorted(firsts.union(chosen), key=lambda run: (*run.group, run not in firsts, *run[4:]))


def run_all(rank: Rank, plan: tuple[list[Run], Settings[GPTConfig]]) -> list[dict[str, Any]]:
    """Trains everything; returns a row for each run."""
    runs, settings = plan
    rows: list[dict[str, Any]] = []
    sampler = settings.sampler()
    with progress_bar(visible=rank.index == 0) as bar:
        for group, of_group in groupby(runs, key=lambda run: run.group):
            model, precision, lanes, block = group
            alike = list(of_group)
            of_job = replace(settings, microbatches=PER_LANE * lanes)
            job = replace(model.job(of_job, Configuration(None, precision), sampler, rank), max_norm=0.1)
            name = f"{model.value}, {precision.value}, {in_words(lanes, block)}"
            task = bar.add_task(name, total=len(alike) * settings.steps)
            spreads = [run.spread() for run in alike]
            found = list(
                verify_world(
                    job, Lanes(lanes, block), spreads, rank, on_step=lambda *_, task=task: bar.advance(task)
                )
            )
            summaries = [found[0].off, *(each.on for each in found)]
            differences = [{}, *(each.differences for each in found)]
            for run, summary, of_run in zip(alike, summaries, differences, strict=True):
                places = [place for of_kind in of_run.values() for place in of_kind]
                hexes = {
                    "final_loss_hex": summary.final_loss_hex,
                    "grad_norm_hex": summary.grad_norms[-1].hex(),
                }
                values = {key: getattr(value, "value", value) for key, value in run._asdict().items()}
                rows.append({**values, "differences": places, **hexes})
            free_memory(rank.device)
    return rows


def run_plain(rank: Rank, plan: tuple[tuple[Model, ...], int, Settings[GPTConfig]]) -> list[dict[str, Any]]:
    """Compares with the plain program, on all numbers of ranks; returns a row for each."""
    models, most_ranks, settings = plan
    how, sampler = Configuration(None, PrecisionName.fp32), settings.sampler()
    worlds = sorted({ranks for of_lanes in RANKS.values() for ranks in of_lanes if ranks <= most_ranks})
    # Made by all ranks, also those that take no part.
    meshes = {
        world: (
            DeviceMesh(rank.device.type, range(world), mesh_dim_names=("shard",)),
            dist.new_group(range(world)),
        )
        for world in worlds
    }
    rows: list[dict[str, Any]] = []
    with progress_bar(visible=rank.index == 0) as bar:
        for model, (lanes, of_lanes) in product(models, RANKS.items()):
            of_job = replace(settings, microbatches=lanes)
            job = replace(model.job(of_job, how, sampler, rank), max_norm=math.inf)
            expected = plain_weights(job, rank.device) if rank.index == 0 else {}
            task = bar.add_task(f"{model.value}, {in_words(lanes, 1)}, beside the plain program", total=None)
            for world in bar.track([each for each in of_lanes if each in meshes], task_id=task):
                if rank.index >= world:
                    continue
                mesh, group = meshes[world]
                shared = replace(job, options={**job.options, "lanes": lanes, "mesh": mesh})
                spread = Run(model, how.precision, lanes, 1, world, Sharded.zero3, True).spread()
                trained = train(shared.trainee, spread.sharding, replace(rank, world=world, group=group))
                found = trained.model.state_dict()
                places = [name for name, value in expected.items() if not torch.equal(value, found[name])]
                loss = trained.summary.final_loss_hex
                values = {"model": model.value, "lanes": lanes, "ranks": world}
                rows.append({**values, "differences": places, "final_loss_hex": loss})
    return rows


def plain_weights(job: ModelJob, device: torch.device) -> dict[str, Tensor]:
    """The weights that PyTorch alone trains, in one process."""
    model = job.built().to(device)
    optimizer = job.optimizer(model.parameters(), lr=job.lr)
    batches = iter(job.batches(0, 1))
    for _ in range(job.steps):
        for batch in islice(batches, job.microbatches):
            on_device = [each.to(device) for each in batch]
            ((job.loss or loss_of)(model, on_device) / job.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def in_words(lanes: int, block: int) -> str:
    """Names the lanes of a group."""
    return f"{lanes} lanes" + (f" in blocks of {block}" if block > 1 else "")


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows that are compared have in common."""
    return row["model"], row["precision"], row["lanes"], row["block"]


def show(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    columns = ("model", "precision", "lanes", "runs", "on ranks", "final loss", "equal")
    table = Table(*columns, title_justify="left")
    for (model, precision, lanes, block), of_group in groupby(rows, key=group_of):
        alike = list(of_group)
        ranks = sorted({row["ranks"] for row in alike})
        table.add_row(
            model,
            precision,
            in_words(lanes, block),
            str(len(alike)),
            ", ".join(map(str, ranks)),
            "\n".join(dict.fromkeys(row["final_loss_hex"] for row in alike)),
            "no" if any(row["differences"] for row in alike) else "yes",
        )
    Console(width=120).print(table)
    for row in rows:
        for place in row["differences"]:
            print(f"{row['model']}, {row['precision']}, {row['ranks']} ranks, {row['sharded']}: {place}")
    if plain:
        differ = [row for row in plain if row["differences"]]
        print(
            f"With one microbatch in each lane, in FP32: {len(plain)} runs, of which {len(differ)} have other"
            " weights than the plain program"
        )
        for row in differ:
            print(f"{row['model']}, {row['lanes']} lanes, {row['ranks']} ranks: {row['differences'][0]}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws a dot for each run: groups downwards, numbers of ranks to the right."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    groups = list(dict.fromkeys(map(group_of, rows)))
    names = [f"{model}, {precision}, {in_words(*lanes)}" for model, precision, *lanes in groups]
    shifts = {sharded.value: (place - 1.5) / 5 for place, sharded in enumerate(Sharded)}
    colours = dict(zip(shifts, ("#9c9c9c", "#4e79a7", "#59a14f", "#e15759"), strict=True))
    ranks = sorted({row["ranks"] for row in rows})
    for row in rows:
        group = groups.index(group_of(row))
        x = ranks.index(row["ranks"]) + shifts[row["sharded"]]
        marker = "x" if row["differences"] else "o" if row["flag"] else "s"
        axes.plot(x, group, marker, color=colours[row["sharded"]], markersize=6)
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(range(len(ranks)), [f"{n} rank{'s' * (n > 1)}" for n in ranks])
    axes.invert_yaxis()
    axes.grid(alpha=0.2)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncol=4)
    differ = sum(bool(row["differences"]) for row in rows)
    title = f"{len(rows)} runs, {differ} with other bits than one rank; squares: flag off, crosses: differ"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Compare trainings on 1 to 8 ranks bit for bit: a list in which every pair of settings occurs.",
    epilog="""Examples:

    python benchmarks/world_size.py

    python benchmarks/world_size.py --model gpt --precision fp8-delayed --steps 3

    torchrun --nproc-per-node 2 benchmarks/world_size.py --device cuda --most-ranks 2""",
)
def main(
    model: Annotated[
        list[Model] | None, typer.Option(help="Default: both; hf-llama needs transformers.")
    ] = None,
    precision: Annotated[
        list[PrecisionName] | None, typer.Option(help="Default: fp32, bf16, fp8-delayed and fp8-current.")
    ] = None,
    most_ranks: Annotated[int, typer.Option(min=2, help="Leave out runs on more ranks.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 10,
    layers: options.Layers = 2,
    hidden: options.Hidden = 64,
    heads: options.Heads = 2,
    seq: options.Seq = 32,
    device: options.OnDevice = Device.cpu,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    runs = covering(tuple(model or Model), tuple(precision or PRECISIONS), most_ranks)
    settings = Settings(GPTConfig(layers, hidden, heads, seq), batch=2, steps=steps)
    launch = replace(launch_of(max(run.ranks for run in runs), device), deterministic=True)
    rows = run_on_ranks(run_all, (runs, settings), launch)
    plain: list[dict[str, Any]] = []
    if PrecisionName.fp32 in (precision or PRECISIONS):
        plain = run_on_ranks(run_plain, (tuple(model or Model), most_ranks, settings), launch)
    if not is_main():
        return
    kind = "cuda" if launch.use_cuda() else "cpu"
    payload = {"environment": environment(kind), "settings": asdict(settings), "rows": rows, "plain": plain}
    publish(
        payload,
        out,
        f"world-size-{kind}",
        draw=lambda path: draw(rows, path),
        show=lambda: show(rows, plain),
        as_json=as_json,
    )
    raise typer.Exit(int(any(row["differences"] for row in (*rows, *plain))))


if __name__ == "__main__":
    app()
