"""FlatFSDP around layers of others that add their weight gradients themselves, as Transformer Engine's do.

`Foreign` follows Transformer Engine's contract with its host, with a GEMM in PyTorch:

    forward     the weight is kept by a weak reference; `__fsdp_param__` and `overwrite_main_grad` are read
    backward    get_main_grad(), where there is `__fsdp_param__`, becomes weight.main_grad and is added to,
                or overwritten if is_first_microbatch; autograd gets None
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, microbatches, shard
from tests.support.models import grads_of, same, update
from tests.support.ranks import on_ranks

WIDTH = 16
CACHED = pytest.mark.parametrize("is_cached", [False, True], ids=["each", "cached"])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, accumulates: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weakref.ref(weight)
        assert not getattr(weight, "overwrite_main_grad", False)
        ctx.get = weight.get_main_grad if hasattr(weight, "__fsdp_param__") else lambda: weight.main_grad
        ctx.accumulates = accumulates
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), origin = ctx.saved_tensors, ctx.weight()
        assert origin is not None
        origin.main_grad = ctx.get()
        assert origin.main_grad.shape == weight.shape and origin.main_grad.is_contiguous()
        dweight = dy.t() @ x
        if ctx.accumulates:
            origin.main_grad.add_(dweight)
        else:
            origin.main_grad.copy_(dweight)
        if hasattr(origin, "grad_added_to_main_grad"):
            origin.grad_added_to_main_grad = True
            return dy @ weight, torch.full_like(weight, torch.nan), None
        return dy @ weight, None, None


class Foreign(nn.Linear):
    def __init__(self, fuses: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.fuses = fuses

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        if not self.fuses:
            return super().forward(x)
        return _Product.apply(x, self.weight, is_first is not True) + self.bias


class Net(nn.Module):
    def __init__(self, fuses: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Foreign(fuses) for _ in range(3))

    def forward(self, x: Tensor, is_first: bool | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, is_first).tanh()
        return x.square().sum()


def train(rank: int, fuses: bool, is_cached: bool, **options: Any) -> list[Tensor]:
    """Gradients and parameters of three steps of three microbatches."""
    torch.manual_seed(0)
    model = shard(Net(fuses), by_class(Foreign), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    found = []
    for _ in range(3):
        for index, x in enumerate(microbatches(model, list(torch.randn(3, 8, WIDTH)))):
            model(x, index == 0 if is_cached else None).backward()
        found += grads_of(model)
        update(optimizer)
    return found + [parameter.detach().clone() for parameter in model.parameters()]


@CACHED
@on_ranks(2)
def test_fused_is_not_fused(rank: int, is_cached: bool) -> None:
    expected = train(rank, fuses=False, is_cached=is_cached)
    for flag in (False, True):
        for options in ({}, {"reshard_after_forward": False}, {"debug": Debug(poison_on_free=True)}):
            found = train(rank, True, is_cached, optimize_backward_concat=flag, **options)
            assert same(found, expected), (flag, options)
        in_bf16 = Precision(compute=torch.bfloat16)
        found = train(rank, True, is_cached, optimize_backward_concat=flag, precision=in_bf16)
        assert all(tensor.isfinite().all() for tensor in found)
