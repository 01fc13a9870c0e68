"""Anything but a training step changes nothing: evaluations, partial backwards, overlapping regions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.fp8 import autocast
from flatfsdp.layers import Embedding, Linear
from tests.support.fp8_layers import SHORT


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
