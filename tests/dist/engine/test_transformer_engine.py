"""Transformer Engine's layers: their FP8 weights are freed with the parameters, and made again; dtypes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, microbatches, shard
from tests.support.against_plain import assert_equal
from tests.support.extra_state import ScaledLinear, transformer_engine
from tests.support.models import grads_of, same, update, whole_grads
from tests.support.ranks import on_ranks
from tests.support.te_linear import QuantizedLinear, transformer_engine_linear

SIZE = 16
BF16 = Precision(compute=torch.bfloat16)


class Net(nn.Module):
    """Layers inside of modules of somebody else's, which are the units."""

    def __init__(self, layer: type[nn.Module] = QuantizedLinear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(layer(SIZE), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def linears(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(count, 4, SIZE, dtype=torch.bfloat16))


def unsharded(inputs: Sequence[Tensor]) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, FP32 sums of gradients, and the state of all scales, without any engine."""
    net = Net().to(torch.bfloat16)
    sums = {name: torch.zeros_like(parameter.float()) for name, parameter in net.named_parameters()}
    losses = []
    for x in inputs:
        loss = net(x)
        loss.backward()
        losses.append(loss.item())
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.float()
        net.zero_grad()
    return losses, sums, [state for each in linears(net) for state in (each.scale, each.amax)]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("count", [1, 3])
@on_ranks(1, 2)
def test_bits_and_memory(rank: int, flag: bool, count: int) -> None:
    losses, sums, states = unsharded(batches(count))
    with transformer_engine_linear():
        model: Any = shard(Net(), by_class(nn.Sequential), precision=BF16, optimize_backward_concat=flag)
        for x, expected in zip(microbatches(model, batches(count)), losses, strict=True):
            loss = model(x)
            assert [each.saved_bytes for each in linears(model)] == [0, 0, 0]
            loss.backward()
            assert loss.item() == expected
    found = [state for each in linears(model) for state in (each.scale, each.amax)]
    assert all(map(torch.equal, found, states))
    assert_equal(whole_grads(model), sums)


@on_ranks(2)
def test_parameters_that_stay_keep_what_is_made_of_them(rank: int) -> None:
    with transformer_engine_linear():
        model: Any = shard(Net(), by_class(nn.Sequential), precision=BF16, reshard_after_forward=False)
        for index, x in enumerate(microbatches(model, batches(2))):
            loss = model(x)
            assert [each.saved_bytes for each in linears(model)] == [2 * SIZE * SIZE] * 3, index
            loss.backward()


@on_ranks(2)
def test_two_forwards_before_their_backwards(rank: int) -> None:
    """Each is made again with its own scale."""
    first, second = batches(2)
    net = Net().to(torch.bfloat16)
    (net(first) + net(second)).backward()
    with transformer_engine_linear():
        model: Any = shard(Net(), by_class(nn.Sequential), precision=BF16)
        losses = [model(first), model(second)]
        assert [each.saved_bytes for each in linears(model)] == [0, 0, 0]
        sum(losses).backward()
    expected = {name: p.grad.float() for name, p in net.named_parameters()}
    torch.testing.assert_close(whole_grads(model), expected, rtol=1e-2, atol=1e-4)


@on_ranks(2)
def test_evaluations_and_dropped_graphs_leave_nothing(rank: int) -> None:
    with transformer_engine_linear():
        model: Any = shard(Net(), by_class(nn.Sequential), precision=BF16)
        with torch.no_grad():
            model(*batches(1))
        model(*batches(1))
        model(*batches(1)).backward()
    for layer in model.layers:
        layer.fsdp_state.derived.free()
        assert layer.fsdp_state.derived._freed == []


@on_ranks(2)
def test_dtypes_are_those_that_layers_compute_with() -> None:
    x = torch.randn(4, SIZE)
    with transformer_engine():
        model: Any = shard(Net(ScaledLinear), by_class(nn.Sequential), precision=BF16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        model(x).backward()
        layer = model.layers[0][0]
        assert layer.activation_dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"computes with weight in torch\.bfloat16; pass Precision"):
            layer.set_activation_dtype(x)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(layer)


# ---- layers that add their weight gradients themselves ---------------------------------------------------


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


class ForeignNet(nn.Module):
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
    model = shard(ForeignNet(fuses), by_class(Foreign), **options)
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
