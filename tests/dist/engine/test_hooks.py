"""Hooks on parameters see and change the gradient that is reduced, or the wrapper refuses them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flatfsdp import shard
from tests.support.models import FLAGS, whole_grads
from tests.support.ranks import on_ranks


@FLAGS
@on_ranks(1, 2)
def test_a_hook_sees_the_sum_of_both_uses_and_changes_what_is_reduced(flag: bool) -> None:
    torch.manual_seed(0)
    x, grads = torch.randn(4, 8), []
    plain = nn.Linear(8, 8)
    layer = copy.deepcopy(plain)
    for each in (plain, layer):
        each.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    for model in (plain, shard(layer, optimize_backward_concat=flag)):
        model(model(x)).square().mean().backward()
        grads.append(whole_grads(model)["weight"] if model is layer else model.weight.grad)
    assert torch.equal(*grads) and grads[0].abs().max().item() == pytest.approx(1e-2)


def test_a_hook_that_needs_a_leaf_needs_the_flag() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="parameter bias has a post-accumulate-gradient hook"):
        shard(layer, optimize_backward_concat=False)
