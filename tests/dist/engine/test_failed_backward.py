"""A backward that raises leaves none of its amaxes: they would hold back scales as long as the history."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import shard
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import Linear
from tests.support.ranks import on_ranks

WIDTH = 32


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, error: type[Exception] | None) -> Tensor:
        ctx.error = error  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.error is not None:  # type: ignore[attr-defined]
            raise ctx.error  # type: ignore[attr-defined]
        return grad, None


class Net(nn.Module):
    error: type[Exception] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(Fails.apply(torch.tanh(self.first(x)), self.error))
        return y


def scales(factor: float | None) -> list[Tensor]:
    """Gradient scales of the last layer after each good step; step 1 fails, with its gradient times `factor`.

    Gradients grow from step to step.
    """
    torch.manual_seed(0)
    model, found = shard(Net()), []
    for step in range(5):
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
        model.error = ZeroDivisionError if step == 1 else None
        if step == 1 and factor is None:
            continue
        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            y = model(x)
        if step == 1:
            with pytest.raises(ZeroDivisionError):
                (y.square().mean() * factor).backward()
        else:
            (y.square().mean() * 4.0**step).backward()
            found.append(model.last.fp8_backward_scale.clone())
        model.zero_grad()
    return found


@on_ranks(1)
def test_amaxes_of_good_steps_before_stay(rank: int) -> None:
    """One region around three steps, whose scales move at its end; the second fails."""
    torch.manual_seed(0)
    model, x = shard(Net()), torch.randn(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        for factor, error in ((100.0, None), (1.0, ZeroDivisionError), (1.0, None)):
            model.error = error
            y = model(factor * x)
            with nullcontext() if error is None else pytest.raises(error):
                y.square().mean().backward()
            if error is None:
                optimizer.step()
            optimizer.zero_grad()
    assert model.first.fp8_forward_amax_history[-1, 0] == 100 * x.abs().max()


@pytest.mark.parametrize("factor", [1e30, float("nan")])
@on_ranks(1)
def test_scales_are_those_of_a_training_without_it(factor: float) -> None:
    assert all(map(torch.equal, scales(factor), scales(None)))
