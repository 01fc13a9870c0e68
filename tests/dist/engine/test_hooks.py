"""Hooks on parameters see and change the gradient that is reduced, or the wrapper refuses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatfsdp import by_class, shard
from tests.support.models import Block, Net, data
from tests.support.ranks import on_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])


@FLAGS
@on_ranks(2)
def test_hooks_on_parameters_run_before_the_gradient_lands(rank: int, flag: bool) -> None:
    grads = []
    for factor in (1.0, 10.0):
        torch.manual_seed(0)
        net = Net()
        net.blocks[0].up.weight.register_hook(lambda g, factor=factor: g * factor)
        model = shard(net, by_class(Block), optimize_backward_concat=flag)
        model(next(data(rank, 1, 1))[0]).backward()
        grads.append(model.blocks[0].clip_grad_norm_(torch.inf))
    assert grads[1] > 2 * grads[0]


@FLAGS
def test_a_hook_sees_the_sum_of_both_uses(flag: bool) -> None:
    x = torch.randn(4, 8)
    largest = []
    for wrap in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        layer.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
        model = shard(layer, optimize_backward_concat=flag) if wrap else layer
        model(model(x)).square().mean().backward()
        grad = next(model.parameters()).grad.as_subclass(torch.Tensor)
        largest.append(grad.abs().max().item())
    assert largest[0] == largest[1] == pytest.approx(1e-2)


def test_a_hook_that_needs_a_leaf_needs_the_flag() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="parameter bias has a post-accumulate-gradient hook"):
        shard(layer, optimize_backward_concat=False)
