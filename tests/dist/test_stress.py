"""Random models, trained in random ways: flag off, flag on and the unsharded model agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from torch import Tensor
from typer.testing import CliRunner

from flatfsdp.buffers import MainGrad
from flatfsdp.reduce import Reducer
from flatfsdp.unit import Unit as EngineUnit
from tests.dist import stress_plans
from tests.dist.ranks import run_ranks
from tests.dist.stress import Judge, Verdict, check_on_rank, main, search
from tests.dist.stress_plans import Chain, Leaf, Plan, Step, Unit, plans


@pytest.mark.parametrize(("ranks", "examples"), [(1, 30), (2, 110), (3, 20), (4, 40)])
def test_flag_off_flag_on_and_plain_agree(ranks: int, examples: int) -> None:
    search(ranks, examples, Judge())


@settings(max_examples=50, database=None)
@given(plans(4))
def test_a_plan_prints_as_the_call_that_makes_it(plan: Plan) -> None:
    assert eval(repr(plan), vars(stress_plans)) == plan


# ---- the stress test notices when the engine is broken --------------------------------------------------

UNITS = (Unit(Leaf("mlp")), Unit(Chain((Leaf("detached vector"), Leaf("linear")))))
PLAN = Plan(2, UNITS, steps=(Step(3), Step(2)), width=4, poison=True)


def first_write_adds(patch: Any) -> None:
    accumulate = MainGrad._accumulate

    def damaged(self: MainGrad, target: Tensor, grad: Tensor, *, first: bool) -> None:
        accumulate(self, target, grad, first=False)

    patch.setattr(MainGrad, "_accumulate", damaged)


def a_unit_is_never_reduced(patch: Any) -> None:
    ready, finish = Reducer.ready, Reducer.finish

    def without_first(self: Reducer) -> None:
        self._order = self._order[1:]
        finish(self)

    patch.setattr(Reducer, "ready", lambda self, group: group is self._order[0] or ready(self, group))
    patch.setattr(Reducer, "finish", without_first)


def units_are_resharded_too_early(patch: Any) -> None:
    landed = EngineUnit.landed

    def damaged(self: EngineUnit, index: int | None) -> None:
        landed(self, index)
        self.reshard()

    patch.setattr(EngineUnit, "landed", damaged)


def check_damaged(rank: int, world_size: int, damage: Callable[[Any], None]) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        damage(patch)
        return check_on_rank(rank, world_size, PLAN)


@pytest.mark.parametrize("damage", [first_write_adds, a_unit_is_never_reduced, units_are_resharded_too_early])
def test_a_broken_engine_is_noticed(damage: Callable[[Any], None]) -> None:
    assert any(verdict.problem for verdict in run_ranks(2, check_damaged, damage))
    assert not any(verdict.problem for verdict in run_ranks(2, check_on_rank, PLAN))


def test_the_command_prints_the_smallest_failing_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(main)
    arguments = ["--ranks", "1", "--examples", "5", "--seed", "0"]
    good = CliRunner().invoke(app, arguments)
    assert (good.exit_code, "All plans agree" in good.output) == (0, True)
    first_write_adds(monkeypatch)
    bad = CliRunner().invoke(app, arguments)
    assert bad.exit_code == 1
    assert "Plan(1, (Leaf('linear'),), width=1)\n\nflag on is not flag off" in bad.output
