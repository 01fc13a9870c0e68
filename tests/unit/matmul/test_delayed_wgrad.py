"""Weight gradients deferred until `backward_dw`: bit-equal, later."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import shard
from flatfsdp.fp8 import autocast
from flatfsdp.layers import LayerNormMLP, Linear, MultiheadAttention, TransformerLayer
from tests.support.fp8_layers import FFN, MAKES, RECIPES, SHORT, TOKENS, WIDTH, seeded, weights_of

ATTENTION = partial(MultiheadAttention, WIDTH, 4, attention_dropout=0.0, fuse_qkv_params=True)
BLOCK = partial(
    TransformerLayer, WIDTH, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True
)


def trained(layer: Any, recipe: Any, fused: bool, *, waits_for: int | None) -> list[Tensor]:
    """Gradients after four microbatches.

    Args:
        layer: the layer.
        recipe: its FP8 recipe, or None.
        fused: whether gradients go to main_grad.
        waits_for: number of backwards before the first `backward_dw`; None: it is not called.
    """
    weights = weights_of(layer).values()
    generator = torch.Generator().manual_seed(7)
    for weight in weights:
        weight.main_grad = torch.randn(weight.shape, generator=generator)
    starts = [weight.main_grad.clone() for weight in weights]
    inputs = []
    for microbatch in range(4):
        x = torch.randn(TOKENS // 2, 2, WIDTH, generator=generator).requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x, is_first_microbatch=microbatch == 0)
        out.backward(torch.randn(out.shape, generator=generator))
        inputs.append(x.grad)
        if waits_for is None:
            continue
        if microbatch + 1 < waits_for:
            assert all(weight.grad is None for weight in weights)
            assert all(torch.equal(w.main_grad, start) for w, start in zip(weights, starts, strict=True))
        else:
            layer.backward_dw()
    for _ in range((waits_for or 1) - 1):
        layer.backward_dw()
    rest = [p.grad for p in layer.parameters() if p.dim() == 1]
    return [*inputs, *rest, *(weight.main_grad if fused else weight.grad for weight in weights)]


@pytest.mark.parametrize("fused", [True, "two_pass", False])
@pytest.mark.parametrize("waits_for", [1, 3])
@RECIPES
@MAKES
def test_the_same_bits_later(make: Any, recipe: Any, waits_for: int, fused: Any) -> None:
    at_once = seeded(partial(make, fuse_wgrad_accumulation=fused))
    later = seeded(partial(make, fuse_wgrad_accumulation=fused, delay_wgrad_compute=True))
    expected = trained(at_once, recipe, fused, waits_for=None)
    found = trained(later, recipe, fused, waits_for=waits_for)
    assert all(grad.any() for grad in expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("make", [ATTENTION, partial(ATTENTION, input_layernorm=True), BLOCK])
@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
def test_layers_of_layers(make: Any, recipe: Any) -> None:
    at_once = seeded(partial(make, fuse_wgrad_accumulation=True))
    later = seeded(partial(make, fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
    expected = trained(at_once, recipe, True, waits_for=None)
    assert all(map(torch.equal, trained(later, recipe, True, waits_for=2), expected))


def test_frozen_weights_wait_for_nothing() -> None:
    layer = LayerNormMLP(WIDTH, FFN, delay_wgrad_compute=True)
    layer.fc1_weight.requires_grad_(False)
    layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    layer.backward_dw()
    assert layer.fc1_weight.grad is None and layer.fc2_weight.grad.any()


def test_layers_that_do_not_wait_have_nothing_to_do() -> None:
    layer = Linear(WIDTH, FFN)
    layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    before = layer.weight.grad.clone()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, before)


def test_one_call_for_each_call_of_the_layer() -> None:
    layer = Linear(WIDTH, WIDTH, delay_wgrad_compute=True)
    x = torch.randn(TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match=r"Linear\.weight: no backward has left"):
        layer.backward_dw()
    layer(layer(x)).sum().backward()
    # It requests no weight's gradient, so it leaves none.
    torch.autograd.grad(layer(x.requires_grad_()).sum(), x)
    layer.backward_dw()
    layer.backward_dw()
    with pytest.raises(RuntimeError, match=r"once after each backward"):
        layer.backward_dw()


def test_marks_stay_with_parameters_that_take_their_place() -> None:
    layer = Linear(WIDTH, FFN, delay_wgrad_compute=True, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    for one in (layer, copy.deepcopy(layer)):
        assert one.weight.skip_backward_post_hook
    assert not hasattr(layer.bias, "skip_backward_post_hook")
    with pytest.raises(RuntimeError, match="no backward has left"):
        copy.deepcopy(layer).backward_dw()


def test_who_cannot_wait() -> None:
    with pytest.raises(ValueError, match="parameters_split with delay_wgrad_compute"):
        Linear(WIDTH, FFN, parameters_split=["q", "k", "v"], delay_wgrad_compute=True)
    model = nn.Sequential(nn.Linear(4, WIDTH), Linear(WIDTH, FFN, delay_wgrad_compute=True))
    with pytest.raises(ValueError, match=r"parameter 1\.weight .* backward_dw\(\).*without delay_wgrad_comp"):
        shard(model)
    assert "weight" in model[1]._parameters, "it was changed before"
