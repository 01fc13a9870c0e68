"""Does a model that somebody brings take the memory and the time that `flatfsdp.plan` says?

Trains models of Hugging Face from their configurations, on random tokens, one after the other on the same
ranks, and writes what each took: the time of a step, and the memory between steps and at most, as PyTorch's
allocator counts it.  The table has the plan beside it.  Results hold measurements only, so that later plans
can be held against them.
"""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import torch
import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, on_all_ranks, write
from lib.device import GIB, allocated_gib, free_memory, peak_gib, start_together, timed
from lib.plan_cases import CASES, TINY, Case
from rich.console import Console
from rich.table import Table

from flatfsdp import microbatches, shard
from flatfsdp.comm.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.contract.any_model import layers_of
from flatfsdp.fp8 import autocast
from flatfsdp.plan import Plan


@dataclass(frozen=True)
class Task:
    """What to measure: names of `CASES`."""

    names: tuple[str, ...]
    steps: int
    warmup: int


@dataclass(frozen=True)
class Measured:
    """One model.

    Attributes:
        ms: median of a step, of the slowest rank.
        static_gib, peak_gib: allocated between steps and at most, of the fullest rank.
        loss: the last one.
        failed: why there are no figures; empty if there are.
    """

    name: str
    ms: float = 0.0
    static_gib: float = 0.0
    peak_gib: float = 0.0
    loss: float = 0.0
    failed: str = ""


def measure_all(rank: Rank, task: Task) -> list[Measured]:
    """Collective; the same on all ranks."""
    # Once: workspaces of cuBLAS count for the first model, and for all others, which find them there.
    before = allocated_gib(rank.device)
    return [_measure(rank, task, name, before) for name in task.names]


def _measure(rank: Rank, task: Task, name: str, before: float) -> Measured:
    found = on_all_ranks(lambda: _train(rank, task, CASES[name]), rank)
    if isinstance(found, str):
        return Measured(name, failed=found)
    ms, static, peak, losses = zip(*found, strict=True)
    return Measured(name, max(ms), max(static) - before, max(peak) - before, losses[0])


def _train(rank: Rank, task: Task, case: Case) -> tuple[float, float, float, float]:
    """ms, GiB between steps, GiB at most, last loss."""
    device = rank.device
    free_memory(device)
    torch.manual_seed(0)
    with device:
        built = case.build()
    model = shard(built, layers_of(built), device=device, precision=case.precision)
    del built
    optimizer = case.optimizer_of(model.parameters())
    batches = case.batches(device)
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses.clear()
        with _region(case):
            for batch in microbatches(model, batches):
                loss = model(**batch).loss
                loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(task.warmup):
        step()
    start_together(device)
    ms = statistics.median(timed(step, task.steps, device))
    (loss,) = losses
    if not loss.isfinite():
        raise FloatingPointError(f"the loss is {loss.item()}; times of such values say nothing")
    return ms, allocated_gib(device), peak_gib(device), loss.item()


def _region(case: Case) -> AbstractContextManager[object]:
    return nullcontext() if case.recipe is None else autocast(recipe=case.recipe)


def show(found: list[dict[str, Any]], plans: dict[str, Plan], console: Console) -> None:
    """Prints each model's figures beside its plan."""
    table = Table(box=None, padding=(0, 0, 0, 2))
    for heading in ("", "peak GiB", "plan", "", "ms a step", "plan", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for row in found:
        if row["failed"]:
            table.add_row(row["name"], row["failed"])
            continue
        plan = plans[row["name"]]
        memory = _beside(row["peak_gib"], plan.memory.peak / GIB, 2)
        table.add_row(row["name"], *memory, *_beside(row["ms"], 1e3 * plan.time.seconds, 0))
    console.print(table)


def _beside(measured: float, planned: float, digits: int) -> tuple[str, str, str]:
    off = f"{planned / measured - 1:+.1%}" if measured else ""
    return f"{measured:.{digits}f}", f"{planned:.{digits}f}", off


def draw(found: list[dict[str, Any]], plans: dict[str, Plan], path: Path) -> None:
    """Bars of measured and planned peaks and times, one pair a model."""
    names = [row["name"] for row in found if not row["failed"]]
    rows = {row["name"]: row for row in found}
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.2 + 0.5 * len(names)), sharey=True, layout="constrained")
    panels = (
        ("peak memory, GiB", "peak_gib", lambda name: plans[name].memory.peak / GIB),
        ("one step, ms", "ms", lambda name: 1e3 * plans[name].time.seconds),
    )
    for axis, (title, key, planned) in zip(axes, panels, strict=True):
        places = range(len(names))
        axis.barh([place - 0.2 for place in places], [rows[name][key] for name in names], 0.38)
        axis.barh([place + 0.2 for place in places], [planned(name) for name in names], 0.38)
        axis.set_title(title)
        axis.set_yticks(list(places), names)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.legend(["measured", "planned"], loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Steps of Hugging Face models, beside what `flatfsdp.plan.plan` says of them.",
    epilog="""Examples:

    torchrun --nproc-per-node 1 benchmarks/plan_models.py

    python benchmarks/plan_models.py --only gpt2-tiny --device cpu --ranks 2 --steps 1 --json""",
)
def main(
    only: Annotated[list[str] | None, typer.Option(help="Models by name; repeat for several.")] = None,
    steps: options.Steps = 5,
    warmup: options.Warmup = 3,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 1,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    names = tuple(only or (name for name in CASES if name != TINY))
    if unknown := [name for name in names if name not in CASES]:
        raise typer.BadParameter(f"{unknown[0]!r} is no model; choose among {', '.join(CASES)}")
    launch = launch_of(ranks, device)
    measured = run_on_ranks(measure_all, Task(names, steps, warmup), launch)
    if is_main():
        rows = [asdict(row) for row in measured]
        plans = {name: CASES[name].plan(launch.world) for name in names}
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "steps": steps,
            "rows": rows,
        }
        text = write(payload, out, f"plan-models-{launch.world}", lambda path: draw(rows, plans, path))
        if as_json:
            typer.echo(text)
        else:
            show(rows, plans, Console())


if __name__ == "__main__":
    app()
