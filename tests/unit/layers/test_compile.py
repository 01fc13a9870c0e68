"""torch.compile around FP8 layers compiles what is between them, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import TransformerLayer

RECIPES = {"bf16": None, "delayed": DelayedScaling(amax_history_len=4), "current": CurrentScaling()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_compiled_layer_gives_the_same(recipe: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = TransformerLayer(
        64,
        128,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        fuse_wgrad_accumulation=True,
        params_dtype=torch.bfloat16,
    )
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(16, 2, 64, dtype=torch.bfloat16)

    def run(module: Any) -> list[torch.Tensor]:
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
        inp = x.clone().requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = module(inp)
        out.square().mean().backward()
        grads = [p.main_grad.clone() if p.dim() == 2 else p.grad for p in layer.parameters()]
        return [out.detach(), inp.grad, *grads]

    # The first run finds the scales of delayed scaling.
    run(layer)
    run(layer)
    for ours, other in zip(run(compiled), run(layer), strict=True):
        assert torch.equal(ours, other)
        assert ours.isfinite().all()
