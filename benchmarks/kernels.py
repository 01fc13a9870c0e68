"""How fast is each kernel beside a plain copy, and each weight gradient beside a GEMM and an addition?

Memory-bound kernels run at sizes of real layers (8192 tokens).  The bytes of each are those that it has to
read and write by the formula in its docstring; divided by its time they give a bandwidth, and that is compared
with the bandwidth of a copy of a large bf16 matrix (read + write) in the same run.  Scales of delayed scaling
have few bytes: there the time counts.

Weight gradients are added to an FP32 buffer, by the GEMM itself (`flatfsdp.kernels.wgrad`) and by PyTorch's
GEMM into a temporary and an addition; bf16 also by `torch.addmm` in place.

A time is the median over the rounds.  In each round every kernel runs once, in random order, a batch of calls
in a row between two CUDA events.  Calls of a batch work on different data by turns, so that they find nothing
in the L2 cache, and the device sleeps until the host is ahead.  Data are normal random numbers, and results
are checked to be finite: NaNs and zeros run faster.

1 TB is 10^12 bytes.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import torch
import typer
from _common import RESULTS, environment
from _kernels import FULL, SEPARATE, TINY, Bench, Call, Case, Gemm
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from flatfsdp.cli.ranks import Device

WGRAD = "wgrad"
"""What weight gradients are called where kernels are chosen."""

BATCH_SECONDS = 4e-3
MOST_CALLS = 50
SLEEP_CYCLES_PER_SECOND = 2e9
"""Of the GPU's clock; at a lower one it sleeps longer."""


class Timed:
    """One thing to time: calls that run by turns, and the microseconds of each batch.

    Attributes:
        us: of one call, in each batch.
    """

    def __init__(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        self.name, self.us = name, list[float]()
        self._calls, self._device = calls, device
        # Results stay until their turn comes again, so that each is written to other memory than the last.
        self._results: list[object] = [None] * len(calls)
        self._turn = 0
        self._batch, self._host_seconds = len(calls), 0.0

    def _run(self) -> None:
        self._results[self._turn] = self._calls[self._turn]()
        self._turn = (self._turn + 1) % len(self._calls)

    def warm_up(self) -> None:
        """Compiles, and finds how many calls make a batch and how long the host takes for one."""
        for _ in self._calls:
            self._run()
        _wait(self._device)
        start = time.perf_counter()
        for _ in self._calls:
            self._run()
        self._host_seconds = (time.perf_counter() - start) / len(self._calls)
        _wait(self._device)
        seconds = (time.perf_counter() - start) / len(self._calls)
        self._batch = min(MOST_CALLS, max(len(self._calls), int(BATCH_SECONDS / seconds)))

    def measure(self) -> None:
        self.us.append(1e6 * self._seconds() / self._batch)

    def _seconds(self) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            for _ in range(self._batch):
                self._run()
            return time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(2 * self._host_seconds * self._batch * SLEEP_CYCLES_PER_SECOND))
        events[0].record()
        for _ in range(self._batch):
            self._run()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    def check(self) -> None:
        """
        Raises:
            FloatingPointError: if a result is not finite.
        """
        for result in self._results:
            for tensor in _tensors(result):
                # FP8 has no isfinite.
                values = tensor.bfloat16() if tensor.dtype.itemsize == 1 else tensor
                if not bool(values.isfinite().all()):
                    raise FloatingPointError(
                        f"{self.name}: a result is not finite; NaNs run faster, so its time means nothing"
                    )


def _tensors(result: object) -> Iterable[Tensor]:
    found = result if isinstance(result, tuple) else (result,)
    return (tensor for tensor in found if isinstance(tensor, Tensor))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(timed: Sequence[Timed], rounds: int, what: str) -> None:
    """All of them by turns, in another random order in each round."""
    order, shuffle = list(timed), random.Random(0).shuffle
    with _progress() as bar:
        task = bar.add_task(f"{what}: compile", total=len(order))
        for one in order:
            one.warm_up()
            bar.advance(task)
        task = bar.add_task(f"{what}: measure", total=rounds * len(order))
        for _ in range(rounds):
            shuffle(order)
            for one in order:
                one.measure()
                bar.advance(task)
    for one in order:
        one.check()


def _progress() -> Progress:
    """On stderr, so that stdout stays free for JSON."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn("{task.description:<26}"), *columns, console=Console(stderr=True))


# -- what is written and shown ---------------------------------------------------------------------------


def measured_kernels(bench: Bench, only: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """One row for each case; the first is the copy, and `share` is a bandwidth divided by the copy's.

    Raises:
        typer.BadParameter: if `only` has a name that is no kernel's, nor wgrad.
    """
    cases = list(bench.cases())
    known = {case.kernel for case in cases} | {WGRAD}
    for name in set(only) - known:
        raise typer.BadParameter(
            f"--only {name}: there is no such kernel; known are {', '.join(sorted(known))}"
        )
    if only:
        cases = [case for case in cases if case.kernel in only]
        if not cases:
            return []
        cases.insert(0, next(bench.cases()))
    timed = [Timed(f"{case.kernel} {case.variant}", case.calls(), bench.device) for case in cases]
    measure(timed, rounds, "kernels")
    rows: list[dict[str, Any]] = []
    for case, times in zip(cases, timed, strict=True):
        us = statistics.median(times.us)
        tb_s = None if case.bytes is None else case.bytes / us / 1e6
        rows.append(
            {
                "kernel": case.kernel,
                "variant": case.variant,
                "size": case.size,
                "bytes": case.bytes,
                "us": us,
                "tb_s": tb_s,
                "share": None if tb_s is None else tb_s / (rows[0]["tb_s"] if rows else tb_s),
                "us_of_each_round": times.us,
            }
        )
    return rows


def measured_gemms(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """One row for each path and shape; `ratio` is a speed divided by that of a GEMM and an addition."""
    gemms = list(bench.gemms())
    timed = [Timed(f"{gemm.shape}, {gemm.dtype} {gemm.path}", [gemm.call], bench.device) for gemm in gemms]
    measure(timed, rounds, "weight gradients")
    us = [statistics.median(times.us) for times in timed]
    separate = {
        (gemm.shape, gemm.dtype): time for gemm, time in zip(gemms, us, strict=True) if gemm.path == SEPARATE
    }
    return [
        {
            "shape": gemm.shape,
            "out": gemm.out,
            "in": gemm.inner,
            "tokens": gemm.tokens,
            "dtype": gemm.dtype,
            "path": gemm.path,
            "us": time,
            "tflops": gemm.flops / time / 1e6,
            "ratio": separate[gemm.shape, gemm.dtype] / time,
            "us_of_each_round": times.us,
        }
        for gemm, times, time in zip(gemms, timed, us, strict=True)
    ]


def show(payload: dict[str, Any]) -> None:
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    if payload["kernels"]:
        console.print(_kernel_table(payload["kernels"]))
    if payload["wgrad"]:
        console.print(_gemm_table(payload["wgrad"]))


def _kernel_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("Kernels beside a copy", ("kernel", "what", "size"), ("MB", "us", "TB/s", "of the\ncopy"))
    last = ""
    for row in rows:
        figures = ["", f"{row['us']:.1f}", "", ""]
        if row["bytes"] is not None:
            figures[0] = f"{row['bytes'] / 1e6:.0f}"
            figures[2:] = f"{row['tb_s']:.2f}", f"[bold]{row['share']:.1%}[/]"
        table.add_row("" if row["kernel"] == last else row["kernel"], row["variant"], row["size"], *figures)
        last = row["kernel"]
    return table


def _gemm_table(rows: list[dict[str, Any]]) -> Table:
    title = f"Weight gradients into an FP32 buffer, {rows[0]['tokens']} tokens: TFLOP/s"
    shapes = {row["shape"]: f"{row['shape']}\n{row['out']} x {row['in']}" for row in rows}
    table = _table(title, ("dtype", "path"), tuple(shapes.values()))
    for dtype, path in dict.fromkeys((row["dtype"], row["path"]) for row in rows):
        found = [row for row in rows if (row["dtype"], row["path"]) == (dtype, path)]
        table.add_row(dtype, path, *(f"{row['tflops']:.0f}  ({row['ratio']:.3f})" for row in found))
    table.caption = "In brackets: speed relative to PyTorch's GEMM, then add_."
    table.caption_justify = "left"
    return table


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 0, 0, 2))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def draw(payload: dict[str, Any], path: Path) -> None:
    """Bars: each kernel's share of the copy's bandwidth, each weight gradient's TFLOP/s."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    kernels = [row for row in payload["kernels"] if row["share"] is not None]
    heights = [max(1, len(kernels)), max(1, len(payload["wgrad"]))]
    figure, (above, below) = plt.subplots(
        2,
        figsize=(9, 1.8 + 0.24 * sum(heights)),
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    labels = [f"{row['kernel']} {row['variant']}, {row['size']}" for row in kernels]
    _bars(above, labels, [row["share"] for row in kernels], "{:.1%}", "bandwidth, relative to a copy")
    above.axvline(1.0, color="#888888", linewidth=1)
    labels = [f"{row['shape']}, {row['dtype']}: {row['path']}" for row in payload["wgrad"]]
    _bars(below, labels, [row["tflops"] for row in payload["wgrad"]], "{:.0f}", "weight gradients, TFLOP/s")
    figure.suptitle(payload["environment"]["name"], x=0.01, ha="left", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axis: Any, labels: list[str], values: list[float], form: str, title: str) -> None:
    rows = range(len(values))
    axis.barh(rows, values, color="#4e79a7", height=0.7)
    axis.set_yticks(rows, labels, fontsize=7)
    for row, value in zip(rows, values, strict=True):
        axis.text(value, row, f" {form.format(value)}", va="center", fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.1 * max(values, default=1.0))
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, loc="left", fontsize=9)


# -- the command -----------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Every kernel's share of the bandwidth of a copy, and weight gradients beside a GEMM and an addition.",
    epilog="""Examples:

    python benchmarks/kernels.py

    python benchmarks/kernels.py --quick --json

    python benchmarks/kernels.py --only cast --only norm_forward --rounds 20

    python benchmarks/kernels.py --device cpu""",
)
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds.")] = False,
    only: Annotated[
        list[str], typer.Option(help="Kernels to measure, or wgrad; repeat for several.", show_default="all")
    ] = [],  # noqa: B006
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Batches of each.", show_default="10, or 3 if --quick")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="On a CPU: tiny sizes, which only show that it runs.")
    ] = Device.cuda,
    out: Annotated[
        Path, typer.Option(help="Folder for the JSON and the picture.", show_default="benchmarks/results")
    ] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    if device is not Device.cpu and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here; --device cpu only shows that it runs")
    kind = torch.device("cpu" if device is Device.cpu else "cuda")
    rounds = rounds or (3 if quick else 10)
    torch.manual_seed(0)
    bench = Bench(TINY if kind.type == "cpu" else FULL, kind, quick)
    payload = {
        "environment": environment(kind.type),
        "rounds": rounds,
        "kernels": measured_kernels(bench, only, rounds),
        "wgrad": measured_gemms(bench, rounds) if not only or WGRAD in only else [],
    }
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(payload, indent=2)
    (out / "kernels.json").write_text(text + "\n")
    draw(payload, out / "kernels.png")
    if as_json:
        typer.echo(text)
    else:
        show(payload)
        typer.echo(f"Written: kernels.json, kernels.png in {out.name}/")


if __name__ == "__main__":
    app()
