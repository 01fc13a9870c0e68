"""How many bytes does each engine copy and send for one parameter in one optimizer step?

Measured from outside (`flatfsdp.copy_counter`), the same way for FlatFSDP and for PyTorch's FSDP2, and put
beside the number that each design promises.  Four equal units, FP32 master parameters, bf16 compute, FP32
reduction, gloo; the second step is counted, so that nothing of the first step's set-up is in it.

Local bytes are reads plus writes of copy kernels on one rank; matrix products, the optimizer and what a
collective does inside are not in it (the division by the number of ranks, for one).  Wire bytes are
(N - 1) / N of each collective's payload.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib as mpl
import torch
import torch.distributed as dist
import typer
from _common import RESULTS, Block, Blocks, run_on_ranks, write_json
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flatfsdp import Precision, auto_wrap, by_class, microbatches
from flatfsdp.copy_counter import CopyCounter, Kind

UNITS, WIDTH, HIDDEN = 4, 64, 256
"""Weights have 64 * 256 elements, so even a quarter of one is larger than the largest activation, 256."""
MIN_NUMEL = 1024
PARAMETERS = UNITS * 2 * WIDTH * HIDDEN
COMPUTE_BYTES = 2  # bf16
MASTER_BYTES = 4  # FP32; also what gradients are accumulated and reduced in


@dataclass(frozen=True)
class Case:
    """An engine and how it is asked to behave.

    Attributes:
        zero: 3 frees parameters after each forward and backward, 2 keeps them for a step.
        sync: gradients are reduced in the last microbatch or in every one.
        concat_free: FlatFSDP's `optimize_backward_concat`.
    """

    engine: Literal["FlatFSDP", "FSDP2"]
    zero: Literal[2, 3]
    sync: Literal["last", "every"] = "last"
    concat_free: bool = True


CASES = (
    Case("FlatFSDP", zero=3),
    Case("FlatFSDP", zero=2),
    Case("FlatFSDP", zero=3, concat_free=False),
    Case("FlatFSDP", zero=2, concat_free=False),
    Case("FlatFSDP", zero=3, sync="every"),
    Case("FSDP2", zero=3, sync="every"),
    Case("FSDP2", zero=2, sync="every"),
    Case("FSDP2", zero=3, sync="last"),
    Case("FSDP2", zero=2, sync="last"),
)


@dataclass(frozen=True)
class Traffic:
    """One step of one case; bytes per parameter, calls per unit.

    Attributes:
        cast: master shards to bf16.
        copy: into all-gather buffers and out of them.
        concat: gradients into one flat tensor.
        accumulate: gradients widened to FP32 and added up.
        other: division and zero-fill, of which there should be none.
        gathers, reduces: all-gather and reduce-scatter calls of a unit.
        wire_gather, wire_reduce: bytes per parameter that a rank sends.
    """

    cast: float
    copy: float
    concat: float
    accumulate: float
    other: float
    gathers: float
    reduces: float
    wire_gather: float
    wire_reduce: float

    @property
    def local(self) -> float:
        return self.cast + self.copy + self.concat + self.accumulate + self.other


HEADINGS = {
    "cast": "cast",
    "copy": "copy\nin/out",
    "concat": "concat",
    "accumulate": "accu-\nmulate",
    "other": "other",
}
"""The local parts of a `Traffic` and their columns."""


@dataclass(frozen=True)
class Row:
    """A case at one number of ranks and microbatches: what was measured and what its design promises.

    Attributes:
        ledger: FlatFSDP's own account in bytes per parameter; empty for other engines.
        missed: large operators that the counter does not know; the measurement is complete if empty.
    """

    case: Case
    ranks: int
    microbatches: int
    measured: Traffic
    promised: Traffic
    ledger: dict[str, float]
    missed: dict[str, int]

    @property
    def label(self) -> str:
        flag = (" on" if self.case.concat_free else " off") if self.case.engine == "FlatFSDP" else ""
        sync = f", {self.case.sync}" if self.microbatches > 1 else ""
        return f"{self.case.engine}{flag}, ZeRO-{self.case.zero}{sync}"

    def disagreements(self) -> list[str]:
        """What differs, one line each; empty is what we want."""
        found = [
            f"{f.name}: measured {got:g}, promised {want:g}"
            for f in fields(Traffic)
            if not _equal(got := getattr(self.measured, f.name), want := getattr(self.promised, f.name))
        ]
        found += [f"operator not accounted for: {op} (x{times})" for op, times in self.missed.items()]
        for key, want in _as_ledger(self.measured).items():
            if self.ledger and not _equal(got := self.ledger.get(key, 0.0), want):
                found.append(f"ledger {key}: {got:g}, measured {want:g}")
        return found


def _equal(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6 * max(1.0, abs(a), abs(b))


def _as_ledger(measured: Traffic) -> dict[str, float]:
    """The measurement under the ledger's names."""
    return {
        "cast": measured.cast,
        "concat": measured.concat,
        "accumulate": measured.accumulate,
        "gather": measured.wire_gather,
        "reduce": measured.wire_reduce,
    }


# -- what each design promises ---------------------------------------------------------------------------


def promised(case: Case, ranks: int, steps: int) -> Traffic:
    """The formula row of `case` for N ranks and `steps` microbatches."""
    gathers = 2 * steps if case.zero == 3 else 1
    reduces = steps if case.sync == "every" else 1
    on_wire = (ranks - 1) / ranks
    local = _flat_local(case, ranks, steps) if case.engine == "FlatFSDP" else _fsdp2_local(case, ranks, steps)
    return Traffic(
        **local,
        gathers=gathers,
        reduces=reduces,
        wire_gather=gathers * COMPUTE_BYTES * on_wire,
        wire_reduce=reduces * MASTER_BYTES * on_wire,
    )


def _flat_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FlatFSDP: one cast a step, gathered in place, gradients land in the buffer that is reduced."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    reduces = steps if case.sync == "every" else 1
    # The first gradient after a reduction is a copy, the others are adds; so are reduced shards.
    landed = reduces * (p + m) + (steps - reduces) * (p + 2 * m) + (reduces - 1) * 3 * m / ranks
    return {
        "cast": (m + p) / ranks,
        "copy": 0,
        "concat": 0 if case.concat_free else 2 * p * steps,
        "accumulate": landed,
        "other": 0,
    }


def _fsdp2_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FSDP2: cast, copy in, copy out at every gather; a rank-major concat at every reduction."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    gathers = 2 * steps if case.zero == 3 else 1
    if case.sync == "every":
        concat, accumulate = steps * (p + m), (steps - 1) * 3 * m / ranks
    elif steps == 1:
        concat, accumulate = p + m, 0.0
    else:
        concat, accumulate = 2 * m, (p + m) + (steps - 1) * (p + 2 * m)
    return {
        "cast": gathers * (m + p) / ranks,
        "copy": gathers * (2 * p / ranks + 2 * p),
        "concat": concat,
        "accumulate": accumulate,
        "other": 0,
    }


# -- what happens ----------------------------------------------------------------------------------------


def measure_all(rank: int, ranks: int, cases: list[tuple[Case, int]]) -> list[Row]:
    """On one rank: each case with its number of microbatches."""
    return [_measure(case, ranks, steps) for case, steps in cases]


def _measure(case: Case, ranks: int, steps: int) -> Row:
    torch.manual_seed(0)
    shard = _flat if case.engine == "FlatFSDP" else _fsdp2
    model = shard(Blocks(UNITS, WIDTH, HIDDEN), case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    _step(model, optimizer, case, steps)
    ledger = getattr(model, "ledger", None)
    if ledger is not None:
        ledger.reset()
    with CopyCounter(MIN_NUMEL) as counter:
        _step(model, optimizer, case, steps)
    return Row(
        case=case,
        ranks=ranks,
        microbatches=steps,
        measured=_traffic(counter),
        promised=promised(case, ranks, steps),
        ledger=dict(ledger.bytes_per_parameter()) if ledger is not None else {},
        missed=dict(counter.unclassified),
    )


def _flat(model: Blocks, case: Case) -> nn.Module:
    return auto_wrap(
        model,
        by_class(Block),
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=case.zero == 3,
        optimize_backward_concat=case.concat_free,
        grad_sync=case.sync,
    )


def _fsdp2(model: Blocks, case: Case) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=case.zero == 3)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: int) -> None:
    batches = [torch.randn(1, WIDTH) for _ in range(steps)]
    for index, batch in enumerate(microbatches(model, batches)):
        if isinstance(model, FSDPModule):
            is_last = index == steps - 1
            model.set_requires_gradient_sync(is_last or case.sync == "every")
            # ZeRO-2 keeps parameters for a step; by default FSDP2 gathers them in every microbatch.
            model.set_reshard_after_backward(is_last or case.zero == 3)
        model(batch).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _traffic(counter: CopyCounter) -> Traffic:
    def per_parameter(nbytes: float) -> float:
        return nbytes / PARAMETERS

    return Traffic(
        cast=per_parameter(counter.bytes(Kind.CAST)),
        copy=per_parameter(counter.bytes(Kind.COPY)),
        concat=per_parameter(counter.bytes(Kind.CONCAT)),
        accumulate=per_parameter(counter.bytes(Kind.WIDEN, Kind.ADD)),
        other=per_parameter(counter.bytes(Kind.SCALE, Kind.FILL)),
        gathers=counter.calls("all_gather") / UNITS,
        reduces=counter.calls("reduce_scatter") / UNITS,
        wire_gather=per_parameter(counter.wire("all_gather")),
        wire_reduce=per_parameter(counter.wire("reduce_scatter")),
    )


# -- what is shown ---------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command(
    help="Bytes that FlatFSDP and FSDP2 copy and send per parameter in one optimizer step, against formulas.",
    epilog="""Examples:

    python benchmarks/bytes.py

    python benchmarks/bytes.py --ranks 2 --microbatches 1 --microbatches 8

    python benchmarks/bytes.py --json > bytes.json""",
)
def main(
    ranks: Annotated[list[int], typer.Option(help="Numbers of gloo ranks; repeat for several.")] = [2, 4],  # noqa: B006
    accumulation: Annotated[
        list[int],
        typer.Option("--microbatches", help="Microbatches per optimizer step; repeat for several."),
    ] = [1, 4],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    rows: list[Row] = []
    for world_size in ranks:
        cases = [(case, steps) for steps in accumulation for case in _cases(steps)]
        per_rank = run_on_ranks(world_size, measure_all, cases)
        for row, *others in zip(*per_rank, strict=True):
            assert all(other == row for other in others), f"ranks disagree about {row.label}"
            rows.append(row)
    payload = {"units": UNITS, "parameters": PARAMETERS, "rows": [_as_dict(row) for row in rows]}
    written = [write_json("bytes", payload), draw(rows)]
    if as_json:
        typer.echo(written[0].read_text(), nl=False)
    else:
        show(rows)
        typer.echo("Written: " + ", ".join(path.name for path in written) + f" in {RESULTS.name}/")
    if any(row.disagreements() for row in rows):
        raise typer.Exit(1)


def _cases(steps: int) -> list[Case]:
    """The cases that differ: with one microbatch "every" and "last" are the same."""
    return list(CASES) if steps > 1 else [case for case in CASES if case.sync == "last"]


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        **asdict(row),
        "local": {"measured": row.measured.local, "promised": row.promised.local},
        "disagreements": row.disagreements(),
    }


def show(rows: list[Row]) -> None:
    """One table per number of ranks and microbatches; disagreements in red below it."""
    console = Console()
    console.width = max(console.width, 100)  # a table that wraps says nothing
    for ranks, steps in dict.fromkeys((row.ranks, row.microbatches) for row in rows):
        title = f"N = {ranks} ranks, {_counted(steps)}: bytes per parameter, calls per unit, in one step"
        table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 0, 0, 1))
        table.add_column("engine", no_wrap=True)
        for column in (*HEADINGS.values(), "total", "formula"):
            table.add_column(column, justify="right", no_wrap=True)
        for column in ("AG\ncalls", "AG\nwire", "RS\ncalls", "RS\nwire"):
            table.add_column(column, justify="right", style="cyan", no_wrap=True)
        chosen = [row for row in rows if (row.ranks, row.microbatches) == (ranks, steps)]
        for row in chosen:
            got = row.measured
            color = "red" if row.disagreements() else "green"
            table.add_row(
                row.label,
                *(f"{getattr(got, part):.2f}" for part in HEADINGS),
                f"[bold]{got.local:.2f}[/]",
                f"[{color}]{row.promised.local:.2f}[/]",
                *(f"{got.gathers:g}", f"{got.wire_gather:.2f}", f"{got.reduces:g}", f"{got.wire_reduce:.2f}"),
            )
        console.print(table)
        for row in chosen:
            for line in row.disagreements():
                console.print(f"[red]{row.label}: {line}[/]")
    if not any(row.disagreements() for row in rows):
        console.print("Every measurement equals its formula, and FlatFSDP's ledger agrees.")


def _counted(steps: int) -> str:
    return f"M = {steps} microbatch{'es' if steps > 1 else ''}"


COLORS = {
    "cast": "#4e79a7",
    "copy": "#f28e2b",
    "concat": "#e15759",
    "accumulate": "#76b7b2",
    "other": "#bab0ac",
}
MEANING = {
    "cast": "cast FP32 to bf16",
    "copy": "copy in / copy out",
    "concat": "concat",
    "accumulate": "widen and add",
    "other": "divide, zero-fill",
}


def draw(rows: list[Row]) -> Path:
    """Stacked bars of local bytes, one panel per number of microbatches, at the largest number of ranks."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    ranks = max(row.ranks for row in rows)
    panels = list(dict.fromkeys(row.microbatches for row in rows))
    groups = [[r for r in rows if (r.ranks, r.microbatches) == (ranks, steps)] for steps in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 0.9 * len(panels) + 0.36 * sum(map(len, groups))),
        squeeze=False,
        gridspec_kw={"height_ratios": [len(group) for group in groups]},
        layout="constrained",
    )
    for axis, steps, group in zip(axes[:, 0], panels, groups, strict=True):
        labels = [row.label for row in group]
        left = [0.0] * len(group)
        for part in HEADINGS:
            widths = [getattr(row.measured, part) for row in group]
            axis.barh(labels, widths, left=left, color=COLORS[part], label=MEANING[part], height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, total in zip(group, left, strict=True):
            agrees = _equal(row.measured.local, row.promised.local)
            note = "" if agrees else f" (formula: {row.promised.local:g})"
            axis.text(total, row.label, f" {total:.1f}{note}", va="center", fontsize=9)
        axis.set_title(_counted(steps), loc="left", fontsize=10)
        axis.set_xlim(right=1.08 * max(left))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("bytes copied per parameter per optimizer step (reads + writes on one rank)")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    figure.suptitle(f"Local copies, bf16 compute, FP32 master and reduction, N = {ranks} ranks", fontsize=11)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "bytes.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    app()
