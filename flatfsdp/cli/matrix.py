"""`verify --matrix`: compares, bit for bit, runs of one model shared over ranks in many ways.

In:   the options of `verify`, from which a `MatrixPlan` makes rows, and the numbers of ranks they fit.
Out:  a `MatrixReport`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.table import Table

from flatfsdp.cli.progress import StepBar
from flatfsdp.cli.report import compared_cells, comparison_table
from flatfsdp.cli.verify import Switch
from flatfsdp.comm.launch import Device, Launch, Rank, run_on_ranks, under_torchrun
from flatfsdp.comm.parallelism import Parallelism
from flatfsdp.models import LlamaConfig
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.models.text import Sampler
from flatfsdp.parity.evidence import KINDS, Compared, compared
from flatfsdp.profiling.environment import environment
from flatfsdp.profiling.figures import to_json
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.llama import Meshes, ParallelSettings, train_parallel

ON_CPU = ParallelSettings(LlamaConfig(4, 64, 128, heads=4, kv_heads=2, vocab=256, seq=32), steps=4)
ON_GPUS = ParallelSettings(LlamaConfig(4, 512, 1408, heads=8, kv_heads=4, vocab=256, seq=512), lr=1e-3)
"""Default settings of rows: with these sizes a row takes seconds."""

FP32, BF16, FP8 = PrecisionName.fp32, PrecisionName.bf16, PrecisionName.fp8_delayed
OF_ROWS = (
    *("parallelism", "schedule", "precision", "reshard", "fusion"),
    *("optimize_backward_concat", "in_place"),
)
"""Settings that a row, or the switch, determines."""
PIPELINES: tuple[ScheduleName, ...] = get_args(ScheduleName)


SWITCHES = (Switch.flag, Switch.in_place)
"""Switches that a matrix supports."""


@dataclass(frozen=True)
class MatrixRow:
    """One configuration.

    Attributes:
        schedule: schedule of the pipeline; no effect without one.
    """

    parallelism: Parallelism
    precision: PrecisionName
    strategy: Strategy = Strategy.zero3
    fusion: Fusion = Fusion.fused
    schedule: ScheduleName = "1f1b"

    @property
    def ways(self) -> tuple[str, str]:
        """The row apart from its precision, such as "pp 2 x tp 2 + SP, 1f1b" and "zero3, wgrad two-pass"."""
        schedule = "" if self.parallelism.pp == 1 else f", {self.schedule}"
        fusion = "" if self.fusion is Fusion.fused else f", wgrad {self.fusion.value}"
        return f"{self.parallelism}{schedule}", f"{self.strategy.value}{fusion}"

    @property
    def name(self) -> str:
        """Name of the row, such as "pp 2 x tp 2 + SP, 1f1b, bf16, zero3, wgrad two-pass"."""
        shared, updated = self.ways
        return f"{shared}, {self.precision.value}, {updated}"

    def applied(self, settings: ParallelSettings, switch: Switch, on: bool) -> ParallelSettings:
        """Completes the settings with those that the row and the switch determine.

        Raises:
            ValueError: if the settings do not suit this row.
        """
        return replace(
            settings,
            parallelism=self.parallelism,
            schedule=self.schedule,
            precision=self.precision,
            reshard=self.strategy is Strategy.zero3,
            fusion=self.fusion,
            optimize_backward_concat=on or switch is not Switch.flag,
            in_place=on and switch is Switch.in_place,
        )

    def obstacle(self, settings: ParallelSettings, worlds: Sequence[int]) -> str | None:
        """Reason why the row cannot run on any of these numbers of ranks; None if it can."""
        if self.parallelism.world not in worlds:
            return f"as they need {self.parallelism.world} ranks"
        try:
            self.applied(settings, Switch.flag, True)
        except ValueError as error:
            return f"because {error}"
        return None


def all_rows() -> list[MatrixRow]:
    """Lists the rows for 8 ranks, in bf16 and FP8 and with every schedule, and their halves for 4 and 2.

    Rows that free parameters have unfused weight gradients; rows that keep them have fused ones.
    """
    return [*_rows_for_8(), *_rows_for_4(), *_rows_for_2()]


def _rows_for_8() -> Iterable[MatrixRow]:
    whole = Parallelism(pp=2, dp_shard=2, tp=2, sequence_parallel=True)
    flat = Parallelism(dp_shard=4, tp=2, sequence_parallel=True)
    for precision in (BF16, FP8):
        for strategy, fusion in ((Strategy.zero3, Fusion.off), (Strategy.zero2, Fusion.fused)):
            for schedule in PIPELINES:
                yield MatrixRow(whole, precision, strategy, fusion, schedule)
            yield MatrixRow(flat, precision, strategy, fusion)
    yield MatrixRow(replace(whole, sequence_parallel=False), FP8)
    yield MatrixRow(whole, PrecisionName.fp8_weights, schedule="interleaved")


def _rows_for_4() -> Iterable[MatrixRow]:
    pp_tp = Parallelism(pp=2, tp=2, sequence_parallel=True)
    pp_dp = Parallelism(pp=2, dp_shard=2)
    dp_tp = Parallelism(dp_shard=2, tp=2, sequence_parallel=True)
    for precision in (BF16, FP8):
        for schedule, fusion in zip(PIPELINES, (Fusion.off, Fusion.fused, Fusion.two_pass), strict=True):
            yield MatrixRow(pp_tp, precision, fusion=fusion, schedule=schedule)
        for schedule, strategy in zip(
            PIPELINES, (Strategy.zero3, Strategy.zero2, Strategy.zero3), strict=True
        ):
            yield MatrixRow(pp_dp, precision, strategy, schedule=schedule)
        for strategy, fusion in ((Strategy.zero3, Fusion.off), (Strategy.zero2, Fusion.fused)):
            yield MatrixRow(dp_tp, precision, strategy, fusion)
    yield MatrixRow(pp_tp, FP32)
    yield MatrixRow(pp_dp, FP32, Strategy.zero2, Fusion.off, "interleaved")
    yield MatrixRow(dp_tp, FP32)
    yield MatrixRow(pp_dp, PrecisionName.fp8_weights)


def _rows_for_2() -> Iterable[MatrixRow]:
    pp, tp, sp = Parallelism(pp=2), Parallelism(tp=2), Parallelism(tp=2, sequence_parallel=True)
    for precision in (FP32, BF16, FP8):
        for schedule, fusion in zip(PIPELINES, (Fusion.off, Fusion.fused, Fusion.two_pass), strict=True):
            yield MatrixRow(pp, precision, fusion=fusion, schedule=schedule)
        yield MatrixRow(tp, precision, fusion=Fusion.off)
        yield MatrixRow(sp, precision)
    for precision in (PrecisionName.fp8_current, PrecisionName.fp8_weights):
        yield MatrixRow(pp, precision, Strategy.zero2, schedule="interleaved")
        yield MatrixRow(sp, precision)


IN_PLACE = (
    "pp 2, 1f1b, fp32, zero3",
    "pp 2, interleaved, bf16, zero3, wgrad two-pass",
    "tp 2, fp8-delayed, zero3, wgrad off",
    "tp 2 + SP, bf16, zero3",
    "tp 2 + SP, fp8-weights, zero3",
    "pp 2 x tp 2 + SP, interleaved, fp8-delayed, zero3, wgrad two-pass",
    "pp 2 x dp_shard 2, gpipe, bf16, zero3",
    "pp 2 x dp_shard 2, 1f1b, fp8-delayed, zero2",
    "pp 2 x dp_shard 2, 1f1b, fp8-weights, zero3",
    "dp_shard 2 x tp 2 + SP, fp32, zero3",
    "pp 2 x dp_shard 2 x tp 2 + SP, 1f1b, bf16, zero2",
    "pp 2 x dp_shard 2 x tp 2 + SP, interleaved, fp8-weights, zero3",
)
"""Rows for the in-place switch: every precision and schedule, and every way to share; the last two on 8
ranks."""


@dataclass(frozen=True)
class MatrixPlan:
    """Rows to run, with their launches.

    Attributes:
        switch: the switch that is off and on in each row.
        rows: rows to run, each on the launch with as many ranks.
        left_out: rows that cannot run here, by reason.
        settings: settings of the runs, except those that a row determines.
        self_test: damage one bit of one gradient in the runs with the switch on.
    """

    switch: Switch
    rows: tuple[MatrixRow, ...]
    left_out: dict[str, list[MatrixRow]]
    settings: ParallelSettings
    launches: tuple[Launch, ...]
    self_test: bool = False

    @staticmethod
    def of(device: Device, ranks: int | None, given: dict[str, Any]) -> MatrixPlan:
        """Chooses rows, settings and launches.

        Args:
            device: device of the ranks.
            ranks: number of ranks; None for torchrun's, or 2 and 4 on a CPU, or as many as there are GPUs
                for.
            given: options of `verify` that are given on the command line, by name.

        Raises:
            ValueError: if the options are invalid, or leave no row.
        """
        launches = _launches(device, ranks)
        settings = _settings(ON_GPUS if launches[0].use_cuda() else ON_CPU, given)
        worlds = [launch.world for launch in launches]
        switch = _switch(given)
        rows: list[MatrixRow] = []
        left_out: dict[str, list[MatrixRow]] = defaultdict(list)
        for row in _wanted(all_rows(), switch, given):
            obstacle = row.obstacle(settings, worlds)
            if obstacle is None:
                rows.append(row)
            else:
                left_out[obstacle].append(row)
        if not rows:
            reasons = "; ".join(left_out) or "as none has such a name, precision, strategy and fusion"
            raise ValueError(f"no row of the matrix can run here, {reasons}")
        return MatrixPlan(switch, tuple(rows), dict(left_out), settings, launches, "self_test" in given)

    def left_out_lines(self) -> list[str]:
        """One line for each reason, with the ways to share the model and their numbers of rows."""
        counted = {why: Counter(str(row.parallelism) for row in rows) for why, rows in self.left_out.items()}
        return [
            f"Left out, {why}: {', '.join(f'{ranks} ({rows})' for ranks, rows in of_why.items())}."
            for why, of_why in counted.items()
        ]


def _launches(device: Device, ranks: int | None) -> tuple[Launch, ...]:
    if under_torchrun() or ranks is not None:
        return (Launch(ranks, device, deterministic=True),)
    gpus = 0 if device is Device.cpu else torch.cuda.device_count()
    sizes = next(((size,) for size in (8, 4, 2) if size <= gpus), (2, 4))
    return tuple(Launch(size, device, deterministic=True) for size in sizes)


def _settings(usual: ParallelSettings, given: dict[str, Any]) -> ParallelSettings:
    of_model: dict[str, int] = {
        name: given[name] for name in ("layers", "hidden", "heads", "seq") if name in given
    }
    if "hidden" in given:
        of_model["ffn"] = 2 * given["hidden"]
    if "heads" in given:
        of_model["kv_heads"] = max(1, given["heads"] // 2)
    others = ("batch", "microbatches", "steps", "lr", "seed", "data")
    of_run = {name: given[name] for name in others if name in given}
    return replace(usual, model=replace(usual.model, **of_model), **of_run)


def _switch(given: dict[str, Any]) -> Switch:
    """The switch that a matrix compares.

    Raises:
        ValueError: if a matrix does not support it, or if there are several.
    """
    switches = set(given.get("switch", [Switch.flag]))
    if len(switches) > 1 or switches - {*SWITCHES}:
        names = " or ".join(f"--switch {switch.value}" for switch in SWITCHES)
        raise ValueError(f"--matrix switches one thing in all rows: choose {names}")
    return switches.pop()


def _wanted(rows: Iterable[MatrixRow], switch: Switch, given: dict[str, Any]) -> list[MatrixRow]:
    """Rows of the switch, with the given precisions, strategies, fusions, and words of --only."""
    return [
        row
        for row in rows
        if (switch is Switch.flag or row.name in IN_PLACE)
        and row.precision in given.get("precision", PrecisionName)
        and row.strategy in given.get("strategy", Strategy)
        and row.fusion in given.get("fusion", Fusion)
        and any(word in row.name for word in given.get("only", [""]))
    ]


@dataclass(frozen=True)
class MatrixComparison(Compared):
    """Comparison of the runs of one row."""

    row: MatrixRow

    def described(self) -> dict[str, Any]:
        """The row's entry in JSON."""
        verdicts = {"equal": self.equal, "falling": self.on.falling}
        return {"name": self.row.name, "ranks": self.row.parallelism.world, **asdict(self), **verdicts}


@dataclass(frozen=True)
class MatrixReport:
    """All rows that have run so far; `equal` only if each is."""

    compared: list[MatrixComparison]
    environments: list[dict[str, Any]]
    plan: MatrixPlan = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all rows have equal bits."""
        return all(found.equal for found in self.compared)

    def json(self) -> str:
        """The report as JSON."""
        options = asdict(self.plan.settings)
        for varied in OF_ROWS:
            del options[varied]
        done = [found.row for found in self.compared]
        return to_json(
            {
                "equal": self.equal,
                "environments": self.environments,
                "options": {**options, "switch": self.plan.switch, "self_test": self.plan.self_test},
                "rows": [found.described() for found in self.compared],
                "not_run": [row.name for row in self.plan.rows if row not in done],
                "left_out": {why: [row.name for row in rows] for why, rows in self.plan.left_out.items()},
            },
            indent=2,
        )

    def write(self, folder: Path) -> list[Path]:
        """Writes the report; returns the files."""
        text = folder / "verify-matrix.json"
        text.write_text(self.json() + "\n")
        return [text]

    def table(self) -> Table:
        """Table with one row a configuration; off above on within a cell."""
        off, on = self.plan.switch.ends
        result = comparison_table(
            f"Above {off}, below {on}: the same bits?",
            ("ranks", "precision", "final loss"),
            KINDS,
        )
        for found in self.compared:
            shared, updated = found.row.ways
            result.add_row(
                shared.replace(", ", "\n"),
                f"{found.row.precision.value}\n{updated}",
                *compared_cells(found.off, found.on, found.differences),
                end_section=found is not self.compared[-1],
            )
        return result

    def verdict_lines(self) -> list[str]:
        """Lines that name the differences, or one line that says there are none."""
        if self.equal:
            worlds = " and ".join(str(about["world_size"]) for about in self.environments)
            settings = self.plan.settings
            off, on = self.plan.switch.ends
            return [
                f"{on.capitalize()} equals {off}, bit for bit: {len(self.compared)} configurations on "
                f"{worlds} ranks, {settings.steps} steps of {settings.microbatches} microbatches each."
            ]
        return [line for found in self.compared for line in found.lines(found.row.name)]


def run_matrix(plan: MatrixPlan, out: Path) -> MatrixReport:
    """Runs all rows, each on the launch with as many ranks.

    Args:
        plan: the rows.
        out: folder for the report, which is written after every row, so that an interrupted run leaves one.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: if a rank raised, or died.
    """
    report = MatrixReport([], [], plan)
    for launch in plan.launches:
        if any(row.parallelism.world == launch.world for row in plan.rows):
            report = run_on_ranks(matrix_on_rank, (report, out), launch)
    return report


def matrix_on_rank(rank: Rank, payload: tuple[MatrixReport, Path], rows_before: int = 0) -> MatrixReport:
    """Runs the rows for this number of ranks, adds them to the report, and writes it to the folder.

    Every rank must call it, and all get the same verdicts.

    Args:
        rank: this rank.
        payload: the report so far, and the folder.
        rows_before: number of other rows of the same program that count in its progress.
    """
    report, out = payload
    report.environments.append(environment(rank))
    sampler, meshes = report.plan.settings.sampler(), Meshes()
    count = rows_before + len(report.plan.rows)
    for row in report.plan.rows:
        if row.parallelism.world == rank.world:
            place = f"{rows_before + len(report.compared) + 1} of {count}"
            report.compared.append(_compare(rank, row, report.plan, sampler, meshes, place))
            if rank.index == 0:
                report.write(out)
    return report


def _compare(
    rank: Rank, row: MatrixRow, plan: MatrixPlan, sampler: Sampler, meshes: Meshes, place: str
) -> MatrixComparison:
    steps, settings = plan.settings.steps, plan.settings
    label = f"{place}  {row.name}: {' / '.join(plan.switch.ends)}"
    with StepBar(label, 2 * steps, visible=rank.index == 0) as bar:
        off, on = (
            partial(
                train_parallel,
                row.applied(settings, plan.switch, is_on),
                *(sampler, rank, meshes, bar.advance),
            )
            for is_on in (False, True)
        )
        runs = compared(off, on, rank, steps, self_test=plan.self_test)
        found = MatrixComparison(**vars(runs), row=row)
        bar.conclude(found)
    return found
