"""`demo`: seven rows of `verify` that take less than a minute on two CPU cores.

In:   nothing; sizes and rows are fixed.
Out:  a line a row on stderr, and one sentence about all of them.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flatfsdp.cli.console import reported_failures, results_console, usage_errors
from flatfsdp.cli.matrix import MatrixPlan, MatrixReport, matrix_on_rank
from flatfsdp.cli.verify import Switch, VerifyJob, verify_on_rank
from flatfsdp.comm.launch import Device, Launch, run_on_ranks
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.training.choices import PrecisionName, Strategy
from flatfsdp.training.gpt import TrainSettings

SETTINGS = TrainSettings(GPTConfig(layers=2, hidden=64, heads=4, seq=64), batch=2, microbatches=2, steps=3)
ON_FOUR_RANKS = "pp 2 x tp 2 + SP, 1f1b, bf16"
SWITCHES = tuple(switch for switch in Switch if switch is not Switch.replay)

INTRODUCTION = (
    "Each row trains a small language model on real text twice, with one switch off and on (flag: "
    "optimize_backward_concat), and compares all losses, gradients, parameters and optimizer states bit for "
    "bit; 2 CPU processes share the model, in the last row 4 (2 pipeline stages x 2 tensor-parallel ranks)."
)
NEXT = (
    "Next: your own model, `flatfsdp verify --model my_model.py:build --batches my_model.py:batches`; all "
    "precisions and switches, `flatfsdp verify`; all ways to share a model, `flatfsdp verify --matrix`."
)


def demo(
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Damage one bit of one gradient; the demo must notice.")
    ] = False,
) -> None:
    """Show in a minute, on CPU, that no switch changes a bit: some rows of [bold]verify[/bold].

    Exits with 1 if anything differs.

    [bold]Example[/bold]

    [green]python -m flatfsdp demo[/green]
    """
    console = results_console()
    precisions = (PrecisionName.fp32, PrecisionName.fp8_delayed)
    job = VerifyJob(SETTINGS, precisions, (Strategy.zero3,), SWITCHES, self_test=self_test)
    with usage_errors():
        two = Launch(2, Device.cpu, deterministic=True)
        plan = MatrixPlan.of(Device.cpu, 4, {"only": [ON_FOUR_RANKS], "steps": SETTINGS.steps})
        plan = replace(plan, self_test=self_test)
    before, after = len(job.configurations()), len(plan.rows)
    console.print(INTRODUCTION, highlight=False)
    with reported_failures(), tempfile.TemporaryDirectory() as folder:
        on_two = run_on_ranks(partial(verify_on_rank, rows_after=after), job, two)
        payload = MatrixReport([], [], plan), Path(folder)
        on_four = run_on_ranks(partial(matrix_on_rank, rows_before=before), payload, plan.launches[0])
    for report in (on_two, on_four):
        if not report.equal:
            console.print("\n".join(report.verdict_lines()), style="red", highlight=False)
    if not (on_two.equal and on_four.equal):
        raise typer.Exit(1)
    console.print(
        f"Proven: in all {before + after} rows both trainings have the same bits, on every rank.",
        style="green",
        highlight=False,
    )
    console.print(NEXT, highlight=False)
