"""With lanes, norms of gradients have the same bits on any number of ranks, and so has clipped training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, microbatches, param_groups, shard
from flatfsdp.comm.lanes import Lanes
from flatfsdp.engine.api.shard import make_unit, make_units
from flatfsdp.engine.storage.optimizer_targets import ShardTarget
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.optim import AdamW
from tests.support.lanes import IN_BLOCKS, LAYOUTS, Layouts, assert_layouts_agree, differing, microbatch
from tests.support.models import Block, backward, build, plain_net, update, whole_grads
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks

LANES, SMALL = Lanes(12), 0.05
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}


def accumulated(model: Any, step: int = 0) -> None:
    """The gradient of a step, the same on any number of ranks."""
    backward(model, [microbatch(step, number) for number in model.microbatch_numbers(LANES.number)])


def trained(rank: int, world_size: int, lanes: Lanes, options: dict[str, Any]) -> dict[str, Tensor]:
    """Norms of steps, each of which is clipped in another way, and whole weights after them."""
    model = build(lanes=lanes, **options)
    torchs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = AdamW(param_groups(model, [NO_DECAY]), lr=1e-2, max_grad_norm=SMALL)
    found = {}
    for step, way in enumerate(("the engine", "PyTorch", "the step")):
        accumulated(model, step)
        if way == "the engine":
            norm = model.clip_grad_norm_(SMALL)
        elif way == "PyTorch":
            norm = nn.utils.clip_grad_norm_(model.parameters(), SMALL)
        update(ours if way == "the step" else torchs)
        found[f"norm by {way}"] = ours.grad_norm if way == "the step" else norm
    return {**found, **model.state_dict()}


@pytest.mark.parametrize(
    ("lanes", "layouts"), [(LANES, LAYOUTS), (Lanes(12, block=2), IN_BLOCKS)], ids=["lanes", "in blocks"]
)
def test_clipped_training_has_the_same_bits_on_any_number_of_ranks(lanes: Lanes, layouts: Layouts) -> None:
    found = assert_layouts_agree(layouts, trained, lanes)
    norms = [value for name, value in found.items() if name.startswith("norm by ")]
    assert len(norms) == 3 and min(norms) > 2 * SMALL


ORDERS = [1.0, 2.0, 3.0, torch.inf]


def norms(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    """Norms of the model and of each parameter; and those of the model that are not taken in pieces.

    All are checked against those of whole gradients in FP64.
    """
    model = build(lanes=LANES)
    found, not_in_pieces = {}, []

    def check(norm: Tensor, wholes: list[Tensor], order: float) -> Tensor:
        exact = torch.linalg.vector_norm(torch.cat([whole.flatten() for whole in wholes]), order)
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        return norm

    for step in range(2):
        accumulated(model, step)
        wholes = {name: grad.double() for name, grad in whole_grads(model).items()}
        for order in ORDERS:
            norm = check(model.clip_grad_norm_(1e9, order), [*wholes.values()], order)
            found[f"step {step}, order {order}"] = norm
            for name, parameter in model.named_parameters():
                norm = check(parameter.grad.norm(order), [wholes[name]], order)
                found[f"step {step}, order {order}, {name}"] = norm
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardTarget, "pieces", None)
            not_in_pieces.append(check(model.clip_grad_norm_(1e9), [*wholes.values()], 2.0).item())
        model.zero_grad()
    return found, not_in_pieces


def test_norms_have_the_same_bits_only_in_pieces() -> None:
    """Otherwise the norms of the same gradients depend on the number of ranks."""
    expected: dict[str, Tensor] = {}
    without = set()
    for world_size in (1, 2, 3, 4):
        for found, not_in_pieces in run_ranks(world_size, norms):
            expected = expected or found
            assert differing(found, expected) == []
            without.add(tuple(not_in_pieces))
    assert len(without) > 1


@on_ranks(1, 3)
def test_the_norm_does_not_depend_on_how_parameters_are_grouped(rank: int, world_size: int) -> None:
    """Nor on whether parameters have parts of one gradient, or gradients in memory of their own."""
    by_name = {"params": lambda name, shape: "up" in name or "head" in name}
    model = build(lanes=LANES)
    accumulated(model)
    found = set()
    for is_own in (False, True):
        for parameter in model.parameters() if is_own else ():
            parameter.grad = parameter.grad * 1.0
        found.add(model.clip_grad_norm_(1e9).item())
        for groups in ([], [NO_DECAY], [by_name], [by_name, NO_DECAY]):
            # Weights stay as they are.
            optimizer = AdamW(param_groups(model, groups), lr=0.0, max_grad_norm=1.0)
            optimizer.step()
            assert optimizer.grad_norm is not None
            found.add(optimizer.grad_norm.item())
    make = partial(make_unit, lists_flat=True)
    model = make_units(plain_net(), by_class(Block), make, {"precision": Precision(), "lanes": LANES})
    accumulated(model)
    optimizer = AdamW([group.master.flat for _, group in named_groups(model)], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert found == {optimizer.grad_norm.item()}


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@on_ranks(1, 3)
def test_what_is_not_finite_on_one_rank_shows_on_all(rank: int, world_size: int, value: float) -> None:
    model = build(lanes=LANES)
    accumulated(model)
    parameters = dict(model.named_parameters())
    part = plain(parameters["head.weight"].grad)
    if rank == [each > 0 for each in of_all_ranks(part.numel())].index(True):
        part[-1] = value
    for order in ORDERS:
        with pytest.raises(RuntimeError, match=f"the gradient norm is {value}"):
            model.clip_grad_norm_(1.0, order, error_if_nonfinite=True)
        norm = parameters["head.weight"].grad.norm(order)
        torch.testing.assert_close(norm, torch.tensor(value), equal_nan=True)
        assert parameters["head.bias"].grad.norm(order).isfinite()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0, nonfinite="skip")
    optimizer.step()
    assert optimizer.skipped_steps == 1


class WithEmpty(nn.Module):
    """A parameter without elements between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.empty, self.last = (nn.Parameter(torch.ones(n)) for n in (48, 0, 40))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first.sum() + 2 * self.last.sum() + self.empty.sum()) * x


@on_ranks(1, 2)
def test_a_parameter_without_elements_has_norm_zero(rank: int, world_size: int) -> None:
    model = shard(WithEmpty(), lanes=2)
    for x in microbatches(model, [torch.tensor(1.0)] * (2 // world_size)):
        model(x).backward()
    for order, total in ((2.0, (48 * 4 + 40 * 16) ** 0.5), (torch.inf, 4.0)):
        assert model.clip_grad_norm_(1e9, order) == pytest.approx(total)
        assert [parameter.grad.norm(order) == 0 for parameter in model.parameters()] == [False, True, False]
