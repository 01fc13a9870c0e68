"""On a GPU, too: what a unit leaves on its modules has the right gradient, and lost writes are noticed."""

from __future__ import annotations

import pytest
import torch

from flatfsdp import by_class, shard
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.left_behind import PLACES, Gated, Model, check, inputs, loss_of
from tests.support.models import FLAGS
from tests.support.ranks import on_ranks

pytestmark = NEEDS_GPU


@FLAGS
@on_ranks(2, backend="nccl")
def test_what_a_unit_leaves_on_its_modules_is_like_an_output(flag: bool) -> None:
    for place in PLACES:
        model = shard(Model(place).cuda(), by_class(Gated), optimize_backward_concat=flag)
        check(Model(place).cuda(), model, inputs(2, "cuda"))


@FLAGS
@on_ranks(2, backend="nccl")
def test_what_a_unit_leaves_elsewhere_raises(flag: bool) -> None:
    model = shard(Model("outside").cuda(), by_class(Gated), optimize_backward_concat=flag)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        loss_of(model, inputs(1, "cuda")[0]).backward()


@FLAGS
@on_ranks(2, backend="nccl")
def test_writes_through_data_between_forwards_raise(flag: bool) -> None:
    model = shard(Model("attribute").cuda(), by_class(Gated), optimize_backward_concat=flag)
    weight = model.blocks[0].gate.weight
    for write in (lambda: weight.data.zero_(), lambda: weight.data[0].fill_(1.0)):
        write()
        with pytest.raises(RuntimeError, match=r"blocks\.0\.gate\.weight .*written to as an attribute"):
            model(inputs(1, "cuda")[0])
        model(inputs(1, "cuda")[0]).backward()
        assert torch.isnan(weight).all()
