"""torch.utils.flop_counter counts the GEMMs of FP8 and fused layers like those of nn.Linear."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe, autocast
from flatfsdp.layers import Linear


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), CurrentScaling(), BlockScaling()], ids=str)
def test_forward_and_both_gradients_are_counted(recipe: Recipe | None, fused: bool) -> None:
    tokens, inner, outer = 48, 32, 64
    layer = Linear(inner, outer, bias=False, fuse_wgrad_accumulation=fused)
    layer.weight.main_grad = torch.zeros(outer, inner)
    x = torch.randn(tokens, inner, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        out.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * tokens * inner * outer
