"""Anything but a training step changes nothing: evaluations, partial backwards, overlapping regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import fp8, shard
from flatfsdp.fp8 import DelayedScaling, Format, autocast
from flatfsdp.layers import DotProductAttention, Embedding, Linear, convert

SHORT = DelayedScaling(amax_history_len=4)
OTHERS = [
    DelayedScaling(amax_history_len=8),
    DelayedScaling(margin=2),
    DelayedScaling(fp8_format=Format.E4M3),
]


def trained(layer: nn.Module, steps: int = 3) -> nn.Module:
    for step in range(steps):
        with autocast(recipe=SHORT):
            out = layer(torch.randn(16, 32) * 2.0**step)
        out.sum().backward()
    return layer


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("recipe", OTHERS, ids=["longer", "margin", "format"])
def test_an_evaluation_with_another_recipe_changes_no_state(recipe: DelayedScaling) -> None:
    layer = trained(Linear(32, 32))
    before = state(layer)
    with torch.no_grad(), autocast(recipe=recipe):
        layer(torch.randn(16, 32) * 100)
    after = state(layer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_evaluation_between_forward_and_recompute() -> None:
    torch.manual_seed(0)
    layers = [Linear(32, 32) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(16, 32)
    grads = []
    for layer, evaluates in zip(layers, (False, True), strict=True):
        inp = x.clone().requires_grad_()
        with autocast(recipe=SHORT):
            out = fp8.checkpoint(layer, inp)
        if evaluates:
            with torch.no_grad(), autocast(recipe=OTHERS[0]):
                layer(x * 100)
        out.square().sum().backward()
        grads.append((inp.grad, layer.weight.grad, state(layer)))
    (dx, dw, plain), (dx_evaluated, dw_evaluated, evaluated) = grads
    assert torch.equal(dx, dx_evaluated) and torch.equal(dw, dw_evaluated)
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


@pytest.mark.parametrize("recipe", [None, SHORT], ids=["fp32", "fp8"])
@pytest.mark.parametrize("way", ["autograd.grad", "backward(inputs)"])
def test_a_backward_that_does_not_ask_for_a_weight_leaves_its_main_grad(way: str, recipe: Any) -> None:
    layer = Linear(32, 32, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.randn(32, 32)
    before = layer.weight.main_grad.clone()
    x = torch.randn(16, 32, requires_grad=True)
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    if way == "autograd.grad":
        (dx,) = torch.autograd.grad(out.sum(), x)
    else:
        out.sum().backward(inputs=[x])
        dx = x.grad
    assert dx is not None and dx.abs().sum() > 0
    assert torch.equal(layer.weight.main_grad, before)
    with autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x)
    out.sum().backward(inputs=[x, layer.weight])
    assert not torch.equal(layer.weight.main_grad, before)


def test_an_embedding_that_is_not_asked_for() -> None:
    table = Embedding(8, 4, fuse_wgrad_accumulation=True)
    table.weight.main_grad = torch.zeros(8, 4)
    scale = torch.ones(4, requires_grad=True)
    out = table(torch.tensor([1, 2])) * scale
    torch.autograd.grad(out.sum(), scale, retain_graph=True)
    assert table.weight.main_grad.abs().sum() == 0
    out.sum().backward()
    assert table.weight.main_grad.abs().sum() > 0


def test_layers_that_run_in_several_regions_settle_in_one_arena() -> None:
    trunk, first, second = (Linear(32, 32) for _ in range(3))

    def step() -> None:
        for head in (first, second):
            with autocast(recipe=SHORT):
                out = head(trunk(torch.randn(16, 32)))
            out.sum().backward()

    def arenas() -> list[object]:
        return [
            layer._scalings[way].arena for layer in (trunk, first, second) for way in ("forward", "backward")
        ]

    step()
    step()
    settled = arenas()
    step()
    assert all(a is b for a, b in zip(arenas(), settled, strict=True))
    assert len({id(arena) for arena in settled}) == 2


def test_a_backward_inside_torch_autocast_keeps_fp32_sums() -> None:
    layer = Linear(32, 32, fuse_wgrad_accumulation=True)
    x = torch.randn(16, 32)
    grads = []
    for inside in (False, True):
        layer.weight.main_grad = torch.zeros(32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x).float().square().sum()
            if inside:
                out.backward()
        if not inside:
            out.backward()
        grads.append(layer.weight.main_grad)
    assert torch.equal(*grads)
    assert not torch.equal(grads[0], grads[0].bfloat16().float())


def test_transformer_engine_pickles_are_not_read() -> None:
    attention = DotProductAttention(4, 8)
    attention.load_state_dict({"_extra_state": torch.zeros(3, dtype=torch.uint8)})


def test_convert_refuses_what_is_flat_already() -> None:

    model = shard(nn.Sequential(nn.Linear(32, 32)))
    with pytest.raises(ValueError, match="convert first, then shard or wrap"):
        convert(model, filter=lambda linear, name: True)


def test_a_typo_in_fuse_wgrad_accumulation() -> None:
    with pytest.raises(ValueError, match="'two-pass', not True, False, 'two_pass' or 'if_claimed'"):
        Linear(32, 32, fuse_wgrad_accumulation="two-pass")  # type: ignore[arg-type]
