"""How long does a training step take with FlatFSDP, with PyTorch's FSDP2 and with fairscale's FSDP?

One run measures all engines, one after the other, on the same ranks with the same data, the same model seed
and the same optimizer: forward and backward of M microbatches, one sequence each, then AdamW.  Every engine
computes in bf16 and keeps FP32 masters; gradients are reduced in FP32, in the last microbatch's backward.
FlatFSDP and FSDP2 also accumulate in FP32; fairscale 0.4.13 accumulates in bf16, which moves fewer bytes.

Between engines everything is freed.  The first one is measured once more at the end: if its two figures
differ, the machine drifted by that much, and smaller differences between engines mean nothing.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import torch
import torch.distributed as dist
import typer
from _common import RESULTS, environment
from _llama import SHAPES, Layer, Llama, LlamaConfig, flops_per_token
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.cli.ranks import Device, Launch, Rank, is_main, run_on_ranks, under_torchrun

SEED = 0
LEARNING_RATE = 1e-4
GIB = 2**30


class Engine(str, Enum):
    flat_off = "flat-off"
    flat_on = "flat-on"
    fsdp2 = "fsdp2"
    fairscale = "fairscale"


LABELS = {
    Engine.flat_off: "FlatFSDP, flag off",
    Engine.flat_on: "FlatFSDP, flag on",
    Engine.fsdp2: "FSDP2",
    Engine.fairscale: "fairscale 0.4.13 (bf16 sums)",
}


@dataclass(frozen=True)
class Variant:
    """An engine, with its layers eager or each one compiled."""

    engine: Engine
    compiled: bool = False

    @property
    def name(self) -> str:
        return self.engine.value + ("-compile" if self.compiled else "")

    @property
    def label(self) -> str:
        return LABELS[self.engine] + (", compile" if self.compiled else "")

    def unavailable(self, device: torch.device) -> str:
        """Why it cannot run here; empty if it can."""
        if self.engine is Engine.fairscale and importlib.util.find_spec("fairscale") is None:
            return "fairscale is not installed"
        if self.engine is Engine.fairscale and device.type != "cuda":
            return "fairscale needs CUDA"
        return ""


@dataclass(frozen=True)
class Job:
    """What every rank measures.

    Attributes:
        shape: key of `SHAPES`.
        reshard: parameters are freed after each forward and backward (ZeRO-3), or kept for a step (ZeRO-2).
        steps, warmup: of each run, timed and before those.
        rounds: how often the variants are measured in turn.
        traces: folder for a Chrome trace of one more step of each variant.
    """

    shape: str
    microbatches: int
    reshard: bool
    steps: int
    warmup: int
    rounds: int
    variants: tuple[Variant, ...]
    traces: Path | None

    @property
    def config(self) -> LlamaConfig:
        return SHAPES[self.shape]

    @property
    def name(self) -> str:
        return f"step-{self.shape}-m{self.microbatches}-{'reshard' if self.reshard else 'keep'}"

    def order(self) -> list[Variant]:
        return [*(self.variants * self.rounds), self.variants[0]]


@dataclass(frozen=True)
class Run:
    """One variant, built, warmed up and timed once.

    Attributes:
        ms: of each timed step.
        losses: of each step, those of warm-up included; mean over microbatches.
        peak_gib: most memory allocated during the timed steps.
        leftover_gib: allocated before the model was built: the data, and what earlier runs did not free.
    """

    ms: list[float]
    losses: list[float]
    peak_gib: float
    leftover_gib: float


@dataclass(frozen=True)
class Row:
    """All runs of a variant, over all ranks: the slowest one's times, the mean of losses, the highest peak.

    Attributes:
        skipped: why it could not be measured here, or empty.
        failed: what went wrong in one of its runs, or empty.
    """

    variant: Variant
    runs: list[Run]
    skipped: str = ""
    failed: str = ""

    @property
    def ms(self) -> float | None:
        """Median of all timed steps."""
        return statistics.median(ms for run in self.runs for ms in run.ms) if self.runs else None


# -- engines ---------------------------------------------------------------------------------------------


def shard(model: Llama, variant: Variant, reshard: bool, device: torch.device) -> nn.Module:
    """The model, on `device` in FP32, in the hands of an engine; one unit a layer and one for the rest."""
    if variant.compiled:
        for layer in model.layers:
            # The forward and not the module: an engine's hooks run around it, uncompiled.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    if variant.engine is Engine.fsdp2:
        return _fsdp2(model, reshard, device)
    if variant.engine is Engine.fairscale:
        return _fairscale(model, reshard)
    return auto_wrap(
        model,
        by_class(Layer),
        device=device,
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=reshard,
        optimize_backward_concat=variant.engine is Engine.flat_on,
    )


def _fsdp2(model: Llama, reshard: bool, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    # None: the root's own parameters stay from its forward to its backward, as with the other engines.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=None if reshard else False)
    return model


def _fairscale(model: Llama, reshard: bool) -> nn.Module:
    fsdp = importlib.import_module("fairscale.nn.data_parallel").FullyShardedDataParallel
    options = {
        "reshard_after_forward": reshard,
        "mixed_precision": True,
        "compute_dtype": torch.bfloat16,
        "buffer_dtype": torch.float32,
        "fp32_reduce_scatter": True,
    }
    for index, layer in enumerate(model.layers):
        model.layers[index] = fsdp(layer, **options)
    return fsdp(model, **options)


def position(model: nn.Module, is_last: bool, reshard: bool) -> AbstractContextManager[None]:
    """Tells engines other than FlatFSDP whether the microbatch inside is the last one of its step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        # Without this FSDP2 gathers anew in every microbatch even when it keeps parameters after forward.
        model.set_reshard_after_backward(is_last or reshard)
    elif not isinstance(model, FlatFSDP) and not is_last:
        return model.no_sync()  # type: ignore[operator]
    return nullcontext()


# -- measuring -------------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's own time line, so that the host may run ahead; on CPU, wall-clock time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between consecutive marks; waits for the last one."""
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events, self._events[1:], strict=False)
            return [start.elapsed_time(end) for start, end in pairs]
        return [1e3 * (end - start) for start, end in zip(self._times, self._times[1:], strict=False)]


def measure_all(rank: Rank, job: Job) -> list[Row]:
    """On one rank: every variant, by turns; all ranks return the same."""
    batches = _batches(job, rank)
    runs: dict[Variant, list[Run]] = {variant: [] for variant in job.variants}
    skipped = {variant: variant.unavailable(rank.device) for variant in job.variants}
    failed = dict.fromkeys(job.variants, "")
    for variant in job.order():
        if skipped[variant] or failed[variant]:
            continue
        try:
            mine: Run | str = _measure(variant, job, rank, batches)
        except Exception as error:  # the other engines' figures are worth having
            mine = f"{type(error).__name__}: {error}".strip()
            if rank.index == 0:
                traceback.print_exc()
        # Only now that the exception is gone, and its frames with it, can all of the model go.
        _free(rank.device)
        everyones: list[Any] = [None] * rank.world
        dist.all_gather_object(everyones, mine)
        problems = [
            f"rank {index}: {found}" for index, found in enumerate(everyones) if isinstance(found, str)
        ]
        if problems:
            failed[variant] = problems[0]
        else:
            runs[variant].append(_over_ranks(everyones))
        if rank.index == 0:
            outcome = failed[variant] or f"{statistics.median(runs[variant][-1].ms):.1f} ms/step"
            print(f"{variant.label}: {outcome}", file=sys.stderr, flush=True)
    return [Row(v, runs[v], skipped[v], failed[v]) for v in job.variants]


def _measure(variant: Variant, job: Job, rank: Rank, batches: list[tuple[Tensor, ...]]) -> Run:
    leftover = _allocated(rank.device)
    torch.manual_seed(SEED)
    # Where it will be sharded: a host may not have room for an FP32 copy of the model for each rank.
    with rank.device:
        plain = Llama(job.config)
    model = shard(plain, variant, job.reshard, rank.device)
    del plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> Tensor:
        losses = []
        for index, batch in enumerate(microbatches(model, batches)):
            with position(model, index == len(batches) - 1, job.reshard):
                loss = model(*batch)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    losses = [step() for _ in range(job.warmup)]
    dist.barrier()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(rank.device)
    clock.mark()
    for _ in range(job.steps):
        losses.append(step())
        clock.mark()
    milliseconds = clock.gaps()
    peak = torch.cuda.max_memory_allocated() / GIB if rank.device.type == "cuda" else 0.0
    values = torch.stack(losses).tolist()
    # With NaN in the data a GPU draws less power and runs faster: such a time is no result.
    wrong = [index for index, value in enumerate(values) if not math.isfinite(value)]
    if wrong:
        raise FloatingPointError(f"the loss of step {wrong[0]} is {values[wrong[0]]}")
    if job.traces is not None:
        _trace(step, job.traces / f"{job.name}-{variant.name}.json", rank)
    return Run(milliseconds, values, peak, leftover)


def _trace(step: Callable[[], Tensor], path: Path, rank: Rank) -> None:
    """A Chrome trace of one step on rank 0."""
    if rank.index != 0:
        step()
        return
    with profile() as recorded:
        step().item()
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))


def _batches(job: Job, rank: Rank) -> list[tuple[Tensor, ...]]:
    """One sequence for each microbatch, the same in every step and for every engine."""
    config, device = job.config, rank.device
    generator = torch.Generator(device).manual_seed(SEED + 1 + rank.index)

    def batch() -> tuple[Tensor, ...]:
        if not config.vocab:
            shape = (1, config.seq, config.hidden)
            return (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16),)
        tokens = torch.randint(config.vocab, (1, config.seq + 1), generator=generator, device=device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return (inputs, targets) if config.loss == "cross-entropy" else (inputs,)

    return [batch() for _ in range(job.microbatches)]


def _over_ranks(runs: list[Run]) -> Run:
    return Run(
        ms=[max(step) for step in zip(*(run.ms for run in runs), strict=True)],
        losses=[statistics.fmean(step) for step in zip(*(run.losses for run in runs), strict=True)],
        peak_gib=max(run.peak_gib for run in runs),
        leftover_gib=max(run.leftover_gib for run in runs),
    )


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0


def _free(device: torch.device) -> None:
    """Models are full of reference cycles, and compiled code keeps what it was traced with."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- what is shown ---------------------------------------------------------------------------------------


def summary(row: Row, rows: list[Row], job: Job) -> dict[str, Any]:
    """One row with what follows from it; times None if it has no run.

    `time_vs_fsdp2` is relative to FSDP2 in the same mode, eager or compiled; below 1 is faster.
    """
    ms, per_second, vs_fsdp2 = row.ms, None, None
    if ms is not None:
        per_second = 1e3 * job.microbatches * job.config.seq / ms
        peer = [r.ms for r in rows if r.variant == Variant(Engine.fsdp2, row.variant.compiled)]
        vs_fsdp2 = ms / peer[0] if peer and peer[0] is not None else None
    return {
        "name": row.variant.name,
        "label": row.variant.label,
        "skipped": row.skipped,
        "failed": row.failed,
        "ms": ms,
        "tokens_per_s_per_rank": per_second,
        "tflops_per_rank": None if per_second is None else per_second * flops_per_token(job.config) / 1e12,
        "peak_gib": max((run.peak_gib for run in row.runs), default=None),
        "time_vs_fsdp2": vs_fsdp2,
        "runs": [{"median_ms": statistics.median(run.ms), **asdict(run)} for run in row.runs],
    }


def flag_changes_nothing(rows: list[Row]) -> dict[str, bool]:
    """Whether FlatFSDP's losses are the same in every step with the flag off and on, for each mode."""
    losses = {row.variant: row.runs[0].losses for row in rows if row.runs}
    found = {}
    for compiled, mode in ((False, "eager"), (True, "compile")):
        off, on = (losses.get(Variant(engine, compiled)) for engine in (Engine.flat_off, Engine.flat_on))
        if off is not None and on is not None:
            found[mode] = off == on
    return found


def show(payload: dict[str, Any], job: Job, ranks: int) -> None:
    console = Console()
    console.width = max(console.width, 120)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(job, ranks)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("engine", no_wrap=True)
    for column in ("ms/step", "tokens/s\nper rank", "TFLOP/s\nper rank", "peak\nGiB", "time vs\nFSDP2"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("first\nloss", "last\nloss", "ms/step\nof each run"):
        table.add_column(column, justify="right", style="cyan", no_wrap=True)
    for row in payload["rows"]:
        if not row["runs"]:
            table.add_row(row["label"], "[red]failed[/]" if row["failed"] else "skipped")
            continue
        losses = row["runs"][0]["losses"]
        table.add_row(
            row["label"],
            f"[bold]{row['ms']:.1f}[/]",
            f"{row['tokens_per_s_per_rank']:,.0f}",
            f"{row['tflops_per_rank']:.1f}",
            f"{row['peak_gib']:.1f}",
            "-" if row["time_vs_fsdp2"] is None else f"{row['time_vs_fsdp2']:.3f}",
            f"{losses[0]:.5f}",
            f"{losses[-1]:.5f}",
            " / ".join(f"{run['median_ms']:.1f}" for run in row["runs"]),
        )
    console.print(table)
    for row in payload["rows"]:
        if row["failed"]:
            console.print(f"{row['label']} failed: {row['failed']}", style="red", markup=False)
        elif row["skipped"]:
            console.print(f"{row['label']}: skipped, {row['skipped']}", markup=False)
    leftovers = [run["leftover_gib"] for row in payload["rows"] for run in row["runs"]]
    if leftovers and max(leftovers) - min(leftovers) > 0.5:
        console.print(
            f"[red]Up to {max(leftovers) - min(leftovers):.1f} GiB of earlier runs were not freed.[/]"
        )
    for mode, same in payload["flag_changes_nothing"].items():
        answer = "the same in every step" if same else "[red]not the same[/]"
        console.print(f"FlatFSDP, {mode}: losses with the flag off and on are {answer}.")


def _title(job: Job, ranks: int) -> str:
    zero = "freed after use (ZeRO-3)" if job.reshard else "kept for a step (ZeRO-2)"
    return f"Training step of {job.shape}, {ranks} ranks, M = {job.microbatches}, parameters {zero}"


COLORS = {
    Engine.flat_off: "#76b7b2",
    Engine.flat_on: "#4e79a7",
    Engine.fsdp2: "#f28e2b",
    Engine.fairscale: "#bab0ac",
}


def draw(payload: dict[str, Any], job: Job, ranks: int, path: Path) -> None:
    """One bar for each variant that ran: milliseconds a step."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in payload["rows"] if row["runs"]]
    colors = {variant.label: COLORS[variant.engine] for variant in job.variants}
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    for row in rows:
        axis.barh(row["label"], row["ms"], color=colors[row["label"]], height=0.7)
        ratio = "" if row["time_vs_fsdp2"] is None else f", {row['time_vs_fsdp2']:.3f} of FSDP2"
        note = f" {row['ms']:.1f} ms, {row['tflops_per_rank']:.0f} TFLOP/s{ratio}"
        axis.text(row["ms"], row["label"], note, va="center", fontsize=9)
    axis.set_xlim(right=1.5 * max((row["ms"] for row in rows), default=1.0))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("ms per step, forward, backward and AdamW (median)")
    axis.set_title(_title(job, ranks), loc="left", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


@app.command(
    help="Training step of FlatFSDP beside FSDP2 and fairscale: same ranks, data, model and optimizer.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 70b-l2 --microbatches 16 --keep

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --compile

    torchrun --nproc-per-node 4 benchmarks/step.py --engines flat-on --engines fsdp2 --rounds 3 --json

    python benchmarks/step.py --shape tiny --device cpu --ranks 2""",
)
def main(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES), callback=_known_shape)] = "70b-l2",
    accumulation: Annotated[
        int, typer.Option("--microbatches", min=1, help="Microbatches a step, one sequence each.")
    ] = 1,
    reshard: Annotated[
        bool,
        typer.Option("--reshard/--keep", help="Free parameters after use (ZeRO-3), or once a step (ZeRO-2)."),
    ] = True,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each run.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before those.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Times to measure every engine, by turns.")] = 1,
    engines: Annotated[list[Engine], typer.Option(help="Repeat for several.")] = list(Engine),  # noqa: B006
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also with every layer compiled, except fairscale's.")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where the ranks run.")] = Device.auto,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to start; torchrun starts its own.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for the JSON and the picture.", show_default="benchmarks/results")
    ] = RESULTS,
    traces: Annotated[
        Path | None, typer.Option("--trace", help="Folder for a Chrome trace of one step of each engine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    chosen = [Variant(engine) for engine in dict.fromkeys(engines)]
    if compiled:
        chosen += [Variant(v.engine, compiled=True) for v in chosen if v.engine is not Engine.fairscale]
    job = Job(shape, accumulation, reshard, steps, warmup, rounds, tuple(chosen), traces)
    try:
        launch = Launch(None if under_torchrun() else ranks, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": {**asdict(job), "variants": [v.name for v in chosen], "traces": traces is not None},
            "config": asdict(job.config),
            "flops_per_token": flops_per_token(job.config),
            "rows": [summary(row, rows, job) for row in rows],
            "flag_changes_nothing": flag_changes_nothing(rows),
        }
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(payload, indent=2)
        (out / f"{job.name}.json").write_text(text + "\n")
        draw(payload, job, launch.world, out / f"{job.name}.png")
        if as_json:
            typer.echo(text)
        else:
            show(payload, job, launch.world)
            typer.echo(f"Written: {job.name}.json, {job.name}.png in {out.name}/")
    # Only the rank that writes: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
