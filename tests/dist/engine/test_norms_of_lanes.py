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
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import VOCAB, Block, backward, build, plain_net, update, whole_grads
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks

STEPS, SMALL = 3, 0.05
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}
FLAG_OFF = {"optimize_backward_concat": False}
SHARDED = {
    "1 rank": (1, {}),
    "2 ranks": (2, {"reshard_after_forward": False}),
    "3 ranks, flag off": (3, FLAG_OFF),
    "4 ranks": (4, {}),
    "6 ranks": (6, FLAG_OFF),
    "2 replicas": (2, REPLICATED),
}
IN_BLOCKS = {
    **{name: SHARDED[name] for name in ("1 rank", "2 ranks", "6 ranks", "2 replicas")},
    "2 x 2": (4, HYBRID),
    "2 x 2, flag off": (4, {**HYBRID, **FLAG_OFF}),
}
Layouts = dict[str, tuple[int, dict[str, Any]]]


def accumulated(model: Any, lanes: Lanes, step: int) -> None:
    """The gradient of a step, the same on any number of ranks."""
    numbers = lanes.microbatches(model.fsdp_state.grid, lanes.number)
    generators = [torch.Generator().manual_seed(1000 * step + number) for number in numbers]
    backward(model, [torch.randint(0, VOCAB, (2, 7), generator=each) for each in generators])


def clipped_by_engine(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    return torch.optim.AdamW(model.parameters(), lr=1e-2), model.clip_grad_norm_


def clipped_by_torch(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clipped_in_the_step(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = AdamW(param_groups(model, [NO_DECAY]), lr=1e-2, max_grad_norm=SMALL)
    return optimizer, lambda max_norm: None


WAYS = [clipped_by_engine, clipped_by_torch, clipped_in_the_step]


def trained(rank: int, world_size: int, lanes: Lanes, options: dict[str, Any]) -> dict[str, Tensor]:
    """Norms, and whole weights after some steps, of each way to clip."""
    found = {}
    for way in WAYS:
        model = build(lanes=lanes, **options)
        optimizer, clip = way(model)
        for step in range(STEPS):
            accumulated(model, lanes, step)
            norm = clip(SMALL)
            update(optimizer)
            found[f"{way.__name__}: norm of step {step}"] = optimizer.grad_norm if norm is None else norm
        found |= {f"{way.__name__}: {name}": value for name, value in model.state_dict().items()}
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(
    ("lanes", "layouts"), [(Lanes(12), SHARDED), (Lanes(12, block=2), IN_BLOCKS)], ids=["lanes", "in blocks"]
)
def test_clipped_training_has_the_same_bits_on_any_number_of_ranks(lanes: Lanes, layouts: Layouts) -> None:
    expected: dict[str, Tensor] = {}
    for name, (world_size, options) in layouts.items():
        found = run_ranks(world_size, trained, lanes, options)
        expected = expected or found[0]
        assert [differing(each, expected) for each in found] == [[]] * world_size, name
    norms = [value for name, value in expected.items() if "norm of step" in name]
    assert len(norms) == STEPS * len(WAYS) and min(norms) > 2 * SMALL


ORDERS = [1.0, 2.0, 3.0, torch.inf]


def norms(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    """Norms of the model and of each parameter; and those of the model that are not taken in pieces.

    All are checked against those of whole gradients in FP64.
    """
    model, lanes = build(lanes=12), Lanes(12)
    found, not_in_pieces = {}, []

    def check(norm: Tensor, wholes: list[Tensor], order: float) -> Tensor:
        exact = torch.linalg.vector_norm(torch.cat([whole.flatten() for whole in wholes]), order)
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        return norm

    for step in range(STEPS):
        accumulated(model, lanes, step)
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
    for world_size in (1, 2, 3, 4, 6):
        for found, not_in_pieces in run_ranks(world_size, norms):
            expected = expected or found
            assert differing(found, expected) == []
            without.add(tuple(not_in_pieces))
    assert len(without) > 1


@on_ranks(1, 3)
def test_the_norm_does_not_depend_on_how_parameters_are_grouped(rank: int, world_size: int) -> None:
    """Nor on whether parameters have parts of one gradient, or gradients in memory of their own."""
    lanes = Lanes(12)
    by_name = {"params": lambda name, shape: "up" in name or "head" in name}
    found = set()
    for groups in (None, [NO_DECAY], [by_name], [by_name, NO_DECAY]):
        for is_own in (False, True):
            model = build(lanes=lanes)
            accumulated(model, lanes, 0)
            for parameter in model.parameters() if is_own else ():
                parameter.grad = parameter.grad * 1.0
            optimizer = AdamW(
                model.parameters() if groups is None else param_groups(model, groups), max_grad_norm=1.0
            )
            found.add(model.clip_grad_norm_(1e9).item())
            optimizer.step()
            assert optimizer.grad_norm is not None
            found.add(optimizer.grad_norm.item())
    make = partial(make_unit, lists_flat=True)
    model = make_units(plain_net(), by_class(Block), make, {"precision": Precision(), "lanes": lanes})
    accumulated(model, lanes, 0)
    optimizer = AdamW([group.master.flat for _, group in named_groups(model)], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm is not None
    assert found == {optimizer.grad_norm.item()}


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@on_ranks(1, 3)
def test_what_is_not_finite_on_one_rank_shows_on_all(rank: int, world_size: int, value: float) -> None:
    lanes = Lanes(6)
    model = build(lanes=lanes)
    accumulated(model, lanes, 0)
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
