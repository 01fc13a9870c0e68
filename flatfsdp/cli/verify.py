"""`verify`: trains each configuration with a switch off and on, and compares all bits.

In:   a `Plan` of rows of built-in models, or the names of two functions of a user's own.
Out:  a `Parity`, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from flatfsdp.cli.console import StepBar
from flatfsdp.cli.user_functions import function_named, with_own_layers
from flatfsdp.comm.launch import Launch, Rank, run_on_ranks
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.parallel import make_mesh
from flatfsdp.parity import Parity, Switch, verify
from flatfsdp.parity.verify import Comparison, compare
from flatfsdp.parity.world import Spread, verify_world
from flatfsdp.profiling.step_time import environment
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.jobs import (
    Configuration,
    Settings,
    check_ranks,
    check_sizes,
    gpt_job,
    llama,
    llama_job,
)

OWN_SWITCHES = tuple(switch for switch in Switch if switch is not Switch.reshard)
"""Switches of the built-in GPT, for which `Strategy` has two rows instead of `reshard`."""


@dataclass(frozen=True)
class Row:
    """One configuration of a built-in model, and the switch that is off and on.

    Raises:
        ValueError: if the settings do not suit the configuration.
    """

    settings: Settings[Any]
    configuration: Configuration
    switch: Switch
    ranks: int

    def __post_init__(self) -> None:
        how = self.configuration
        if how.parallelism is None:
            check_sizes(self.settings, how.precision, interrupts=self.switch is Switch.replay)
        else:
            check_ranks(self.settings, how)

    def ends(self) -> Sequence[str]:
        """Names of the runs that are compared."""
        if self.configuration.lanes is None:
            return self.switch.ends
        return [spread.name for spread in self.spreads()]

    def spreads(self) -> list[Spread]:
        """The runs of a row with lanes: one on a single rank, and with the switch off and on those on all."""
        how = self.configuration
        assert how.parallelism is not None
        off, on = self.switch.applied(how.sharding)
        others = [
            Spread(f"{self.ranks} ranks, {end}", sharding, self.ranks, how.parallelism.dp_replicate)
            for end, sharding in zip(self.switch.ends, (off, on), strict=True)
        ]
        return [Spread("1 rank", on, 1), *others]


@dataclass(frozen=True)
class Plan:
    """Rows to run, each on the launch with as many ranks, in the order of the launches.

    Attributes:
        left_out: names of rows that cannot run here, with the reason.
        self_test: damage one bit of one gradient in the runs with the switch on, or with lanes exchange two
            of them, which must be noticed.
    """

    rows: tuple[Row, ...]
    launches: tuple[Launch, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    self_test: bool = False

    def empty_report(self) -> Parity:
        """The report before any row has run."""
        options = {**asdict(self.rows[0].settings), "self_test": self.self_test}
        not_run = [row.configuration.name for row in self.rows]
        return Parity([], self.left_out, {"environments": [], "options": options, "not_run": not_run})


def gpt_plan(
    launch: Launch,
    settings: Settings[GPTConfig],
    precisions: Sequence[PrecisionName],
    strategies: Sequence[Strategy],
    switches: Sequence[Switch] | None = None,
    fusions: Sequence[Fusion] = (Fusion.fused,),
    *,
    self_test: bool = False,
) -> Plan:
    """Plans a row for each switch that makes a difference to a GPT of a precision and strategy.

    Args:
        launch: number and device of the ranks.
        settings: settings of all rows.
        precisions: precisions of the rows.
        strategies: strategies of the rows.
        switches: switches that each has; None for all that make a difference.
        fusions: fusions of weight gradients in rows that switch the flag, for precisions with FlatFSDP's
            layers.
        self_test: damage one bit of one gradient in the runs with the switch on.

    Raises:
        ValueError: if sizes do not suit one of the precisions; if a given switch makes no difference to any.
    """
    rows: list[Row] = []
    left_out: dict[Switch, str] = {}
    chosen = OWN_SWITCHES if switches is None else switches
    # Each once, in the given order.
    for precision, strategy, switch in dict.fromkeys(product(precisions, strategies, chosen)):
        usual, own = Configuration(None, precision, strategy), precision.has_own_layers
        why = switch.why_not(
            usual.sharding, settings.microbatches, on_gpus=launch.use_cuda(), fuses=own, caches=own
        )
        if why is None:
            varied = dict.fromkeys(fusions) if switch is Switch.flag and own else (Fusion.fused,)
            rows += [Row(settings, replace(usual, fusion=fusion), switch, launch.world) for fusion in varied]
        else:
            left_out[switch] = why
    useless = left_out.keys() - {row.switch for row in rows}
    if switches is not None and useless:
        raise ValueError("; ".join(f"--switch {switch.value}: {left_out[switch]}" for switch in useless))
    return Plan(tuple(rows), (launch,), self_test=self_test)


def run_plan(plan: Plan, file: Path | None = None) -> Parity:
    """Runs all rows.

    Args:
        plan: the rows.
        file: file for the report, written after every row, so that an interrupted run leaves one.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: if a rank raised, or died.
    """
    parity = plan.empty_report()
    for launch in plan.launches:
        if any(row.ranks == launch.world for row in plan.rows):
            parity = run_on_ranks(rows_on_rank, (plan, parity, file), launch)
    return parity


def rows_on_rank(rank: Rank, payload: tuple[Plan, Parity, Path | None]) -> Parity:
    """Runs the rows for this number of ranks, adds them to the report, and writes it.

    Every rank must call it, and all get the same verdicts.

    Args:
        rank: this rank.
        payload: the plan, the report so far, and its file.
    """
    plan, parity, file = payload
    parity.about["environments"].append(environment(rank))
    # Data take long to read, and communicators to create.
    sampler_of, mesh_of = cache(Settings.sampler), cache(make_mesh)

    def compared(row: Row, **options: Any) -> list[Comparison]:
        settings, how, shared = row.settings, row.configuration, row.configuration.parallelism
        sampler = sampler_of(settings)
        if how.lanes is not None:
            job = llama_job(settings, how, sampler)
            return [*verify_world(job, how.lanes, row.spreads(), rank, **options)]
        if shared is None:
            job = gpt_job(settings, how, sampler, rank, interrupts=row.switch is Switch.replay)
            return [compare(job.trainee, row.switch, how.sharding, rank, **options)]
        make = partial(llama, settings, shared, how.schedule, sampler, mesh_of(**shared.sizes))
        return [compare(make, row.switch, how.sharding, rank, **options)]

    not_run = parity.about["not_run"]
    for row in plan.rows:
        if row.ranks != rank.world:
            continue
        how, visible, ends = row.configuration, rank.index == 0, row.ends()
        label = f"{len(plan.rows) - len(not_run) + 1} of {len(plan.rows)}  {how.name}: {' / '.join(ends)}"
        of_how = {"precision": how.precision.value, "strategy": how.strategy.value, "fusion": how.wgrad}
        about = {"name": how.name, "ranks": row.ranks, **of_how, "grad_sync": how.sync}
        with StepBar(label, len(ends) * row.settings.steps, visible) as bar:
            found = compared(row, self_test=plan.self_test, on_step=bar.show, about=about)
            bar.conclude(all(comparison.equal for comparison in found))
        parity.rows.extend(found)
        not_run.remove(how.name)
        if file is not None and visible:
            file.write_text(parity.json() + "\n")
    return parity


OF_LIBRARY = ("steps", "microbatches", "lr", "seed", "self_test")
"""Options that have the same names in `flatfsdp.parity.verify`."""
OF_OWN_MODEL = {*OF_LIBRARY, "model", "batches", "precision", "switch", "ranks", "device", "out", "json"}


def check_own_model(given: dict[str, Any]) -> None:
    """Checks options of `verify` for a user's own model that are given on the command line, by name.

    Raises:
        ValueError: if an option does not apply to a user's own model, or a function does not exist.
    """
    if {"model", "batches"} - given.keys():
        raise ValueError("--model and --batches go together: one builds the model, one yields batches")
    useless = [f"--{name.replace('_', '-')}" for name in given if name not in OF_OWN_MODEL]
    if useless:
        raise ValueError(f"{useless[0]} does not apply to a model of your own; leave it out")
    if len(given.get("precision", ())) > 1:
        raise ValueError(f"--model takes one --precision, not {len(given['precision'])}")
    for name in (given["model"], given["batches"]):
        function_named(name)


def verify_own_model(rank: Rank, given: dict[str, Any]) -> Parity:
    """Runs all switches; every rank must call it, and all get the same verdicts.

    Args:
        rank: this rank.
        given: options of `verify`: `model` and `batches`, "package.module:function" or
            "path/to/file.py:function" each, and others that are given on the command line.
    """
    (precision,) = given.get("precision", [PrecisionName.fp32])
    found = verify(
        partial(with_own_layers, function_named(given["model"]), precision),
        function_named(given["batches"]),
        switches=given.get("switch"),
        precision=precision.dtypes(),
        recipe=precision.recipe,
        device=rank.device,
        **{name: value for name, value in given.items() if name in OF_LIBRARY},
    )
    rows = [replace(row, about={"name": precision.value}) for row in found.rows]
    options = {**found.about["options"], "model": given["model"], "batches": given["batches"]}
    return Parity(rows, found.left_out, {"environments": [environment(rank)], "options": options})
