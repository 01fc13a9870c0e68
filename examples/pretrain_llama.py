"""Pretrain a Llama of any size on real text, spread over ranks in every way that FlatFSDP supports.

    python examples/pretrain_llama.py --help

The text is bytes, one per token.  A killed run continues from its last checkpoint when the same command
starts it again, with bit-equal losses; on GPUs with --deterministic.  With --lanes it may be started again on
another number of data-parallel ranks; without, --accept-changes lets it go on there with other bits.  In any
case it goes on with the next piece of text: a checkpoint has the number of those that all ranks have read.
SIGTERM, which cluster schedulers send before they take machines away, makes it save and end, unless
--save-every is 0: allow it the time of a step and a save (torchrun waits for 30 s).
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from timeline import cpu_spans_of, redraw, save_spans, spans_in
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flatfsdp import param_groups
from flatfsdp.checkpoint import CheckpointManager
from flatfsdp.checkpoint.stages import raising_on_all
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.launch import Device, Launch, take_gpu, under_torchrun
from flatfsdp.comm.paths import local_path
from flatfsdp.models import PRESETS, LlamaConfig, LlamaPipeline, flops_per_token
from flatfsdp.models.text import Sampler, load_corpus
from flatfsdp.optim import AdamW, NonFinite
from flatfsdp.parallel import make_mesh
from flatfsdp.profiling import LogName, Metrics, open_logs, require_logs
from flatfsdp.profiling.logs import Log
from flatfsdp.profiling.step_time import to_json
from flatfsdp.training import command_options
from flatfsdp.training.choices import PrecisionName

ENDED_BY_SIGTERM = 128 + signal.SIGTERM
"""The exit status that a shell reports for a process ended by the signal."""


class Termination:
    """Whether this process was asked to end, by SIGTERM; it does so between two steps."""

    def __init__(self) -> None:
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.is_asked = True


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Checks that a checkpoint belongs to a run with the same settings.

    Raises:
        typer.BadParameter: if settings differ; the message names them.
    """
    changed = [
        f"{name} was {saved.get(name)} and is {now[name]}" for name in now if saved.get(name) != now[name]
    ]
    if changed:
        raise typer.BadParameter(
            f"the run in --out has other settings: {'; '.join(changed)}.  Start it as before, choose another "
            "--out, or go on with the new settings by --accept-changes"
        )


def in_words(choices: list[str]) -> str:
    """The choice of all stages, or that of each one."""
    return ", ".join(choices if len({*choices}) > 1 else choices[:1])


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


class Report:
    """Progress of each step on the first rank: a bar on stderr, or JSON on stdout; and its logs."""

    def __init__(self, as_json: bool, first: int, steps: int, logs: list[Log]) -> None:
        self.is_main, self.as_json, self.logs = dist.get_rank() == 0, as_json, logs
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=Console(stderr=True), disable=as_json or not self.is_main)
        self.task = self.bar.add_task("", total=steps, completed=first)

    def title(self, *lines: Any) -> None:
        """Prints lines above the bar."""
        if not self.bar.disable:
            self.bar.console.print(*lines, highlight=False)

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """Reports the figures of one step."""
        if self.as_json and self.is_main:
            print(to_json({"step": step, **figures}), flush=True)
        for log in self.logs:
            log.write(step, figures)
        text = (
            "loss {loss:.4f}  gradient norm {grad_norm:.2f}  {tokens_per_s:,.0f} tokens/s  "
            "{tflops_per_rank:.3g} TFLOP/s a rank  {peak_gib:.1f} GiB"
        ) + ("" if figures["mfu"] is None else "  MFU {mfu:.1%}")
        self.bar.update(self.task, completed=step, description=text.format(**figures))


def start_ranks(wanted: Device, deterministic: bool, flights: Path | None) -> torch.device:
    """Joins the other ranks that torchrun has started; or is alone.

    Args:
        wanted: kind of device.
        deterministic: whether GPUs compute the same bits in every run.
        flights: folder for what PyTorch's flight recorder writes when a collective of NCCL takes too long.
    """
    if deterministic:
        # cuBLAS reads it when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    on_gpu = Launch(None if under_torchrun() else 1, wanted).use_cuda()
    if flights is not None:
        if not on_gpu:
            raise typer.BadParameter("--flight-recorder records collectives of NCCL, and there is no GPU")
        # NCCL's process group reads them when it is made; each rank adds its number to the file's name.
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        flights.mkdir(parents=True, exist_ok=True)
        for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
            os.environ[name] = str(flights / "rank-")
    device = take_gpu(int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    alone = {} if under_torchrun() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend, bound = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, timeout=timedelta(seconds=300), device_id=bound, **alone)
    return device


@contextmanager
def recorded_memory(file: Path, device: torch.device) -> Iterator[None]:
    """Context that records the GPU's allocations; the file is written at its end, also after an error.

    https://pytorch.org/memory_viz draws it.
    """
    if device.type != "cuda":
        raise typer.BadParameter("--memory-snapshot records allocations of a GPU, and there is none")
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)


def told_to_all(
    losses: list[Tensor],
    places: list[int],
    total: int,
    is_asked: bool,
    model: LlamaPipeline,
    device: torch.device,
) -> tuple[float, bool]:
    """The loss, averaged over the microbatches of all ranks, and whether any rank was asked to end.

    Args:
        losses: of this rank's microbatches.
        places: their numbers among those of all ranks.
        total: number of microbatches of all ranks.
        is_asked: whether this rank was asked to end.
        model: model of the losses.
        device: device to communicate on.
    """
    told = torch.zeros(total + 1, device=device)
    if model.has_last and model.mesh.tp_rank == 0:
        told[places] = torch.stack(losses)
    told[-1] = is_asked
    dist.all_reduce(told)
    # Others add zeros, and here the order is that of the microbatches: the same bits on any number of ranks.
    *each, asked = told.tolist()
    return sum(each) / total, asked > 0


app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    context: typer.Context,
    preset: command_options.OfModel = "tiny",
    config: command_options.Config = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a sequence; default: the preset's.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch: command_options.ReplicaBatch = 2,
    microbatches: Annotated[
        int,
        typer.Option(min=1, help="Microbatches in a step of a replica; with --lanes, of all ranks together."),
    ] = 4,
    lanes: Annotated[
        int | None,
        typer.Option(min=1, help="Any number of data-parallel ranks that divides it has the same bits."),
    ] = None,
    lane_block: Annotated[
        int, typer.Option(min=1, help="Lanes added inside a replica first; a multiple of its ranks.")
    ] = 1,
    tp: command_options.TP = 1,
    sequence_parallel: command_options.SequenceParallel = False,
    tp_overlap: Annotated[bool, typer.Option(help="What they send overlaps with its product.")] = False,
    pp: command_options.PP = 1,
    schedule: command_options.OfPipeline = "1f1b",
    stages_per_rank: command_options.StagesPerRank = 2,
    dp_shard: command_options.DPShard = -1,
    dp_replicate: command_options.DPReplicate = 1,
    zero: command_options.Zero = 3,
    grad_sync: command_options.OfReductions = "last",
    precision: command_options.OfProducts = PrecisionName.bf16,
    fp8_weights: command_options.KeepFP8Weights = False,
    replay: command_options.Replay = False,
    optimize_backward_concat: Annotated[bool, typer.Option(help="The flag.")] = True,
    lr: Annotated[float, typer.Option(help="Peak of the learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps up to it.")] = 10,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of initial values, and of the order of the text.")] = 0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits on GPUs.")] = False,
    on: command_options.OnDevice = Device.auto,
    data: Annotated[Path | None, typer.Option(help="File or folder; default: Python's sources.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("out/pretrain"),
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: none.")] = 50,
    checkpoints_in: Annotated[
        str, typer.Option("--checkpoints", help="Their folder, or its URL in a store; default: below --out.")
    ] = "",
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints to keep.")] = 2,
    async_save: Annotated[
        bool, typer.Option("--async-save", help="Write checkpoints while training goes on.")
    ] = False,
    nonfinite: Annotated[
        NonFinite, typer.Option(help="At a gradient with NaN: stop, leave the step out, or take it.")
    ] = "raise",
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with other settings than the run was started with."),
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Draw the third step, or the last.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON a step.")] = False,
    log_to: Annotated[
        list[LogName], typer.Option(help="Where figures go, below --out or to W&B; several allowed.")
    ] = [],  # noqa: B006  # typer's way to say none
    memory_snapshot: Annotated[
        bool, typer.Option("--memory-snapshot", help="Record a GPU's allocations, for memory_viz.")
    ] = False,
    flight_recorder: Annotated[
        bool, typer.Option("--flight-recorder", help="Write NCCL's last collectives if ranks hang.")
    ] = False,
) -> None:
    """Pretrain a Llama of any size on real text; started again after it was killed, it goes on.

    [bold]Examples[/bold]

    [green]python examples/pretrain_llama.py[/green]

    [green]torchrun --nproc-per-node 4 examples/pretrain_llama.py --tp 2 --pp 2 --schedule interleaved[/green]

    [green]torchrun --nproc-per-node 4 examples/pretrain_llama.py --preset 1b --precision fp8-delayed
    --fp8-weights --replay[/green]

    [green]torchrun --nproc-per-node 8 examples/pretrain_llama.py --preset 1b --seq 4096 --tp 2
    --sequence-parallel --pp 2 --microbatches 16 --precision fp8-delayed --fp8-weights --trace[/green]
    """
    if lanes is None and lane_block > 1:
        raise typer.BadParameter("--lane-block says in which order --lanes are added; pass both, or neither")
    if lanes is not None and grad_sync != "last":
        raise typer.BadParameter("--lanes say when gradients are reduced: leave --grad-sync out")
    sizes = PRESETS[preset] if config is None else LlamaConfig.load(config)
    sizes = replace(sizes, seq=seq or sizes.seq)
    text = Sampler(load_corpus(data), batch, sizes.seq, seed)
    try:
        require_logs(log_to)
        # Before anything is made: --out is no URL, and the URL of a store needs a library.
        checkpoints = CheckpointManager(
            checkpoints_in or local_path(out) / "checkpoints", keep=keep, async_save=async_save
        )
    except (ModuleNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    device = start_ranks(on, deterministic, local_path(out) / "flights" if flight_recorder else None)
    if memory_snapshot:
        # Until the command ends, also by an error.
        context.with_resource(recorded_memory(local_path(out) / f"memory-{dist.get_rank()}.pickle", device))
    mesh = make_mesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    model = LlamaPipeline(
        sizes,
        mesh,
        schedule,
        microbatches=microbatches,
        batch=batch,
        device=device,
        stages_per_rank=stages_per_rank,
        precision=precision.dtypes(fp8_weights),
        sequence_parallel=sequence_parallel,
        tp_overlap=tp_overlap,
        recipe=precision.recipe,
        seed=seed,
        replay=replay,
        grad_sync=grad_sync,
        lanes=None if lanes is None else Lanes(lanes, lane_block),
        reshard_after_forward=zero == 3,
        optimize_backward_concat=optimize_backward_concat,
    )
    norms = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
    optimizer = AdamW(
        param_groups(model.stages, [norms]),
        lr,
        betas=(0.9, 0.95),
        weight_decay=weight_decay,
        max_grad_norm=clip,
        pp_group=mesh.pp_group,
        nonfinite=nonfinite,
    )
    # With lanes the microbatches of all ranks are numbered as if they were one rank's.
    data_rank, total = (mesh.dp_rank, mesh.dp_size * microbatches) if lanes is None else (0, microbatches)
    settings = {
        "model": asdict(sizes),
        "seed": seed,
        "data": hashlib.sha256(text.bytes_n.numpy()).hexdigest()[:16],
        "data-parallel ranks": mesh.dp_size if lanes is None else "any",
        "lanes": lanes,
        "microbatches": microbatches,
        "batch": batch,
        # It changes the order of sums if there are several microbatches.  Of "auto" it is what was chosen, as
        # GPUs with other memory may choose otherwise.
        "grad sync": in_words(model.grad_sync_of_stages()) if microbatches > 1 else "last",
        "steps": steps,
        "lr": lr,
        "warmup": warmup,
        "weight decay": weight_decay,
        "clip": clip,
        "precision": f"{precision.value}{', FP8 weights' if fp8_weights else ''}",
    }

    def sequences_before(step: int) -> int:
        """Number of sequences that all ranks have read before a step, in all runs together."""
        return sequences + (step - first) * total * batch

    def train(step: int) -> tuple[float, bool]:
        # Places of this rank's microbatches among those of all ranks.
        places = [data_rank * microbatches + number for number in model.own_microbatches]
        with metrics.loading():
            batches = [
                tuple(part.to(device) for part in text.sample_from(sequences_before(step) + place * batch))
                for place in places
            ]
        taken = step - skipped - int(optimizer.skipped_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(taken, steps, lr, warmup)
        losses = model.forward_backward(batches)
        optimizer.step()
        optimizer.zero_grad()
        # A rank's share of the tokens that all ranks train on.
        metrics.count(total * batch * sizes.seq / dist.get_world_size())
        return told_to_all(losses, places, total, termination.is_asked, model, device)

    def traced(step: int) -> tuple[float, bool]:
        """Runs a step that leaves trace.json, for a browser, and step.png, a picture of what ran when.

        `timeline.redraw` makes the picture from step.json, which is small.  Recording
        takes host time: if the host is the limit, there are more gaps than in other steps.
        """
        on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds) as recorded:
            told = train(step)
        recorded.export_chrome_trace(str(out / "trace.json"))
        groups = {mesh.tp_group.group_name: "TP"}
        spans = spans_in(out / "trace.json", groups) if on_gpu else cpu_spans_of(recorded)
        save_spans(spans, out / "step.json", f"{mesh}, {precision.value}, step {step + 1}")
        redraw(out / "step.json")
        return told

    out.mkdir(parents=True, exist_ok=True)
    termination = Termination()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    resumed = checkpoints.resume(
        model.stages, optimizer, accept=("dtype", "surplus", "lanes") if accept_changes else ()
    )
    first, skipped, sequences, is_asked_to_end = 0, 0, 0, False
    if resumed is not None:
        first, skipped, sequences = resumed.step, resumed.extra["skipped"], resumed.extra["sequences"]
        if not accept_changes:
            check_same_run(resumed.extra["settings"], settings)
        # A checkpoint has the options of its parameter groups, too.
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
    with raising_on_all(model.stages[0]):
        logs = open_logs(log_to if dist.get_rank() == 0 else (), out, settings, first=first + 1)
    for log in logs:
        context.call_on_close(log.close)
    metrics = Metrics(
        device,
        flops_per_token=flops_per_token(sizes),
        gemms="fp8" if precision.recipe else "fp32" if precision is PrecisionName.fp32 else "bf16",
        replayed=model.replayed,
    )
    report = Report(as_json, first, steps, logs)
    report.title(f"{mesh}, {data or 'the Python standard library'}", metrics, mesh.table())
    with report.bar, checkpoints:
        for step in range(first, steps):
            is_drawn = trace and report.is_main and step == min(first + 2, steps - 1)
            run = traced if is_drawn else train
            loss, is_asked_to_end = run(step)
            report.step(step + 1, metrics.report(loss=loss, grad_norm=optimizer.grad_norm))
            is_last = is_asked_to_end or step + 1 == steps
            if save_every and (is_last or (step + 1) % save_every == 0):
                in_all = skipped + int(optimizer.skipped_steps)
                read = sequences_before(step + 1)
                extra = {"settings": settings, "skipped": in_all, "sequences": read}
                with metrics.paused():
                    checkpoints.save(step + 1, model.stages, optimizer, extra)
            if is_asked_to_end:
                break
    optimizer.raise_if_nonfinite()
    # The mesh and the pipeline's stages hold process groups.  They have to be released before the interpreter
    # ends: gloo's threads may still hold tensors, and would abort the process.
    mesh = model = optimizer = metrics = None
    gc.collect()
    dist.destroy_process_group()
    if is_asked_to_end:
        raise typer.Exit(ENDED_BY_SIGTERM)


if __name__ == "__main__":
    app()
