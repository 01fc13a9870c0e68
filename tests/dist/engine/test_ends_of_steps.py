"""What is left where a step, a backward or a model's first use ends early, twice, or inside of a hook."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Precision, microbatches, shard
from flatfsdp.engine.replay.eager_or_replayed import keep_addresses
from flatfsdp.engine.step import root as roots
from flatfsdp.engine.storage.main_grad import SMALL
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import root_of
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.layers import Linear
from tests.support.ranks import on_ranks

WIDTH = 272
assert WIDTH**2 > SMALL


class Twice(nn.Module):
    """A layer inside a reentrant checkpoint, whose backward is nested, and once more outside."""

    def __init__(self) -> None:
        super().__init__()
        # Wide, so that the gradient is added as it lands: smaller ones wait for each other.
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        inside = checkpoint(self.layer, self.first(x), use_reentrant=True)
        return self.layer(inside)


class Idle(nn.Module):
    """A module with a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


def require_gradients_of(expected: nn.Module, model: nn.Module) -> None:
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None and reference.grad is not None
        # A single rank has all elements, in the order of the parameter.
        torch.testing.assert_close(plain(parameter.grad), reference.grad.flatten())


@pytest.mark.parametrize("keeps", [None, False, True], ids=["nothing", "gradients", "gradients and sums"])
def test_a_unit_that_is_reduced_twice_in_a_backward_has_both_gradients(keeps: bool | None) -> None:
    torch.manual_seed(0)
    expected, x, hooks = Twice(), torch.randn(3, WIDTH), []
    model = copy.deepcopy(expected)
    shard(model.layer)
    shard(model.first)
    shard(model)
    if keeps is not None:
        # As `replayed` does before its first microbatch.
        keep_addresses(root_of(model), of_sums=keeps)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooks.append)
    expected(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    require_gradients_of(expected, model)
    assert len(hooks) == len(list(model.parameters()))


@on_ranks(1, 2)
def test_a_refused_gradient_is_not_added_to_the_next_step(rank: int) -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="was computed while its parameters were sharded"):
        (model[0].weight * 5).sum().backward()
    for batch in microbatches(model, [x]):
        model(batch).sum().backward()
    grads = [plain(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    # Each row of the weight's gradient is the sum of the inputs, each element of the bias's their number.
    assert grads and all(torch.equal(grad, torch.full_like(grad, 2.0)) for grad in grads)


@pytest.mark.parametrize("count", [1, 2])
def test_hooks_step_optimizers_while_a_parameter_idles(count: int) -> None:
    model = shard(Idle())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()

    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        for batch in microbatches(model, [torch.ones(2, 4)] * count):
            model(batch).sum().backward()
    after = [parameter.detach() for parameter in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [True, True, False, False]
    assert root_of(model).microbatch.steps_reduced == 2


def test_a_first_use_that_fails_can_be_repeated() -> None:
    model = shard(nn.Linear(4, 4))
    with (
        mock.patch.object(roots, "make_equal", side_effect=RuntimeError("interrupted")),
        pytest.raises(RuntimeError, match="interrupted"),
    ):
        model(torch.ones(1, 4))
    assert torch.isfinite(model(torch.ones(1, 4))).all()


def test_a_pickled_parameter_takes_no_engine_along() -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = shard(nn.Sequential(Linear(32, 32)), precision=precision)
    model(torch.ones(32, 32)).sum().backward()
    weight = pickle.loads(pickle.dumps(model[0].weight))
    assert weight.shape == (32, 32)
    assert weight.fp8_operand is None and weight.claim_main_grad is None
