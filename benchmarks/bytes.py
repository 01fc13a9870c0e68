"""How many bytes does each engine copy and send for one parameter in one optimizer step?

Measured from outside (`flatfsdp.copy_counter`), the same way for FlatFSDP and for PyTorch's FSDP2, and put
beside the number that each design promises.  Four equal units, FP32 master parameters, bf16 compute, FP32
reduction, gloo; the second step is counted, so that nothing of the first step's set-up is in it.  With FP8
weights, which are nearly all parameters then, it is FlatFSDP's own layers, and torchao's float8 with FP8
all-gather.  What cannot run here (fairscale needs CUDA) is there by its formula.

Local bytes are reads plus writes of copy kernels on one rank; matrix products, the optimizer and what a
collective does inside are not in it (the division by the number of ranks, for one).  FlatFSDP's FP8 layers
add up weight gradients inside the products.  Wire bytes are (N - 1) / N of each collective's payload.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib as mpl
import torch
import torch.distributed as dist
import typer
from _common import RESULTS, Block, run_on_ranks, write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flatfsdp import Precision, auto_wrap, by_class, fp8, microbatches
from flatfsdp.copy_counter import CopyCounter, Kind
from flatfsdp.fp8 import CurrentScaling

UNITS, WIDTH, HIDDEN, TOKENS = 4, 256, 512, 16
MIN_NUMEL = WIDTH * HIDDEN // 4
"""A quarter of a weight, which is larger than two activations of 16 * 512 elements."""
COMPUTE_BYTES = 2  # bf16
FP8_BYTES = 1
MASTER_BYTES = 4  # FP32; also what gradients are accumulated and reduced in


class NormedBlock(Block):
    """With a parameter that is not stored in FP8, and that is too small to be counted by itself."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@dataclass(frozen=True)
class Case:
    """An engine and how it is asked to behave.

    Attributes:
        zero: 3 frees parameters after each forward and backward, 2 keeps them for a step.
        sync: gradients are reduced in the last microbatch or in every one.
        concat_free: FlatFSDP's `optimize_backward_concat`.
        fp8: weights are gathered, and multiplied, in FP8.
    """

    engine: Literal["FlatFSDP", "FSDP2", "fairscale"]
    zero: Literal[2, 3]
    sync: Literal["last", "every"] = "last"
    concat_free: bool = True
    fp8: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether it can be measured."""
        if self.engine == "FSDP2" and self.fp8:
            return importlib.util.find_spec("torchao") is not None
        return self.engine != "fairscale"

    @property
    def parameters(self) -> int:
        return UNITS * (2 * WIDTH * HIDDEN + (WIDTH if self.fp8 else 0))

    @property
    def weights_share(self) -> float:
        """Of the parameters, those that are no norm's."""
        return UNITS * 2 * WIDTH * HIDDEN / self.parameters


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
    Case("FlatFSDP", zero=3, fp8=True),
    Case("FlatFSDP", zero=2, fp8=True),
    Case("FSDP2", zero=3, fp8=True),
    Case("FSDP2", zero=2, fp8=True),
    Case("fairscale", zero=3),
    Case("fairscale", zero=2),
)


@dataclass(frozen=True)
class Traffic:
    """One step of one case; bytes per parameter, calls per unit.

    Attributes:
        cast: master shards to bf16 or FP8.
        amax: master shards, read for the scales of FP8 weights.
        transpose: FP8 weights, for the products of the backward.
        copy: into all-gather buffers and out of them.
        concat: gradients into one flat tensor.
        accumulate: gradients widened to FP32 and added up.
        other: scaling, clamping and zero-fill: casts to FP8 in several kernels, divisions by N.
        gathers, reduces: all-gather and reduce-scatter calls of a unit.
        wire_gather, wire_reduce: bytes per parameter that a rank sends.
    """

    cast: float
    amax: float
    transpose: float
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
        return sum(getattr(self, part) for part in HEADINGS)


HEADINGS = {
    "cast": "cast",
    "amax": "amax",
    "transpose": "trans-\npose",
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
        measured: None for a case that does not run here.
        ledger: FlatFSDP's own account in bytes per parameter; empty for other engines.
        missed: large operators that the counter does not know; the measurement is complete if empty.
    """

    case: Case
    ranks: int
    microbatches: int
    measured: Traffic | None
    promised: Traffic
    ledger: dict[str, float]
    missed: dict[str, int]

    @property
    def label(self) -> str:
        case = self.case
        flag = "on" if case.concat_free else "off"
        names = {"FlatFSDP": f"FlatFSDP {flag}", "FSDP2": "FSDP2", "fairscale": "fairscale 0.4.13"}
        name = names[case.engine]
        if case.fp8:
            name += ", FP8 weights" if case.engine == "FlatFSDP" else " + torchao float8"
        sync = f", {case.sync}" if self.microbatches > 1 else ""
        formula = "" if self.measured is not None else " (formula)"
        return f"{name}, ZeRO-{case.zero}{sync}{formula}"

    @property
    def shown(self) -> Traffic:
        return self.promised if self.measured is None else self.measured

    def disagreements(self) -> list[str]:
        """What differs, one line each; empty is what we want."""
        if self.measured is None:
            return []
        found = [
            f"{f.name}: measured {got:g}, promised {want:g}"
            for f in fields(Traffic)
            if not _equal(got := getattr(self.measured, f.name), want := getattr(self.promised, f.name))
        ]
        found += [f"operator not accounted for: {op} (x{times})" for op, times in self.missed.items()]
        for key, want in self._as_ledger(self.measured).items():
            if self.ledger and not _equal(got := self.ledger.get(key, 0.0), want):
                found.append(f"ledger {key}: {got:g}, measured {want:g}")
        return found

    def _as_ledger(self, measured: Traffic) -> dict[str, float]:
        """The measurement under the ledger's names, which also has the norms."""
        norms = promised(replace(self.case, fp8=False), self.ranks, self.microbatches)
        share = 1 - self.case.weights_share
        return {key: getattr(measured, name) + share * getattr(norms, name) for key, name in LEDGER.items()}


LEDGER = {
    "cast": "cast",
    "measure": "amax",
    "transpose": "transpose",
    "concat": "concat",
    "accumulate": "accumulate",
    "gather": "wire_gather",
    "reduce": "wire_reduce",
}
"""Its names for what a `Traffic` has."""


def _equal(a: float, b: float) -> bool:
    return abs(a - b) < 1e-6 * max(1.0, abs(a), abs(b))


# -- what each design promises ---------------------------------------------------------------------------


def promised(case: Case, ranks: int, steps: int) -> Traffic:
    """The formula row of `case` for N ranks and `steps` microbatches."""
    gathers = 2 * steps if case.zero == 3 else 1
    reduces = steps if case.sync == "every" else 1
    on_wire = (ranks - 1) / ranks
    gathered, reduced = COMPUTE_BYTES * 1.0, MASTER_BYTES * 1.0
    if case.fp8:
        # FlatFSDP sends the norms in buffers of their own, which are too small to be counted.
        weights, norms = case.weights_share, 1 - case.weights_share
        gathered = FP8_BYTES * weights + (0 if case.engine == "FlatFSDP" else COMPUTE_BYTES * norms)
        reduced *= weights if case.engine == "FlatFSDP" else 1
    local = dict.fromkeys(HEADINGS, 0.0) | _LOCAL[case.engine, case.fp8](case, ranks, steps)
    return Traffic(
        **local,
        gathers=gathers,
        reduces=reduces,
        wire_gather=gathers * gathered * on_wire,
        wire_reduce=reduces * reduced * on_wire,
    )


def _flat_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """FlatFSDP: one cast a step, gathered in place, gradients land in the buffer that is reduced."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    reduces = steps if case.sync == "every" else 1
    # The first gradient after a reduction is a copy, the others are adds; so are reduced shards.
    landed = reduces * (p + m) + (steps - reduces) * (p + 2 * m) + (reduces - 1) * 3 * m / ranks
    return {
        "cast": (m + p) / ranks,
        "concat": 0 if case.concat_free else 2 * p * steps,
        "accumulate": landed,
    }


def _flat_fp8_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """The same with one cast to FP8, and transposes as long as the weights stay; products write gradients."""
    p, m, weights = FP8_BYTES, MASTER_BYTES, case.weights_share
    unshards = steps if case.zero == 3 else 1
    return {
        "cast": weights * (m + p) / ranks,
        "amax": weights * m / ranks,
        "transpose": weights * unshards * 2 * p,
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
    }


def _fsdp2_fp8_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """The same with torchao's weights: scaled, clamped and cast at every gather, measured once a step."""
    p, m, weights = FP8_BYTES, MASTER_BYTES, case.weights_share
    gathers = 2 * steps if case.zero == 3 else 1
    in_bf16 = _fsdp2_local(case, ranks, steps)
    gathered = p * weights + COMPUTE_BYTES * (1 - weights)
    return {
        "cast": weights * gathers * (m + p) / ranks,
        "amax": weights * m / ranks,
        "transpose": weights * steps * 2 * p,
        "copy": gathers * (2 * gathered / ranks + 2 * gathered),
        "concat": in_bf16["concat"],
        "accumulate": weights * in_bf16["accumulate"],
        "other": weights * gathers * 2 * 2 * m / ranks,
    }


def _fairscale_local(case: Case, ranks: int, steps: int) -> dict[str, float]:
    """fairscale 0.4.13: a cast at every gather, gathered in place; gradients are concatenated and added up in
    bf16, widened in the last microbatch, and divided before and after the reduction into zeros."""
    p, m = COMPUTE_BYTES, MASTER_BYTES
    gathers = 2 * steps if case.zero == 3 else 1
    divided_after = 2 * m / ranks if ranks > 2 else 0.0
    return {
        "cast": gathers * (m + p) / ranks,
        "concat": steps * 2 * p,
        "accumulate": (steps - 1) * 3 * p + (p + m),
        "other": 2 * m + m / ranks + divided_after,
    }


_LOCAL = {
    ("FlatFSDP", False): _flat_local,
    ("FlatFSDP", True): _flat_fp8_local,
    ("FSDP2", False): _fsdp2_local,
    ("FSDP2", True): _fsdp2_fp8_local,
    ("fairscale", False): _fairscale_local,
}
"""By engine, and whether weights are in FP8; parts that are not there are 0."""


# -- what happens ----------------------------------------------------------------------------------------


def measure_all(rank: int, ranks: int, cases: list[tuple[Case, int]]) -> list[Row]:
    """On one rank: each case with its number of microbatches."""
    return [_measure(case, ranks, steps) for case, steps in cases]


def _measure(case: Case, ranks: int, steps: int) -> Row:
    expected = promised(case, ranks, steps)
    if not case.runs_here:
        return Row(case, ranks, steps, None, expected, {}, {})
    torch.manual_seed(0)
    block = NormedBlock if case.fp8 else Block
    shard = _flat if case.engine == "FlatFSDP" else _fsdp2
    model = shard(nn.Sequential(*(block(WIDTH, HIDDEN) for _ in range(UNITS))), case)
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
        measured=_traffic(counter, case.parameters),
        promised=expected,
        ledger=dict(ledger.bytes_per_parameter()) if ledger is not None else {},
        missed=dict(counter.unclassified),
    )


def _flat(model: nn.Sequential, case: Case) -> nn.Module:
    if case.fp8:
        fp8.convert(model, filter=lambda linear, name: True, fuse_wgrad_accumulation=True)
    return auto_wrap(
        model,
        by_class(Block),
        precision=Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling() if case.fp8 else None),
        reshard_after_forward=case.zero == 3,
        optimize_backward_concat=case.concat_free,
        grad_sync=case.sync,
    )


def _fsdp2(model: nn.Sequential, case: Case) -> nn.Module:
    if case.fp8:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        float8.convert_to_float8_training(model, config=config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=case.zero == 3)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, steps: int) -> None:
    batches = [torch.randn(TOKENS, WIDTH) for _ in range(steps)]
    for index, batch in enumerate(microbatches(model, batches)):
        if isinstance(model, FSDPModule):
            is_last = index == steps - 1
            model.set_requires_gradient_sync(is_last or case.sync == "every")
            # ZeRO-2 keeps parameters for a step; by default FSDP2 gathers them in every microbatch.
            model.set_reshard_after_backward(is_last or case.zero == 3)
        with _region(case):
            loss = model(batch).float().sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if case.engine == "FSDP2" and case.fp8:
        importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


def _region(case: Case) -> AbstractContextManager[None]:
    in_fp8 = case.engine == "FlatFSDP" and case.fp8
    return fp8.autocast(recipe=CurrentScaling()) if in_fp8 else nullcontext()


def _traffic(counter: CopyCounter, parameters: int) -> Traffic:
    def per_parameter(nbytes: float) -> float:
        return nbytes / parameters

    return Traffic(
        cast=per_parameter(counter.bytes(Kind.CAST)),
        amax=per_parameter(counter.bytes(Kind.MEASURE)),
        transpose=per_parameter(counter.bytes(Kind.TURN)),
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
    help="Bytes that FlatFSDP, FSDP2, torchao and fairscale copy and send per parameter and step.",
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
    payload = {"units": UNITS, "weights": UNITS * 2 * WIDTH * HIDDEN, "rows": [_as_dict(row) for row in rows]}
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
        "local": {
            "measured": None if row.measured is None else row.measured.local,
            "promised": row.promised.local,
        },
        "disagreements": row.disagreements(),
    }


def show(rows: list[Row]) -> None:
    """One table per number of ranks and microbatches; disagreements in red below it."""
    console = Console()
    console.width = max(console.width, 130)  # a table that wraps says nothing
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
            got = row.shown
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
    "amax": "#a0cbe8",
    "transpose": "#59a14f",
    "copy": "#f28e2b",
    "concat": "#e15759",
    "accumulate": "#76b7b2",
    "other": "#bab0ac",
}
MEANING = {
    "cast": "cast FP32 to bf16 or FP8",
    "amax": "largest magnitude",
    "transpose": "transpose",
    "copy": "copy in / copy out",
    "concat": "concat",
    "accumulate": "widen and add",
    "other": "scale, clamp, divide, zero-fill",
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
            widths = [getattr(row.shown, part) for row in group]
            axis.barh(labels, widths, left=left, color=COLORS[part], label=MEANING[part], height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, total in zip(group, left, strict=True):
            agrees = _equal(row.shown.local, row.promised.local)
            note = "" if agrees else f" (formula: {row.promised.local:g})"
            axis.text(total, row.label, f" {total:.1f}{note}", va="center", fontsize=9)
        axis.set_title(_counted(steps), loc="left", fontsize=10)
        axis.set_xlim(right=1.08 * max(left))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("bytes copied per parameter per optimizer step (reads + writes on one rank)")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    title = "Local copies outside of matrix products, FP32 master and reduction"
    figure.suptitle(f"{title}, N = {ranks} ranks", fontsize=11)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "bytes.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    app()
