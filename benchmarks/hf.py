"""Speed of Hugging Face models, as users bring them, with FlatFSDP and with its peers.

One run trains `LlamaForCausalLM`, built from its configuration, with every engine, one after the other: the
same ranks, data, initial values and optimizer; forward and backward of M microbatches, one sequence each,
then AdamW.  The peers are PyTorch's FSDP2 in bf16 and with torchao's float8 (one scale per tensor, FP8
all-gather), both also with Liger Kernel. FlatFSDP shards the model in place: unchanged, with its linear maps
converted to FP8, also with FP8 weights in the flat buffers, and fused.  With `--replay` the fused ones also
run as CUDA graphs (`flatfsdp.replayed`).  Engines that are not installed are skipped.

Everything is freed between engines.  The first one is measured again at the end: if its two figures differ,
the machine drifted by that much, and smaller differences between engines mean nothing.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from lib import options
from lib.common import RESULTS, environment, launch_of, publish
from lib.hf_engines import REPLAYED, Engine, TrainedHFLlama, Variant
from lib.hf_models import SIZES
from lib.llama import flops_per_token
from lib.measuring import Job, VariantRuns, measure_all
from lib.step_report import Row, console_of, draw, show, summary, time_against, title_of

from flatfsdp.comm.launch import Device, is_main, run_on_ranks

RATIOS = {"FSDP2": "time_vs_fsdp2", "torchao": "time_vs_fsdp2_float8"}
"""The reference of relative times, and the key of a row that holds them."""


class Mode(str, Enum):
    """How layers run."""

    both = "both"
    eager = "eager"
    compiled = "compiled"


class Comparison(NamedTuple):
    """One of our variants against the fastest of its peers."""

    ours: Variant
    peers: tuple[Variant, ...]


def modes_of(*engines: Engine) -> tuple[Variant, ...]:
    return tuple(variant for engine in engines for variant in Variant.all_of(engine))


FSDP2, TORCHAO = modes_of(Engine.fsdp2), modes_of(Engine.fsdp2_float8, Engine.liger_float8)
(FUSED,), (FUSED_FP8,) = modes_of(Engine.flat_fused), modes_of(Engine.flat_fused_fp8)
REPLAYED_BF16, REPLAYED_FP8 = modes_of(*REPLAYED)

COMPARISONS = (
    Comparison(FUSED_FP8, TORCHAO),
    Comparison(FUSED, FSDP2),
    Comparison(FUSED_FP8, (Variant(Engine.flat_converted),)),
    Comparison(FUSED_FP8, (Variant(Engine.flat_converted_stored),)),
    Comparison(FUSED, (Variant(Engine.flat, compiled=True),)),
    Comparison(FUSED, modes_of(Engine.liger)),
    Comparison(REPLAYED_FP8, TORCHAO),
    Comparison(REPLAYED_FP8, (Variant(Engine.flat, compiled=True),)),
    Comparison(REPLAYED_FP8, (FUSED_FP8,)),
    Comparison(REPLAYED_BF16, FSDP2),
    Comparison(REPLAYED_BF16, (FUSED,)),
)
"""The claims about `fuse` and `replayed`, in numbers."""


def row_of(row: VariantRuns[Variant], rows: list[VariantRuns[Variant]], job: Job[Variant], size: str) -> Row:
    """One variant with figures derived from its runs.

    `time_vs_fsdp2` is relative to FSDP2 in its fastest mode, `time_vs_fsdp2_float8` to FSDP2 with torchao,
    with or without Liger; below 1 is faster.
    """
    return {
        **summary(row, job, SIZES[size]),
        "time_vs_fsdp2": time_against(row.ms, FSDP2, rows),
        "time_vs_fsdp2_float8": time_against(row.ms, TORCHAO, rows),
    }


def compare(rows: list[Row]) -> list[dict[str, Any]]:
    """Each of `COMPARISONS` whose sides were both measured, and replayed if requested.

    `times_as_fast` is above 1 if ours is faster, `share_of_memory` below 1 if its peak is lower; it is None
    on CPUs, where memory is not measured.
    """
    measured = {row["name"]: row for row in rows if row["runs"] and not row["not_replayed"]}
    found = []
    for ours, peers in COMPARISONS:
        theirs = [measured[peer.name] for peer in peers if peer.name in measured]
        mine = measured.get(ours.name)
        if mine is None or not theirs:
            continue
        fastest = min(theirs, key=lambda row: row["ms"])
        peak = fastest["peak_gib"]
        found.append(
            {
                "ours": ours.name,
                "peer": fastest["name"],
                "times_as_fast": fastest["ms"] / mine["ms"],
                "share_of_memory": mine["peak_gib"] / peak if peak else None,
            }
        )
    return found


def show_all(payload: dict[str, Any], title: str) -> None:
    console = console_of()
    show(payload["rows"], title, RATIOS, console)
    labels = {row["name"]: row["label"] for row in payload["rows"]}
    for found in payload["comparisons"]:
        share = found["share_of_memory"]
        memory = "" if share is None else f", with {share:.3f} of its peak memory"
        console.print(
            f"{labels[found['ours']]}: {found['times_as_fast']:.3f} times as fast as "
            f"{labels[found['peer']]}{memory}",
            highlight=False,
        )


COLORS = {
    Engine.fsdp2: "#f28e2b",
    Engine.fsdp2_float8: "#e15759",
    Engine.liger: "#ffbe7d",
    Engine.liger_float8: "#ff9d9a",
    Engine.flat: "#a0cbe8",
    Engine.flat_converted: "#8cd17d",
    Engine.flat_converted_stored: "#b6992d",
    Engine.flat_fused: "#4e79a7",
    Engine.flat_fused_fp8: "#59a14f",
    Engine.flat_fused_replay: "#1b3a5c",
    Engine.flat_fused_fp8_replay: "#2d5a27",
}


def payload_of(
    rows: list[VariantRuns[Variant]], job: Job[Variant], size: str, ranks: int, device: str
) -> dict[str, Any]:
    """The contents of the JSON file."""
    summaries = [row_of(row, rows, job, size) for row in rows]
    return {
        "environment": environment(device),
        "ranks": ranks,
        "job": job.settings(),
        "flops_per_token": flops_per_token(SIZES[size]),
        "rows": summaries,
        "comparisons": compare(summaries),
    }


def redraw(payload: dict[str, Any], path: Path) -> None:
    """Draws the picture of a JSON file's contents."""
    colors = {variant.name: COLORS[variant.engine] for variant in modes_of(*Engine)}
    draw(payload["rows"], title_of_payload(payload), colors, path)


def title_of_payload(payload: dict[str, Any]) -> str:
    _, size, *_ = payload["job"]["name"].split("-")
    return title_of(f"LlamaForCausalLM, {size}", payload)


def publish_all(payload: dict[str, Any], job: Job[Variant], out: Path, as_json: bool) -> None:
    """Writes the JSON file and the picture, and prints a table or the JSON."""
    publish(
        payload,
        out,
        job.name,
        draw=partial(redraw, payload),
        show=partial(show_all, payload, title_of_payload(payload)),
        as_json=as_json,
    )


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _known_size(name: str) -> str:
    if name not in SIZES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SIZES)}")
    return name


@app.command(
    help="Training step of a Hugging Face Llama with FlatFSDP beside FSDP2, torchao and Liger Kernel.",
    epilog="""Examples:

    torchrun --nproc-per-node 4 benchmarks/hf.py --size 8b8 --breakdown

    torchrun --nproc-per-node 4 benchmarks/hf.py --size 1b --mode eager --rounds 2

    torchrun --nproc-per-node 4 benchmarks/hf.py --size long --engines fsdp2 --engines flat-fused --json

    torchrun --nproc-per-node 4 benchmarks/hf.py --size 1b --replay

    torchrun --nproc-per-node 1 benchmarks/hf.py --size 8b8 --keep --engines liger --engines flat-fused

    python benchmarks/hf.py --size tiny --device cpu --ranks 2 --mode eager""",
)
def main(
    size: Annotated[str, typer.Option(help=", ".join(SIZES), callback=_known_size)] = "8b8",
    accumulation: options.Accumulation = 8,
    reshard: options.Reshard = True,
    steps: options.Steps = 10,
    warmup: options.Warmup = 5,
    rounds: options.Rounds = 1,
    engines: Annotated[
        list[Engine] | None,
        typer.Option(help="Repeat for several.", show_default="all but the replayed ones"),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="The fused models also with microbatches as CUDA graphs.")
    ] = False,
    mode: Annotated[Mode, typer.Option(help="Layers eager, each one compiled, or both.")] = Mode.both,
    device: options.OnDevice = Device.auto,
    ranks: options.RanksToStart = 1,
    out: options.Out = RESULTS,
    breakdown: options.Breakdown = False,
    traces: options.Traces = None,
    as_json: options.Json = False,
) -> None:
    if find_spec("transformers") is None:
        raise typer.BadParameter("transformers is not installed")
    wanted = engines or [engine for engine in Engine if engine not in REPLAYED]
    if replay:
        wanted = [*wanted, *REPLAYED]
    chosen = [
        variant
        for engine in dict.fromkeys(wanted)
        for variant in Variant.all_of(engine)
        if mode is Mode.both or variant.compiled == (mode is Mode.compiled)
    ]
    if not chosen:
        raise typer.BadParameter(f"none of these engines has the mode {mode.value}", param_hint="--mode")
    job = Job(
        f"hf-{size}-m{accumulation}-{'reshard' if reshard else 'keep'}",
        TrainedHFLlama(SIZES[size]),
        *(accumulation, reshard, steps, warmup, rounds),
        variants=tuple(chosen),
        breakdown=breakdown,
        traces=traces,
    )
    launch = launch_of(ranks, device)
    rows = run_on_ranks(measure_all, job, launch)
    if is_main():
        payload = payload_of(rows, job, size, launch.world, "cuda" if launch.use_cuda() else "cpu")
        publish_all(payload, job, out, as_json)
    # Only on the writing rank: torchrun kills the others as soon as one fails.
    if is_main() and any(row.failed for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
