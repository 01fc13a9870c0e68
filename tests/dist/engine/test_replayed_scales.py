"""Delayed scaling in replayed microbatches has the scales of eager ones, whichever layers run where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, microbatches, replayed, shard
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import Linear
from flatfsdp.optim import AdamW
from tests.support.ranks import on_ranks
from tests.support.tape import taped

WIDTH, HISTORY = 32, 4
RECIPE = DelayedScaling(amax_history_len=HISTORY)
Run = Callable[..., Tensor]


class Heads(nn.Module):
    """A layer that always runs, and two of which one does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, head: str) -> Tensor:
        y: Tensor = getattr(self, head)(torch.tanh(self.a(x)))
        return y


class Trained(NamedTuple):
    losses: list[Tensor]
    buffers: dict[str, Tensor]
    replays: int

    def has_bits_of(self, other: Trained) -> bool:
        return all(
            torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
            for a, b in zip(
                (*self.losses, *self.buffers.values()), (*other.losses, *other.buffers.values()), strict=True
            )
        )


def model_and_run(lanes: int | None = None) -> tuple[Any, Run]:
    torch.manual_seed(0)
    model = shard(Heads(), precision=Precision(compute=torch.float32), lanes=lanes)

    def run(x: Tensor, head: str, factor: Tensor) -> Tensor:
        with autocast(recipe=RECIPE):
            y = model(x, head)
        loss = (y.float().square() * factor).mean()
        loss.backward()
        return loss.detach()

    return model, run


def trained(replays: bool, steps: int, heads: Callable[[int], str], **options: Any) -> Trained:
    """Inputs grow from step to step, so that a stale scale shows.

    Args:
        heads: the heads of a step, one microbatch each; upper case outside of the replayed function.
        options: `bad`, steps whose loss is NaN; `second`, whether those outside have a replayed function of
            their own; `after`, what happens after each step; `make`, the optimizer; `lanes`, of the model.
    """
    bad, second = options.get("bad", ()), options.get("second", False)
    model, run = model_and_run(options.get("lanes"))
    optimizer = options.get("make", AdamW)(model.parameters(), lr=1e-2)
    step = replayed(model, run) if replays else run
    other = replayed(model, run) if replays and second else run
    generator, losses = torch.Generator().manual_seed(1), []
    for index in range(steps):
        batches = [(torch.randn(WIDTH, WIDTH, generator=generator) * 2.0**index, h) for h in heads(index)]
        factor = torch.tensor(float("nan") if index in bad else 1.0)
        for x, head in microbatches(model, batches):
            losses.append((other if head.isupper() else step)(x, head.lower(), factor))
        optimizer.step()
        optimizer.zero_grad()
        options.get("after", lambda *_: None)(index, model)
    buffers = {name: value for name, value in model.state_dict().items() if ".fp8_" in name}
    return Trained(losses, buffers, step.replays if replays else 0)


def compare(*args: Any, **options: Any) -> Trained:
    expected = trained(False, *args, **options)
    with taped():
        found = trained(True, *args, **options)
    assert found.has_bits_of(expected)
    assert found.replays > 0
    return found


LANES = pytest.mark.parametrize("lanes", [None, 1], ids=["without lanes", "one lane"])


@LANES
@pytest.mark.parametrize("second", [False, True], ids=["eager", "in another function"])
@on_ranks(1)
def test_a_layer_that_first_runs_elsewhere(second: bool, lanes: int | None) -> None:
    """It joins the memory of the others' scales, which moves."""
    compare(12, lambda index: "C" if index == 5 else "b", second=second, lanes=lanes)


@on_ranks(1)
def test_a_longer_history_is_loaded() -> None:
    """Scales move to new memory; PyTorch's optimizer has nothing of them."""

    def load(index: int, model: Any) -> None:
        if index == 5:
            state = {
                name: torch.cat([value, torch.zeros(2, value.shape[1])]).roll(2, 0) * 2**12
                if name.endswith("history")
                else value.clone()
                for name, value in model.state_dict().items()
            }
            model.load_state_dict(state)

    compare(12, lambda _: "b", after=load, make=torch.optim.AdamW)


def skipping(parameters: Any, **options: Any) -> AdamW:
    return AdamW(parameters, nonfinite="skip", **options)


@LANES
@on_ranks(1)
def test_a_skipped_step_restores_layers_that_only_later_microbatches_use(lanes: int | None) -> None:
    def check(index: int, model: Any) -> None:
        if index == 9:
            assert not any(value.isnan().any() for name, value in model.state_dict().items() if "fp8" in name)

    compare(12, lambda _: "bc", bad=(9,), make=skipping, after=check, lanes=lanes)


@on_ranks(1)
def test_a_lane_has_one_update_a_step() -> None:
    """Also where only an eager microbatch, or an earlier one, uses a layer."""
    found = compare(12, lambda index: ("bcb", "bBc", "cbb")[index // 4], lanes=1)
    # Inputs double from step to step, so the rows of different steps differ.
    latest = found.buffers["a.fp8_forward_amax_history"][1:, 0]
    assert latest.unique().numel() == HISTORY - 1


@pytest.mark.parametrize(("bad", "lanes"), [(1, None), (3, 1), (4, None), (4, 1), (5, 1)])
@on_ranks(1)
def test_first_steps_that_are_skipped(bad: int, lanes: int | None) -> None:
    """What was recorded while there were no scales is not replayed once there are."""
    compare(bad + 6, lambda _: "b", bad=range(bad), make=skipping, lanes=lanes)
