"""`demo`: five rows of `verify` that take less than a minute on two CPU cores.

In:   nothing; sizes and rows are fixed.
Out:  a line a row on stderr, and one sentence about all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from flatfsdp.cli.console import reported_failures, results_console, usage_errors
from flatfsdp.cli.matrix import matrix_plan
from flatfsdp.cli.verify import gpt_plan, run_plan
from flatfsdp.comm.launch import Device, Launch
from flatfsdp.models.gpt import GPTConfig
from flatfsdp.training.choices import PrecisionName, Strategy
from flatfsdp.training.jobs import Settings

SETTINGS = Settings(GPTConfig(layers=2, hidden=64, heads=4, seq=64), batch=2, microbatches=2, steps=3)
ON_FOUR_RANKS = "pp 2 x tp 2 + SP, 1f1b, bf16"

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
    with usage_errors():
        two = Launch(2, Device.cpu, deterministic=True)
        plan = gpt_plan(two, SETTINGS, precisions, (Strategy.zero3,), self_test=self_test)
        four = matrix_plan(Device.cpu, 4, {"only": [ON_FOUR_RANKS], "steps": SETTINGS.steps})
        plan = replace(plan, rows=plan.rows + four.rows, launches=plan.launches + four.launches)
    console.print(INTRODUCTION, highlight=False)
    with reported_failures():
        found = run_plan(plan)
    if not found.equal:
        console.print("\n".join(found.differences()), style="red", highlight=False)
        raise typer.Exit(1)
    console.print(
        f"Proven: in all {len(found.rows)} rows both trainings have the same bits, on every rank.",
        style="green",
        highlight=False,
    )
    console.print(NEXT, highlight=False)
