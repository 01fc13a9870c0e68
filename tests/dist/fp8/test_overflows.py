"""Counts of overflows over ranks: of all that share scales with delayed scaling, else of each rank alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp import by_class, shard
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast, count_overflows
from flatfsdp.layers import Linear
from tests.support.fp8_layers import FP8_RECIPES, SHORT, WIDTH, seeded
from tests.support.fp8_training import batch
from tests.support.ranks import on_ranks

ALONE = DelayedScaling(amax_history_len=4, reduce_amax=False)


def with_infinity(rank: int) -> Tensor:
    """A batch, with one infinite number on rank 1."""
    x = batch(rank)
    if rank == 1:
        x[3, 4] = math.inf
    return x


@pytest.mark.parametrize(
    "recipe",
    [SHORT, ALONE, CurrentScaling(), BlockScaling()],
    ids=["delayed", "delayed-alone", "current", "block"],
)
@on_ranks(2)
def test_infinity_on_one_rank(rank: int, world_size: int, recipe: Any) -> None:
    model = seeded(lambda: nn.Sequential(Linear(WIDTH, WIDTH), nn.GELU(), Linear(WIDTH, WIDTH)))
    wrapped = shard(model, by_class(Linear))
    with count_overflows(wrapped) as overflows:
        for x in (batch(rank), with_infinity(rank)):
            with autocast(recipe=recipe):
                loss = wrapped(x).square().mean()
            loss.backward()
    table = overflows.table()
    assert set(table) == {"0", "2"}
    is_counted = rank == 1 or recipe == SHORT
    assert table["0"]["input"]["infinite"] == int(is_counted) and table["0"]["input"]["amaxes"] == 2
    tables = [None] * world_size
    dist.all_gather_object(tables, table)
    assert (tables[0] == tables[1]) is (recipe == SHORT)


@FP8_RECIPES
@on_ranks(2)
def test_each_rank_counts_its_rows_of_a_shared_matrix(rank: int, world_size: int, recipe: Any) -> None:
    """Sequence parallelism, which gathers rows in the forward and once more in the backward."""
    layer = Linear(
        WIDTH,
        64,
        parallel_mode="column",
        tp_group=dist.group.WORLD,
        tp_size=world_size,
        sequence_parallel=True,
    )
    with count_overflows(layer) as overflows:
        with autocast(recipe=recipe):
            out = layer(with_infinity(rank).requires_grad_())
        out.sum().backward()
    table = overflows.table()[""]
    assert {counts["amaxes"] for counts in table.values()} == {1} and len(table) == 3
    assert table["input"]["infinite"] == int(rank == 1 or recipe == SHORT)
