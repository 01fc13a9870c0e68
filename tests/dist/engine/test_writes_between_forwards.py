"""A write to a sharded module's attribute between forwards raises at the next use, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import by_class, shard
from tests.support.models import FLAGS, Block, build, data
from tests.support.ranks import on_ranks

MESSAGE = r"blocks\.0\.up\.weight.* was written to as an attribute.*summon_full_params"


def write_through_data(weight: Tensor) -> None:
    weight.data[0].zero_()


def give_other_data(weight: Tensor) -> None:
    weight.data = torch.ones(weight.shape)


def fill_in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.fill_(1.0)


COUNTED: list[Callable[[Tensor], Any]] = [
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.eye_,
    lambda weight: nn.init.constant_(weight, 0.5),
    give_other_data,
]
UNCOUNTED: list[Callable[[Tensor], Any]] = [
    lambda weight: weight.data.zero_(),
    lambda weight: weight.data.fill_(1.0),
    lambda weight: weight.detach().zero_(),
    lambda weight: torch._foreach_zero_([weight.data]),
    write_through_data,
    fill_in_inference_mode,
]


def model_of(**options: Any) -> tuple[Any, nn.Linear]:
    model = build(**options)
    layer = next(module for module in model.modules() if isinstance(module, Block)).up
    return model, layer


def tokens_of(rank: int) -> Tensor:
    return next(data(rank, 1, 1))[0]


@FLAGS
@on_ranks(1, 2)
def test_writes_raise_at_the_next_forward_and_nothing_is_lost(rank: int, world_size: int, flag: bool) -> None:
    model, layer = model_of(optimize_backward_concat=flag)
    loss = model(tokens_of(rank))
    for write in COUNTED + (UNCOUNTED if world_size > 1 else []):
        write(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            model(tokens_of(rank))
        with torch.no_grad():
            # The error comes once, and the write has changed nothing.
            assert world_size == 1 or torch.equal(model(tokens_of(rank)), loss)
        if world_size > 1:
            assert layer.weight.isnan().all()


@FLAGS
@on_ranks(1, 2)
def test_every_other_use_raises_too(rank: int, flag: bool) -> None:
    model, layer = model_of(optimize_backward_concat=flag)
    model(tokens_of(rank)).backward()

    def summon() -> None:
        with model.summon_full_params():
            pass

    def evaluate() -> None:
        with torch.no_grad():
            model(tokens_of(rank))

    def keep() -> None:
        with model.unsharded():
            pass

    for use in (evaluate, summon, keep, model.state_dict, lambda: model.clip_grad_norm_(1.0)):
        nn.init.zeros_(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            use()
        use()


@FLAGS
@on_ranks(2)
def test_a_write_between_forward_and_backward_raises(rank: int, flag: bool) -> None:
    for write in (*COUNTED, *UNCOUNTED):
        model, layer = model_of(optimize_backward_concat=flag)
        loss = model(tokens_of(rank))
        write(layer.weight)
        with pytest.raises(RuntimeError, match=MESSAGE):
            loss.backward()


class NormalizesItsWeight(nn.Linear):
    """A layer that gives its weight other memory in each forward, as face recognition does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


@FLAGS
@on_ranks(1, 2)
def test_other_memory_that_a_forward_gives_its_weight_raises(flag: bool) -> None:
    model = nn.Sequential(NormalizesItsWeight(4, 4), nn.ReLU())
    model = shard(model, by_class(NormalizesItsWeight), optimize_backward_concat=flag)
    with pytest.raises(RuntimeError, match=r"forward of unit 0 wrote in place to parameter 0\.weight"):
        model(torch.ones(2, 4))


@FLAGS
@on_ranks(2)
def test_reading_a_placeholder_is_no_write(rank: int, flag: bool) -> None:
    """Not even where PyTorch gives memory away that could be written to."""
    model, layer = model_of(optimize_backward_concat=flag)
    reads: list[Callable[[Tensor], Any]] = [repr, Tensor.data_ptr, Tensor.tolist, Tensor.norm, torch.clone]
    for read in (*reads, lambda weight: weight.detach().numpy()):
        read(layer.weight)
        model(tokens_of(rank)).backward()
        assert layer.weight.isnan().all()
    # ... and the next write is seen again.
    layer.weight.data.zero_()
    with pytest.raises(RuntimeError, match=MESSAGE):
        model(tokens_of(rank))
