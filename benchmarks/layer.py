"""Time of forward and backward of one transformer layer, beside PyTorch, torchao and a lower bound.

One run measures all of them, in turns, on the same shape: Transformer Engine's quickstart layer (LayerNorm,
biases, gelu, causal attention; hidden 4096, ffn 16384, 32 heads, sequence 2048, batch 4).  All have bf16
parameters, the same normal inputs and output gradients, and cuDNN's attention if available.  Before and after
the timed runs, outputs and gradients are checked to be finite: NaNs and zeros run faster.

In bf16 two microbatches of a step are compared: the first one, whose gradients overwrite (PyTorch: new bf16
`.grad`;
fused: FP32 main_grad), and a later one ("added"), whose gradients are added.  In FP8 our modes with fused
    gradients are
such a later microbatch, which moves more bytes.

The lower bound ("floor") is the layer's own FP8 GEMMs (weight gradients in place), attention, and a copy of
the bytes that have to move besides, back to back: no Python, no launch gaps.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lib import options
from lib.common import RESULTS, environment, publish
from lib.device import host_ms, timed
from lib.floor import floors
from lib.layers import Contestant, LayerShape, Mode, build
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flatfsdp.comm.launch import Device

BEST_OF_TORCHAO = (Mode.ao_tensorwise, Mode.ao_rowwise)
MAIN = Mode.delayed_fused
WARMUP = 6


def measure(
    modes: list[Mode], shape: LayerShape, rounds: int, steps: int, device: torch.device
) -> list[dict[str, Any]]:
    """Runs all modes in turns, in another random order in each round, as a chip gets hot, and slower.

    The median of the steps of each run is kept.
    """
    contestants: dict[str, Contestant] = {}
    rows: dict[str, dict[str, Any]] = {}
    for mode in track(modes, "build", console=Console(stderr=True)):
        row: dict[str, Any] = {
            "name": mode.value,
            "label": mode.label,
            "runs": [],
            "skipped": mode.unavailable(),
        }
        rows[mode.value] = row
        if row["skipped"]:
            continue
        try:
            contestants[mode.value] = _warmed_up(mode, shape, device)
        except Exception as error:  # the others' figures are worth having
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    work: dict[str, Callable[[], object]] = {name: each.step for name, each in contestants.items()}
    if device.type == "cuda":
        for name, part in floors(shape, device).items():
            rows[name] = {"name": name, "label": f"floor: {name}", "runs": []}
            work[name] = part
    order, shuffle = list(work), random.Random(0).shuffle
    for _ in track(range(rounds), "measure", console=Console(stderr=True)):
        shuffle(order)
        for name in order:
            rows[name]["runs"].append(statistics.median(timed(work[name], steps, device, warmup=WARMUP)))
    for name, contestant in contestants.items():
        contestant.check()
        rows[name]["host_ms"] = host_ms(contestant.step) if device.type == "cuda" else math.nan
    for row in rows.values():
        row["ms"] = statistics.median(row["runs"]) if row["runs"] else None
    return list(rows.values())


def _warmed_up(mode: Mode, shape: LayerShape, device: torch.device) -> Contestant:
    contestant = build(mode, shape, device)
    for _ in range(WARMUP):
        contestant.step()
    contestant.check()
    return contestant


def ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The claims: our best mode against torchao's best and against the floor; bf16 against eager."""
    ms = {row["name"]: row["ms"] for row in rows}

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    torchao = [ms[mode.value] for mode in BEST_OF_TORCHAO if ms.get(mode.value) is not None]
    ours = ms.get(MAIN.value)
    return {
        "time_vs_best_torchao": ratio(ours, min(torchao, default=None)),
        "floor_vs_time": ratio(ms.get("floor"), ours),
        "replayed_vs_floor": ratio(ms.get(Mode.replayed.value), ms.get("floor")),
        "bf16_fused_vs_eager": ratio(ms.get(Mode.bf16_fused.value), ms.get(Mode.eager.value)),
        "bf16_fused_added_vs_eager_added": ratio(
            ms.get(Mode.bf16_fused_added.value), ms.get(Mode.eager_added.value)
        ),
        "time_vs_transformer_engine": ratio(ours, ms.get(Mode.te.value)),
    }


def show(payload: dict[str, Any], shape: LayerShape) -> None:
    console = Console()
    console.width = max(console.width, 110)
    table = Table(title=f"\n{_title(shape)}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    table.add_column("mode", no_wrap=True)
    for column in ("ms", "TFLOP/s", "host ms", "least and most of a run"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in payload["rows"]:
        if row["ms"] is None:
            table.add_row(row["label"], row.get("failed") or f"skipped: {row['skipped']}")
            continue
        is_part = row["name"] in ("gemms", "attention", "bytes")
        table.add_row(
            row["label"],
            f"{row['ms']:.2f}",
            "" if is_part else f"{shape.flops / row['ms'] / 1e9:.0f}",
            f"{row['host_ms']:.2f}" if "host_ms" in row else "",
            " to ".join(f"{end(row['runs']):.2f}" for end in (min, max)),
        )
    console.print(table)
    for name, value in payload["ratios"].items():
        if value is not None:
            console.print(f"{name}: {value:.3f}", highlight=False)


def _title(shape: LayerShape) -> str:
    return (
        f"Forward and backward of one layer: hidden {shape.hidden}, ffn {shape.ffn}, {shape.heads} heads, "
        f"sequence {shape.seq}, batch {shape.batch}, dropout {shape.dropout}"
    )


def draw(payload: dict[str, Any], shape: LayerShape, path: Path) -> None:
    """Draws one bar for each mode that ran, and a line at the floor."""
    parts = ("gemms", "attention", "bytes", "floor")
    rows = [row for row in payload["rows"] if row["ms"] is not None and row["name"] not in parts]
    floor = next((row["ms"] for row in payload["rows"] if row["name"] == "floor"), None)
    figure = Figure(figsize=(9, 1.4 + 0.4 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        color = "#4e79a7" if row["name"].startswith("flat") else "#bab0ac"
        axis.barh(row["label"], row["ms"], color=color, height=0.7)
        axis.text(row["ms"], row["label"], f" {row['ms']:.2f} ms", va="center", fontsize=9)
    if floor is not None:
        axis.axvline(floor, color="#e15759", linewidth=1)
        axis.text(floor, -0.7, f"floor {floor:.2f}", color="#e15759", ha="center", fontsize=8)
    axis.set_xlim(right=1.2 * max((row["ms"] for row in rows), default=1.0))
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("ms, forward and backward (median)")
    figure.suptitle(_title(shape), x=0.01, ha="left", fontsize=9)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="One transformer layer, forward and backward: flatfsdp beside PyTorch, torchao and the floor.",
    epilog="""Examples:

    python benchmarks/layer.py

    python benchmarks/layer.py --dropout 0.1 --rounds 3

    python benchmarks/layer.py --modes flat-bf16 --modes eager --json

    python benchmarks/layer.py --device cpu --hidden 64 --ffn 256 --heads 4 --seq 32 --batch 2""",
)
def main(
    modes: Annotated[list[Mode], typer.Option(help="Repeat for several.")] = [  # noqa: B006
        mode for mode in Mode if mode is not Mode.te
    ],
    hidden: Annotated[int, typer.Option(min=16)] = 4096,
    ffn: Annotated[int, typer.Option(min=16)] = 16384,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    seq: Annotated[int, typer.Option(min=1)] = 2048,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.99)] = 0.0,
    steps: options.Steps = 20,
    rounds: options.Rounds = 12,
    device: options.OneDevice = Device.cuda,
    out: options.Out = RESULTS,
    as_json: options.Json = False,
) -> None:
    where = options.one_device(device)
    shape = LayerShape(hidden, ffn, heads, seq, batch, dropout)
    rows = measure(list(dict.fromkeys(modes)), shape, rounds, steps, where)
    payload = {
        "environment": environment(where.type),
        "shape": asdict(shape),
        "flops": shape.flops,
        "ratios": ratios(rows),
        "rows": rows,
    }
    name = "layer" if dropout == 0 else f"layer-dropout-{dropout:g}"
    publish(
        payload,
        out,
        name,
        draw=partial(draw, payload, shape),
        show=partial(show, payload, shape),
        as_json=as_json,
    )
    if any(row.get("failed") for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
