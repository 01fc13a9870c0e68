"""Ranks that diverge: the result is right, or every rank raises; never a mix of two layers.

One rank may run units in another order, leave one out, or gather parameters that nobody else asks for.
Collectives of different units of equal size would then pair up unnoticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import by_class, shard
from flatfsdp.flat.nested import tensors_in
from tests.support.diverging.plans import Block, Divergence, Plan, What
from tests.support.diverging.search import BACKEND_ERRORS, PATIENCE, WORDS, judged
from tests.support.diverging.training import Report, Route, Sharded, build, check_on_rank
from tests.support.models import FLAGS, RESHARD
from tests.support.ranks import on_ranks, run_ranks, stop_pools
from tests.support.stress.models import BATCH

EQUAL = (Block(),) * 3
BACKWARDS = (2, 1, 0)


def run_apart(ranks: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a case on ranks of its own, as its leftovers would meet the collectives of the next case."""
    try:
        return run_ranks(ranks, case, *args, patience=PATIENCE)
    finally:
        stop_pools()


def reports_of(plan: Plan) -> list[Report]:
    """A case whose numbers are right as far as they go."""
    reports: list[Report] = run_ranks(plan.ranks, check_on_rank, plan, patience=PATIENCE)
    if any(report.error for report in reports):
        stop_pools()
    wrong = [report.wrong for report in reports if report.wrong]
    assert not wrong, wrong
    return reports


def assert_named(message: str, *units: str) -> None:
    assert WORDS in message, message
    assert all(unit in message for unit in units), message


@pytest.mark.parametrize(("ranks", "examples"), [(2, 9), (4, 3)])
def test_a_rank_that_does_something_else_is_right_or_named(ranks: int, examples: int) -> None:
    silent = [each for each in judged(ranks, examples, seed=3) if each[1].verdict == "SILENT"]
    assert not silent


# ---- another order, other units -------------------------------------------------------------------------


@FLAGS
@RESHARD
def test_units_of_equal_size_in_another_order_raise_on_every_rank(reshard: bool, flag: bool) -> None:
    divergence = Divergence("another order", BACKWARDS, rank=1)
    plan = Plan(2, EQUAL, divergence, reshard_after_forward=reshard, flag=flag)
    for report in reports_of(plan):
        assert_named(report.error, "blocks.0", "blocks.2")


@pytest.mark.parametrize(("ahead", "units"), [(0, ["blocks.0", "blocks.2"]), (1, ["blocks."])])
def test_another_order_in_a_later_microbatch_raises_on_every_rank(ahead: int, units: list[str]) -> None:
    """With prefetch, the first unit that differs is one that was gathered ahead."""
    divergence = Divergence("another order", BACKWARDS, rank=0, step=1, microbatch=1)
    for report in reports_of(Plan(2, EQUAL, divergence, microbatches=2, prefetch_forward=ahead)):
        assert_named(report.error, *units)


def loss_of(model: nn.Module, rank: int, order: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    hidden, target = torch.randn(2, BATCH, 4, generator=generator)
    return model(hidden, call=Route(torch.arange(BATCH), target, rank, 0, order=order))


ALL_RUN_ALL = Plan(2, EQUAL, Divergence("swaps microbatches"))
"""Whatever else happens is for the test to say."""


def leaves_out_one(rank: int, world_size: int) -> tuple[str, list[float]]:
    """Rank 0 does not run the first block, rank 1 not the last."""
    model, losses = Sharded(ALL_RUN_ALL).model, []
    try:
        for _ in range(2):
            loss = loss_of(model, rank, ((1, 2), (0, 1))[rank])
            losses.append(loss.item())
            loss.backward()
    except Exception as error:
        return str(error), losses
    return "", losses


def test_ranks_that_leave_out_different_units_all_raise() -> None:
    for message, losses in run_apart(2, leaves_out_one):
        assert not losses, "computed with weights of two blocks"
        assert_named(message, "blocks.0", "blocks.1")


def goes_on(rank: int, world_size: int) -> tuple[str, float, float]:
    """Runs the blocks backwards on one rank; then trains another model on the same ranks."""
    message = ""
    try:
        loss_of(Sharded(ALL_RUN_ALL).model, rank, BACKWARDS if rank else ALL_RUN_ALL.order).backward()
    except RuntimeError as error:
        message = str(error)
    models = Sharded(ALL_RUN_ALL).model, build(ALL_RUN_ALL)
    found, expected = (loss_of(model, rank, ALL_RUN_ALL.order) for model in models)
    found.backward()
    return message, found.item(), expected.item()


def test_a_mismatch_leaves_the_process_group_in_step() -> None:
    for message, found, expected in run_apart(2, goes_on):
        assert_named(message, "blocks.0", "blocks.2")
        assert found == pytest.approx(expected, rel=1e-5)


# ---- what only one rank asks for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reshard"),
    [("evaluates", True), ("state dict", False), ("summons parameters", True)],
)
def test_what_one_rank_does_before_the_training_raises_on_every_rank(what: What, reshard: bool) -> None:
    """Gathers of different kinds, or of different units of one size, meet."""
    plan = Plan(2, EQUAL, Divergence(what, rank=1), start="nothing", reshard_after_forward=reshard)
    for report in reports_of(plan):
        assert_named(report.error)


# ---- a block that returns its input ---------------------------------------------------------------------


@FLAGS
@pytest.mark.parametrize(
    "options",
    [*({"prefetch_backward": ahead} for ahead in (0, 1, 2)), {"reshard_after_forward": False}],
    ids=["prefetch 0", "prefetch 1", "prefetch 2", "zero2"],
)
@pytest.mark.parametrize("block", [1, 3, 4])
def test_a_block_may_return_its_input_on_one_rank(block: int, options: dict[str, Any], flag: bool) -> None:
    """Its unit's hook and that of the block before it are then on one tensor, and nothing lands in it."""
    divergence = Divergence("a block returns its input", (block,), rank=1)
    plan = Plan(2, (Block(),) * 5, divergence, flag=flag, **options)
    assert not any(report.error for report in reports_of(plan))


Form = Literal["tuple", "list", "dict"]


class Dropped(nn.Module):
    """Hands its input on in a container of its own, changed or not."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._form = form

    def forward(self, value: Any, is_dropped: bool) -> Any:
        hidden = value["hidden"] if isinstance(value, dict) else value[0]
        if not is_dropped:
            hidden = hidden + self.linear(hidden).tanh()
        return {"tuple": (hidden, None), "list": [hidden], "dict": {"hidden": hidden}}[self._form]


class Droppable(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Dropped(form) for _ in range(3))

    def forward(self, x: Tensor, dropped: int | None) -> Tensor:
        value: Any = (self.first(x),)
        for index, block in enumerate(self.blocks):
            value = block(value, index == dropped)
        (hidden,) = tensors_in(value)
        return hidden.square().mean()


@pytest.mark.parametrize("form", ["tuple", "list", "dict"])
@on_ranks(2, 3, patience=PATIENCE)
def test_a_block_may_return_what_contains_its_input(rank: int, world_size: int, form: Form) -> None:
    torch.manual_seed(0)
    plain = Droppable(form)
    model = shard(copy.deepcopy(plain), by_class(Dropped))
    inputs = torch.randn(world_size, 4, 8)
    # By rank: the first one runs all blocks.
    dropped = [None, 2, 1]
    losses = [plain(x, block) / world_size for x, block in zip(inputs, dropped, strict=False)]
    for each, loss in ((plain, sum(losses)), (model, model(inputs[rank], dropped[rank]))):
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


# ---- replicas -------------------------------------------------------------------------------------------


def test_a_mismatch_in_one_row_of_a_hybrid_mesh_ends_the_other_row() -> None:
    """A case whose ranks are told, or wait for the missing ones no longer than their time limit."""
    divergence = Divergence("another order", BACKWARDS, rank=3)
    reports = reports_of(Plan(4, EQUAL, divergence, sharding="hybrid"))
    for report in reports[2:]:
        assert_named(report.error, "blocks.0", "blocks.2")
    for report in reports[:2]:
        assert WORDS in report.error or BACKEND_ERRORS.search(report.error), report.error
