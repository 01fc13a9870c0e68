"""Time of a training step with FlatFSDP, PyTorch's FSDP2 and fairscale's FSDP.

One run measures all engines, one after the other, on the same ranks with the same data, initial values and
optimizer: forward and backward of M microbatches, one sequence each, then AdamW.  Every engine keeps FP32
masters and computes in bf16; gradients are reduced in FP32, in the last microbatch's backward.  FlatFSDP and
FSDP2 also accumulate in FP32; fairscale 0.4.13 accumulates in bf16, which moves fewer bytes.

`--fp8` uses FlatFSDP's own layers, whose weights are in FP8 in the flat buffer, and FSDP2 with torchao's
float8: one scale per tensor, FP8 all-gather, compiled layers.  Embedding and head are in bf16 on both sides.

With `--replay` FlatFSDP's engines, except the one with the flag off, also run microbatches as CUDA graphs
(`flatfsdp.replayed`).

Everything is freed between engines.  The first one is measured again at the end: if its two figures differ,
the machine drifted by that much, and smaller differences between engines mean nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.engines import FP8, OF_FLATFSDP, PLAIN, TRANSFORMER_ENGINE, Engine, TrainedLlama, Variant
from lib.llama import SHAPES, flops_per_token
from lib.measuring import Job, VariantRuns, measure_all
from lib.step_report import Row, console_of, draw, show, summary, time_against, title_of

from flatfsdp.comm.launch import Device, is_main, run_on_ranks

FLOAT8, TE = Variant.first_of(Engine.fsdp2_float8), Variant.first_of(Engine.fsdp2_te)


def row_of(row: VariantRuns[Variant], rows: list[VariantRuns[Variant]], job: Job[Variant], shape: str) -> Row:
    """One variant with figures derived from its runs.

    `time_vs_fsdp2` is relative to FSDP2 in the same mode, eager or compiled, `time_vs_fsdp2_float8` to FSDP2
    with torchao, `time_vs_fsdp2_te` to FSDP2 with Transformer Engine's layers; below 1 is faster.
    """
    fsdp2 = Variant(Engine.fsdp2, row.variant.compiled)
    return {
        **summary(row, job, SHAPES[shape]),
        "identity": _identity(row),
        "time_vs_fsdp2": time_against(row.ms, [fsdp2], rows),
        "time_vs_fsdp2_float8": time_against(row.ms, [FLOAT8], rows),
        "time_vs_fsdp2_te": time_against(row.ms, [TE], rows),
    }


def _identity(row: VariantRuns[Variant]) -> dict[str, float] | None:
    """The cost of identities in collectives: median times of steps with and without them, in turns."""
    checked = [ms for run in row.runs for ms in run.checked_ms or ()]
    unchecked = [ms for run in row.runs for ms in run.unchecked_ms or ()]
    if not checked:
        return None
    on, off = statistics.median(checked), statistics.median(unchecked)
    return {"on_ms": on, "off_ms": off, "on_vs_off": on / off}


def same_losses(rows: list[VariantRuns[Variant]]) -> dict[str, bool]:
    """Whether FlatFSDP's losses are equal in every step, for each mode.

    The modes are: flag off and on, wrapped and in place, eager and replayed.
    """
    losses = {row.variant: row.runs[0].losses for row in rows if row.runs}
    found = {}
    for compiled, mode in ((False, "eager"), (True, "compile")):
        variants = [Variant(e, compiled, replayed) for e in OF_FLATFSDP for replayed in (False, True)]
        ours = [losses[variant] for variant in variants if variant in losses]
        if len(ours) > 1:
            found[mode] = all(each == ours[0] for each in ours)
    return found


def title_of_payload(payload: dict[str, Any]) -> str:
    return title_of(f"Llama {payload['job']['shape']}", payload)


def redraw(payload: dict[str, Any], path: Path) -> None:
    """Draws the picture of a JSON file's contents."""
    modes = product(ENGINE_COLORS.items(), (False, True), (False, True))
    colors = {Variant(engine, *mode).name: color for (engine, color), *mode in modes}
    draw(payload["rows"], title_of_payload(payload), colors, path)


def show_all(payload: dict[str, Any], ratios: dict[str, str]) -> None:
    console = console_of()
    show(payload["rows"], title_of_payload(payload), ratios, console)
    for row in payload["rows"]:
        if (cost := row["identity"]) is not None:
            console.print(
                f"{row['label']}: {cost['on_ms']:.2f} ms/step where collectives carry what they are for, "
                f"{cost['off_ms']:.2f} where they do not: {cost['on_vs_off']:.4f}",
                highlight=False,
            )
    for mode, same in payload["same_losses"].items():
        answer = "the same in every step" if same else "not the same (attention's backward need not repeat)"
        console.print(f"FlatFSDP, {mode}: losses of all its variants are {answer}.")


def ratios_of(job: Job[Variant]) -> dict[str, str]:
    """The references of relative times in this run: name and key in a row."""
    engines = {variant.engine for variant in job.variants}
    found = {"FSDP2": "time_vs_fsdp2"} if Engine.fsdp2 in engines else {}
    found |= {"torchao": "time_vs_fsdp2_float8"} if Engine.fsdp2_float8 in engines else {}
    return found | ({"FSDP2, TE": "time_vs_fsdp2_te"} if Engine.fsdp2_te in engines else {})


ENGINE_COLORS = {
    Engine.flat_off: "#76b7b2",
    Engine.flat_on: "#4e79a7",
    Engine.fsdp2: "#f28e2b",
    Engine.fairscale: "#bab0ac",
    Engine.flat_fp8_delayed: "#59a14f",
    Engine.flat_fp8_current: "#8cd17d",
    Engine.flat_bf16_fused: "#4e79a7",
    Engine.fsdp2_float8: "#e15759",
    Engine.flat_te: "#59a14f",
    Engine.fsdp2_te: "#edc948",
}

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_shape(name: str) -> str:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return name


@app.command(
    help="Training step of FlatFSDP beside FSDP2, torchao and fairscale: same ranks, data and model.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 70b-l2 --microbatches 16 --keep

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --compile

    torchrun --nproc-per-node 4 benchmarks/step.py --fp8 --shape 8b --breakdown

    torchrun --nproc-per-node 4 benchmarks/step.py --te --shape 8b

    torchrun --nproc-per-node 4 benchmarks/step.py --fp8 --shape 70b-l2-s1k --microbatches 16 --replay

    torchrun --nproc-per-node 4 benchmarks/step.py --engines flat-on --engines fsdp2 --rounds 3 --json

    torchrun --nproc-per-node 4 benchmarks/step.py --shape 8b --engines flat-on --steps 20 --identity

    python benchmarks/step.py --shape tiny --device cpu --ranks 2""",
)
def main(
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES), callback=_known_shape)] = "70b-l2",
    accumulation: options.Accumulation = 1,
    reshard: options.Reshard = True,
    steps: options.Steps = 10,
    warmup: options.Warmup = 4,
    rounds: options.Rounds = 1,
    engines: Annotated[
        list[Engine] | None, typer.Option(help="Repeat for several.", show_default="all of the plain Llama")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="FlatFSDP's own layers and torchao's float8.")] = False,
    transformer_engine: Annotated[
        bool, typer.Option("--te", help="Transformer Engine's layers, under FlatFSDP and under FSDP2.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="The plain Llama also with every layer compiled.")
    ] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="FlatFSDP's also with microbatches as CUDA graphs.")
    ] = False,
    own_adamw: Annotated[
        bool,
        typer.Option("--own-adamw/--torch-adamw", help="Which AdamW steps FlatFSDP's own layers."),
    ] = True,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 1,
    out: options.Out = RESULTS,
    breakdown: options.Breakdown = False,
    traces: options.Traces = None,
    identity: Annotated[
        bool,
        typer.Option("--identity", help="Time FlatFSDP's steps with unchecked collectives, too, by turns."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    wanted = engines or (TRANSFORMER_ENGINE if transformer_engine else FP8 if fp8 else PLAIN)
    chosen = [Variant.first_of(engine) for engine in dict.fromkeys(wanted)]
    if compiled:
        chosen += [Variant(v.engine, compiled=True) for v in chosen if v.can_be_compiled]
    if replay:
        chosen += [replace(variant, replayed=True) for variant in chosen if variant.can_be_replayed]
    zero = "reshard" if reshard else "keep"
    suffix = "" if all(variant.engine in PLAIN for variant in chosen) else "-fp8"
    suffix = "-te" if all(variant.engine in TRANSFORMER_ENGINE for variant in chosen) else suffix
    job = Job(
        f"step-{shape}-m{accumulation}-{zero}{suffix}",
        TrainedLlama(shape, own_adamw),
        *(accumulation, reshard, steps, warmup, rounds),
        variants=tuple(chosen),
        breakdown=breakdown,
        traces=traces,
        identity=identity,
    )
    launch = launch_of(ranks, device)
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload: dict[str, Any] = {
            "environment": environment("cuda" if launch.use_cuda() else "cpu"),
            "ranks": launch.world,
            "job": job.settings(),
            "config": asdict(SHAPES[shape]),
            "flops_per_token": flops_per_token(SHAPES[shape]),
            "rows": [row_of(row, rows, job, shape) for row in rows],
            "same_losses": same_losses(rows),
        }
        publish(
            payload,
            out,
            job.name,
            draw=partial(redraw, payload),
            show=partial(show_all, payload, ratios_of(job)),
            as_json=as_json,
        )
    # Only on the writing rank: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
