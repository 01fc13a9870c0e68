"""Time of forward and backward of one Llama layer shared by N ranks, beside PyTorch and torchao.

One run measures all modes on the same ranks, with the same weights, inputs and output gradients in bf16:

    one       every rank computes the whole layer, for comparison
    tp        tensor parallelism: ranks share heads and columns, activations between layers are whole
    sp        also sequence parallelism: between layers, each rank has its part of the sequence
    overlap   also all-gathers and sums in chunks, beside their own GEMM (`tp_overlap`)

The peer is PyTorch's own tensor parallelism: `parallelize_module` with ColwiseParallel, RowwiseParallel and
SequenceParallel on a plain layer with the same fused projections and attention; eager, compiled, and with
torchao's float8 (one scale per tensor, gathered in FP8).  Overlap is Inductor's asynchronous tensor
parallelism there.

Ours is a later microbatch of a step: FP8 weights are already cast, and weight gradients are added to FP32
buffers inside the GEMM, 8 bytes per weight.  The peer's gradients are new bf16 tensors, 2 bytes per weight.

After the timing each layer runs one more step, whose output and gradients are compared on every rank with
those of the same engine's layer on one GPU alone, and with those of the plain layer in bf16: |split - whole|
/ |whole|, in 2-norms.  In FP8 the first shows whether ranks compute what one GPU does, the second what FP8
costs: gradients of queries and keys are small differences of large numbers, and lose most.  An error above
`TOLERANCES` is a failure.

The bytes that a rank sends are counted below autograd, for layers that are not compiled.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish, write
from lib.split_layers import EAGER_MODES, LAYERS, MODES, USUAL_MODES, Engine, Mode, Split
from lib.split_measuring import PLAIN, TOLERANCES, WHOLE, Job, ModeRuns, measure_all
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flatfsdp.comm.launch import Device, is_main, run_on_ranks
from flatfsdp.profiling.step_time import COMMUNICATION


def payload_of(job: Job, rows: list[ModeRuns], ranks: int, device: str) -> dict[str, Any]:
    """The contents of the JSON file: rows in the order of `MODES`, not of the measurement."""
    settings = asdict(job)
    rows = sorted(rows, key=lambda row: list(MODES).index(row.mode.name))
    return {
        "environment": environment(device),
        "ranks": ranks,
        "config": settings.pop("config"),
        "job": {**settings, "modes": [mode.name for mode in job.modes]},
        "flops": job.flops,
        "rows": [summary(row, rows, job, ranks) for row in rows],
    }


def summary(row: ModeRuns, rows: list[ModeRuns], job: Job, ranks: int) -> dict[str, Any]:
    """One row with derived figures; None where nothing was measured.

    `time_vs_pytorch` is relative to the fastest split mode of PyTorch in bf16, `time_vs_torchao` to
    torchao's; below 1 is faster.  `speedup` is relative to the same engine's layer on one GPU alone.
    """
    ms, mode = row.ms, row.mode
    share = 1 if mode.split is Split.one else ranks
    run = row.runs[0] if row.runs else None
    elements = job.tokens * job.config.hidden
    alone = next((other.ms for other in rows if other.mode == Mode(mode.engine, Split.one)), None)
    return {
        "name": mode.name,
        "label": mode.label,
        "engine": mode.engine.value,
        "split": mode.split.value,
        "skipped": row.skipped,
        "failed": row.failed,
        "ms": ms,
        "tflops_per_rank": None if ms is None else job.flops / share / ms / 1e9,
        "speedup": None if ms is None or alone is None else alone / ms,
        "time_vs_pytorch": _ratio(row, fastest(rows, (Engine.torch, Engine.compiled))),
        "time_vs_torchao": _ratio(row, fastest(rows, (Engine.torchao,))),
        "bytes_sent_per_element": None
        if run is None or run.sent is None
        else sum(run.sent.values()) / elements,
        "largest_error": {
            key: max((max(run.errors[key].values()) for run in row.runs), default=None) for key in TOLERANCES
        },
        "runs": [{"median_ms": statistics.median(run.ms), **asdict(run)} for run in row.runs],
    }


def fastest(rows: list[ModeRuns], engines: tuple[Engine, ...]) -> ModeRuns | None:
    """The fastest measured split mode of these engines."""
    found = [
        row for row in rows if row.runs and row.mode.engine in engines and row.mode.split is not Split.one
    ]
    return min(found, key=lambda row: row.ms or 0.0, default=None)


def _ratio(row: ModeRuns, peer: ModeRuns | None) -> float | None:
    if row.ms is None or row.mode.split is Split.one or peer is None or peer.ms is None:
        return None
    return row.ms / peer.ms


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 165)  # a table that wraps says nothing
    table = Table(title=f"\n{_title(payload)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("layer", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    split = None
    for row in payload["rows"]:
        if split not in (None, row["split"]):
            table.add_section()
        split = row["split"]
        if row["runs"]:
            table.add_row(row["label"], *_cells(row))
        else:
            table.add_row(row["label"], "[red]failed[/]" if row["failed"] else "skipped")
    console.print(table)
    for row in payload["rows"]:
        if row["failed"] or row["skipped"]:
            why = f"failed: {row['failed']}" if row["failed"] else f"skipped: {row['skipped']}"
            console.print(f"{row['label']}: {why}", style="red" if row["failed"] else None, markup=False)
    console.print("Errors: the largest of output and gradients, beside one GPU (beside PyTorch in bf16).")


COLUMNS = (
    "ms",
    "TFLOP/s\na rank",
    "speed-up",
    "time vs\nPyTorch",
    "time vs\ntorchao",
    "host\nms",
    "collectives\nms (alone)",
    "collec-\ntives",
    "bytes an\nelement",
    "peak\nGiB",
    "largest error",
)


def _cells(row: dict[str, Any]) -> list[str]:
    """The cells of a measured row, one for each of `COLUMNS`."""
    run = row["runs"][0]
    found = run["breakdown"]
    share = None if found is None else found["shares"][COMMUNICATION]
    return [
        f"[bold]{row['ms']:.2f}[/]",
        f"{row['tflops_per_rank']:.3g}",
        _cell(row["speedup"], ".2f"),
        _cell(row["time_vs_pytorch"], ".3f"),
        _cell(row["time_vs_torchao"], ".3f"),
        _cell(run["host_ms"], ".1f"),
        "-" if share is None else f"{share['busy_ms']:.2f} ({share['alone_ms']:.2f})",
        _cell(None if run["calls"] is None else sum(run["calls"].values()), "d"),
        _cell(row["bytes_sent_per_element"], ".1f"),
        f"{run['peak_gib']:.1f}",
        f"{row['largest_error'][WHOLE]:.1e} ({row['largest_error'][PLAIN]:.1e})",
    ]


def _cell(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def _title(payload: dict[str, Any]) -> str:
    job, config = payload["job"], payload["config"]
    return (
        f"One Llama-{job['shape']} layer over {payload['ranks']} ranks, forward and backward: hidden "
        f"{config['hidden']}, ffn {config['ffn']}, {job['batch']} x {config['seq']} tokens"
    )


COLORS = {
    Engine.torch: "#bab0ac",
    Engine.compiled: "#79706e",
    Engine.torchao: "#f28e2b",
    Engine.bf16: "#4e79a7",
    Engine.fp8: "#59a14f",
}


def draw(payload: dict[str, Any], path: Path) -> None:
    """Draws one bar for each mode that ran, in groups; exposed communication is hatched where profiled."""
    rows = [row for row in payload["rows"] if row["runs"]]
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(rows)), layout="constrained")
    axis = figure.subplots()
    position, ticks = 0.0, []
    for before, row in zip([None, *rows], rows, strict=False):
        position += 1.0 if before is None or before["split"] == row["split"] else 1.6
        ticks.append(position)
        axis.barh(position, row["ms"], color=COLORS[Engine(row["engine"])], height=0.8)
        found = row["runs"][0]["breakdown"]
        if found is not None:
            alone = found["shares"][COMMUNICATION]["alone_ms"]
            axis.barh(position, -alone, left=row["ms"], height=0.8, fill=False, hatch="////", linewidth=0)
        note = f" {row['ms']:.2f} ms, {row['tflops_per_rank']:.0f} TFLOP/s"
        if row["speedup"] is not None and row["split"] != Split.one:
            note += f", {row['speedup']:.2f} x one GPU"
        axis.text(row["ms"], position, note, va="center", fontsize=8)
    axis.set_yticks(ticks, [row["label"] for row in rows])
    axis.set_xlim(right=1.35 * max((row["ms"] for row in rows), default=1.0))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    hatched = "; hatched: a collective runs and nothing else" if payload["job"]["breakdown"] else ""
    axis.set_xlabel(f"ms, forward and backward (median){hatched}")
    axis.set_title(_title(payload), loc="left", fontsize=9)
    figure.savefig(path, dpi=130)


# -- the command -----------------------------------------------------------------------------------------

USUAL_SHAPES = ["70b", "8b"]

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known(names: list[str] | None, known: Iterable[str]) -> list[str]:
    """Checks names.

    Raises:
        typer.BadParameter: for an unknown name.
    """
    names, known = list(dict.fromkeys(names or ())), list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return names


def modes_of(names: list[str], *, is_first: bool) -> tuple[Mode, ...]:
    """The modes of one shape: the requested ones, or the usual ones; only the first shape's are compiled."""
    return tuple(MODES[name] for name in names or (USUAL_MODES if is_first else EAGER_MODES))


@app.command(
    help="One Llama layer shared by ranks: flatfsdp's tensor parallelism beside PyTorch's and torchao's.",
    epilog="""Examples:

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --breakdown

    torchrun --nproc-per-node 4 benchmarks/tensor_parallel.py --shape 8b --batch 2 --rounds 2

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --modes flat-fp8-sp --modes torchao-sp --json

    python benchmarks/tensor_parallel.py --shape tiny --device cpu --ranks 2""",
)
def main(
    shapes: Annotated[
        list[str], typer.Option("--shape", help="Repeat for several: " + ", ".join(LAYERS))
    ] = USUAL_SHAPES,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence.", show_default="the shape's")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    modes: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeat for several: " + ", ".join(MODES),
            show_default="all that are not compiled; of the first shape, some compiled ones, too",
        ),
    ] = None,
    steps: options.Steps = 10,
    warmup: options.Warmup = 3,
    rounds: options.Rounds = 1,
    breakdown: options.Breakdown = False,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 2,
    out: options.Out = RESULTS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, a list with an item a shape, not tables.")
    ] = False,
) -> None:
    shapes, modes = _known(shapes, LAYERS), _known(modes, MODES)
    launch = launch_of(ranks, device)
    if launch.world < 2:
        raise typer.BadParameter("one rank has nobody to share a layer with; start at least 2")
    jobs = [
        Job(
            shape=shape,
            config=replace(LAYERS[shape], seq=seq or LAYERS[shape].seq),
            batch=batch,
            modes=modes_of(modes, is_first=shape == shapes[0]),
            steps=steps,
            warmup=warmup,
            rounds=rounds,
            breakdown=breakdown,
        )
        for shape in shapes
    ]
    found = run_on_ranks(measure_all, jobs, launch)
    if is_main():
        kind = "cuda" if launch.use_cuda() else "cpu"
        payloads = [payload_of(job, rows, launch.world, kind) for job, rows in zip(jobs, found, strict=True)]
        for payload in payloads:
            name = f"tensor-parallel-{payload['job']['shape']}-{payload['ranks']}"
            if as_json:
                write(payload, out, name, partial(draw, payload))
            else:
                publish(
                    *(payload, out, name),
                    draw=partial(draw, payload),
                    show=partial(show, payload),
                    as_json=False,
                )
        if as_json:
            typer.echo(json.dumps(payloads, indent=2))
    # Only on the writing rank: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for rows in found for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
