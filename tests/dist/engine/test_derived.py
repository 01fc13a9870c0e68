"""FP8 weights that Transformer Engine's layers save are freed with the parameters, and made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, microbatches, shard
from tests.support.against_plain import assert_equal
from tests.support.models import whole_grads
from tests.support.ranks import on_ranks
from tests.support.te_linear import QuantizedLinear, transformer_engine_linear

SIZE = 16
BF16 = Precision(compute=torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(QuantizedLinear(SIZE), nn.Tanh()) for _ in range(3))

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
