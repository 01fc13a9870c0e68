"""Memory and time of real runs, beside the predictions of `python -m flatfsdp plan`.

Trains a Llama on random tokens in several layouts, one after the other on the same ranks, and records the
time of a step and each rank's memory between steps and at its peak, as counted by PyTorch's allocator.  The
table shows the plan beside it.  Results contain measurements only, so that later plans can be compared with
them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from lib import options
from lib.common import RESULTS, environment, launch_of
from lib.device import GIB, allocated_gib, free_memory, peak_gib, start_together, timed
from rich.console import Console
from rich.table import Table

from flatfsdp import Precision
from flatfsdp.comm.launch import Device, Rank, is_main, run_on_ranks
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling
from flatfsdp.models import PRESETS, LlamaConfig, LlamaPipeline
from flatfsdp.optim import AdamW
from flatfsdp.parallel import make_mesh
from flatfsdp.plan import Job, Parallelism, plan

BF16 = Precision(compute=torch.bfloat16)
FP8_WEIGHTS = replace(BF16, fp8_weights=CurrentScaling())
DELAYED = DelayedScaling(amax_history_len=16)


def jobs(model: LlamaConfig, gpus: int) -> Iterator[tuple[str, Job]]:
    """The measured layouts by name: data, tensor and pipeline-parallel ranks, in bf16 and FP8."""
    dp, pp, tp = Parallelism(dp_shard=gpus), Parallelism(pp=gpus), Parallelism(tp=gpus)
    tp_sp = replace(tp, sequence_parallel=True)
    yield "zero3-fp8-delayed", Job(model, dp, 4, 4, FP8_WEIGHTS, DELAYED)
    yield "zero3-fp8-delayed-every", Job(model, dp, 4, 4, FP8_WEIGHTS, DELAYED, grad_sync="every")
    yield "1f1b-bf16", Job(model, pp, 2, 8, BF16)
    yield "tp-sp-fp8-delayed", Job(model, tp_sp, 4, 4, FP8_WEIGHTS, DELAYED)
    yield "zero2-bf16", Job(model, dp, 2, 4, BF16, reshard_after_forward=False)
    yield "interleaved-fp8-delayed", Job(model, pp, 2, 8, FP8_WEIGHTS, DELAYED, schedule="interleaved")
    yield "gpipe-bf16", Job(model, pp, 1, 8, BF16, schedule="gpipe")
    yield "zero3-bf16-one-microbatch", Job(model, dp, 4, 1, BF16)
    yield "tp-bf16", Job(model, tp, 2, 4, BF16)
    yield "zero3-fp8-current-cast-in-layers", Job(model, dp, 2, 4, BF16, CurrentScaling())
    yield "zero3-bf16-unfused", Job(model, dp, 2, 4, BF16, None, False)
    yield "zero3-fp8-block", Job(model, dp, 2, 4, BF16, BlockScaling())
    yield "1f1b-fp8-delayed", Job(model, pp, 2, 8, FP8_WEIGHTS, DELAYED)


@dataclass(frozen=True)
class Measured:
    """The measurements of one layout.

    Attributes:
        ms: median time of a step on the slowest rank.
        static_gib, peak_gib: memory of each rank, allocated between steps and at the peak.
    """

    name: str
    ms: float
    static_gib: list[float]
    peak_gib: list[float]


@dataclass(frozen=True)
class Task:
    """The settings of a measurement.

    Attributes:
        only: names of `jobs`; empty means all.
    """

    model: LlamaConfig
    steps: int
    warmup: int
    only: tuple[str, ...] = ()


def measure_all(rank: Rank, task: Task) -> list[Measured]:
    """Measures all layouts; collective, with the same result on all ranks."""
    return [
        _measure(rank, task, name, job)
        for name, job in jobs(task.model, rank.world)
        if not task.only or name in task.only
    ]


def _measure(rank: Rank, task: Task, name: str, job: Job) -> Measured:
    free_memory(rank.device)
    before = allocated_gib(rank.device)
    step = _training(rank, job)
    for _ in range(task.warmup):
        step()
    start_together(rank.device)
    ms = statistics.median(timed(step, task.steps, rank.device))
    everyones: list[Any] = [None] * rank.world
    own = (ms, allocated_gib(rank.device) - before, peak_gib(rank.device) - before)
    dist.all_gather_object(everyones, own)
    times, static, peak = zip(*everyones, strict=True)
    return Measured(name, max(times), list(static), list(peak))


def _training(rank: Rank, job: Job) -> Callable[[], None]:
    ranks, config = job.ranks, job.model
    assert isinstance(config, LlamaConfig)
    mesh = make_mesh(pp=ranks.pp, dp_replicate=ranks.dp_replicate, dp_shard=ranks.dp_shard, tp=ranks.tp)
    model = LlamaPipeline(
        config,
        mesh,
        job.schedule,
        microbatches=job.microbatches,
        batch=job.batch,
        device=rank.device,
        stages_per_rank=job.stages_per_rank,
        precision=job.dtypes,
        sequence_parallel=ranks.sequence_parallel,
        fuse_wgrad_accumulation=job.fuse_wgrad_accumulation,
        recipe=job.recipe,
        reshard_after_forward=job.reshard_after_forward,
        grad_sync=job.grad_sync,
        optimize_backward_concat=True,
    )
    optimizer = AdamW(model.parameters(), 1e-4, max_grad_norm=1.0, pp_group=mesh.pp_group)
    ids = torch.randint(0, config.vocab, (job.microbatches, 2, job.batch, config.seq), device=rank.device)
    batches = [(tokens, targets) for tokens, targets in ids]

    def step() -> None:
        model.forward_backward(batches)
        optimizer.step()
        optimizer.zero_grad()

    return step


def show(found: list[dict[str, Any]], model: LlamaConfig, ranks: int, console: Console) -> None:
    table = Table(box=None, padding=(0, 0, 0, 2))
    for heading in ("", "peak GiB", "plan", "", "ms a step", "plan", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for row in found:
        job = dict(jobs(model, ranks))[row["name"]]
        planned = plan(job)
        peak, ms = planned.memory.peak / GIB, 1e3 * planned.time.seconds
        table.add_row(row["name"], *_beside(max(row["peak_gib"]), peak), *_beside(row["ms"], ms))
    console.print(table)


def _beside(measured: float, planned: float) -> tuple[str, str, str]:
    off = f"{planned / measured - 1:+.1%}" if measured else ""
    return f"{measured:.1f}", f"{planned:.1f}", off


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Steps of a Llama in several layouts, beside what `python -m flatfsdp plan` says of them.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/plan.py

    python benchmarks/plan.py --preset tiny --device cpu --ranks 2 --steps 1 --json""",
)
def main(
    preset: options.OfModel = "1b",
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 4096,
    only: Annotated[list[str] | None, typer.Option(help="Layouts by name; repeat for several.")] = None,
    steps: options.Steps = 4,
    warmup: options.Warmup = 2,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    model = replace(PRESETS[preset], seq=min(seq, PRESETS[preset].seq))
    launch = launch_of(ranks, device)
    unknown = set(only or ()) - {name for name, _ in jobs(model, launch.world)}
    if unknown:
        raise typer.BadParameter(f"{unknown.pop()!r} is no layout; see the table without --only")
    measured = run_on_ranks(measure_all, Task(model, steps, warmup, tuple(only or ())), launch)
    if is_main():
        payload: dict[str, Any] = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "model": asdict(model),
            "steps": steps,
            "rows": [asdict(row) for row in measured],
        }
        text = json.dumps(payload, indent=2)
        out.mkdir(parents=True, exist_ok=True)
        (out / f"plan-{preset}-{launch.world}.json").write_text(text + "\n")
        if as_json:
            typer.echo(text)
        else:
            show(payload["rows"], model, launch.world, Console())


if __name__ == "__main__":
    app()
