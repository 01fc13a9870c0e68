"""Lifetimes of buffers: as late and as short as possible; and their contents."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Debug, Precision, Prefetch, by_class, microbatches, shard
from flatfsdp.engine.storage.state import ShardState
from flatfsdp.engine.whole.units import named_groups
from tests.support.meshes import REPLICATED
from tests.support.models import (
    FLAGS,
    Block,
    Net,
    RecomputedNet,
    build,
    data,
    each_policy,
    grads_of,
    plain_net,
    same,
    same_trace,
    train,
)
from tests.support.ranks import on_ranks


def groups(model: Any) -> list[Any]:
    return [group for _, group in named_groups(model)]


def unsharded(model: Any) -> list[bool]:
    """Whether each unit's full parameters are in memory, root first."""
    return [g.state.shard is not ShardState.SHARDED for g in groups(model)]


NONE, ROOT, ALL = [False] * 4, [True] + [False] * 3, [True] * 4


@FLAGS
@pytest.mark.parametrize(
    ("reshard", "expected"),
    [(True, [NONE, ROOT, NONE, ROOT, NONE]), (False, [NONE, ALL, ALL, ALL, NONE])],
    ids=["zero3", "zero2"],
)
@on_ranks(2)
def test_parameters_are_freed_as_the_policy_says_also_without_sync(
    rank: int, flag: bool, reshard: bool, expected: list[list[bool]]
) -> None:
    model = build(optimize_backward_concat=flag, reshard_after_forward=reshard)
    tokens = next(data(rank, 1, 1))[0]
    seen = []
    with torch.no_grad():
        model(tokens)
    seen.append(unsharded(model))
    for last in (False, True):
        model.set_is_last_backward(last)
        loss = model(tokens)
        seen.append(unsharded(model))
        loss.backward()
        seen.append(unsharded(model))
    assert seen == expected


@FLAGS
@on_ranks(2)
def test_a_unit_is_done_before_the_backward_of_the_one_below_begins(rank: int, flag: bool) -> None:
    """Records (units in memory, units with all gradients) whenever a block's first norm has its gradient."""
    model = build(optimize_backward_concat=flag)
    seen: list[tuple[int, int]] = []

    def count(*_: Any) -> None:
        landed = sum(m.fsdp_state.backward_done for m in (model, *model.blocks))
        seen.append((sum(unsharded(model)), landed))

    for block in model.blocks:
        block.norm.register_full_backward_hook(count)
    for batches in data(rank, 2, 1):
        seen.clear()
        model(batches[0]).backward()
    assert [resident for resident, _ in seen] == [3, 3, 2], "the root, this block and the next"
    assert [landed for _, landed in seen] in ([0, 1, 2], [1, 2, 3])


class Constant(nn.Module):
    """One parameter whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@FLAGS
def test_accumulation_in_fp32_keeps_the_last_one(flag: bool) -> None:
    """256 + 1 is 256 in bf16."""
    model = shard(Constant(), optimize_backward_concat=flag, precision=Precision(compute=torch.bfloat16))
    for gradient in microbatches(model, [256.0, 1.0]):
        model(torch.tensor(gradient)).backward()
    assert next(model.parameters()).grad == 257.0


def test_first_write_copies_so_that_negative_zero_survives() -> None:
    model = shard(Constant())
    model(torch.tensor(-0.0)).backward()
    assert torch.signbit(next(model.parameters()).grad)


def test_main_grad_views_alias_the_buffer_that_is_reduced() -> None:
    model = build()
    tokens = next(data(0, 1, 1))[0]
    with model.no_sync():
        model(tokens).backward()
    weight = model.head.weight
    assert weight.main_grad.shape == weight.shape
    assert weight.main_grad.dtype == torch.float32
    weight.get_main_grad().fill_(700.0)
    model(tokens).backward()
    assert weight.main_grad is None
    assert (dict(model.named_parameters())["head.weight"].grad > 600.0).all()


FORWARD, BACKWARD = ["root", "blocks.0", "blocks.1", "blocks.2"], ["blocks.2", "blocks.1", "blocks.0"]


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_each_unit_is_gathered_once_each_way_whatever_the_prefetch(
    rank: int, depth: int, use_checkpoint: bool
) -> None:
    """Names of the units in the order in which their gathers start, second step only."""
    model = build(prefetch=Prefetch(depth, depth), debug=Debug(poison_on_free=True))
    if use_checkpoint:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    started: list[str] = []
    for group in groups(model):
        gather = group.gather

        def spy(gather: Any = gather, group: Any = group) -> None:
            started.append(group.name)
            gather()

        group.gather = spy
    for step, batches in enumerate(data(rank, 2, 1)):
        if step == 1:
            started.clear()
        model(batches[0]).backward()
        model.zero_grad()
    assert started == FORWARD + BACKWARD


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_prefetch_depth_is_the_number_of_units_ahead(rank: int, depth: int) -> None:
    """Units in memory in the second step, while the first block runs forward and the last one backward."""
    model = build(prefetch=Prefetch(depth, depth))
    counts = {}

    def count(phase: str, *_: Any) -> None:
        counts[phase] = sum(unsharded(model))

    model.blocks[0].register_forward_hook(partial(count, "forward"))
    model.blocks[2].down.register_full_backward_hook(partial(count, "backward"))
    for batches in data(rank, 2, 1):
        model(batches[0]).backward()
    assert counts == {"forward": 2 + depth, "backward": 2 + depth}


@FLAGS
@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {}, REPLICATED], ids=str)
@on_ranks(2)
def test_an_update_reaches_weights_that_are_still_gathered(rank: int, options: Any, flag: bool) -> None:
    """A forward whose backward never comes keeps gathered weights; after an update they must not be used."""
    model = build(optimize_backward_concat=flag, **options)
    tokens = next(data(rank, 1, 1))[0]
    model(tokens)
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(0.5)
    plain = Net()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens), plain(tokens))


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class HidesItsOutput(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x))


class OpaqueNet(Net):
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x = x.value if isinstance(x, Opaque) else x
        return self.head(x)


@FLAGS
@on_ranks(2)
def test_a_unit_whose_output_cannot_be_hooked_stays_until_the_backward_is_over(rank: int, flag: bool) -> None:
    grads = []
    for block in (Block, HidesItsOutput):
        net = plain_net(OpaqueNet)
        for b in net.blocks:
            b.__class__ = block
        model = shard(net, by_class(Block), optimize_backward_concat=flag)
        model(next(data(rank, 1, 1))[0]).backward()
        assert unsharded(model) == NONE
        grads.append(grads_of(model))
    assert same(*grads)


class OpaqueResult(Net):
    def forward(self, tokens: torch.Tensor) -> Any:
        return type("Output", (), {"loss": super().forward(tokens)})()


@on_ranks(2)
def test_an_opaque_output_of_the_root_can_be_differentiated(rank: int) -> None:
    tokens = next(data(rank, 1, 1))[0]
    grads = []
    for net in (Net, OpaqueResult):
        model = shard(plain_net(net), by_class(Block), debug=Debug(poison_on_free=True))
        output = model(tokens)
        (output if net is Net else output.loss).backward()
        grads.append(grads_of(model))
    assert same(*grads)


@FLAGS
def test_a_model_that_is_dropped_frees_its_buffers(flag: bool) -> None:
    model = build(optimize_backward_concat=flag)
    model(next(data(0, 1, 1))[0]).backward()
    group = weakref.ref(groups(model)[0])
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert group() is None
    assert parameter() is None


# ---- parameters stay until the last gradient that needs them is there ------------------------------------


class DetachedUse(nn.Module):
    """All gradients of the weight land before the input's gradient, which needs the weight, is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.detach() + torch.ones_like(x) * self.weight


class FrozenBelow(nn.Module):
    """A frozen layer under a trained one, called on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(x)))


class Twice(nn.Module):
    def __init__(self, unit: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.unit = unit
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for _ in range(2):
            y = checkpoint(self.unit, y, use_reentrant=True) if self.recompute else self.unit(y)
        return (y * self.unit(self.first(-x))).square().mean()


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("unit", [DetachedUse, FrozenBelow])
@on_ranks(2)
def test_parameters_stay_until_the_gradients_of_the_inputs_are_there(
    unit: Any, recompute: bool, poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=poison)}
    torch.manual_seed(0)
    plain = Twice(unit(), recompute)
    sharded = copy.deepcopy(plain)
    sharded.unit = shard(sharded.unit, **options)
    model = shard(sharded, **options)
    x = torch.randn(4, 8)
    model(x).backward()
    plain(x).backward()
    for each in (model, plain):
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


class FrozenBetween(nn.Module):
    """A unit around a unit: its frozen layer is needed after its trained one has landed."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner = shard(nn.Linear(4, 4), **options)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.inner(x))).sum()


@FLAGS
@pytest.mark.parametrize("poison", [False, True])
@on_ranks(2)
def test_a_frozen_layer_between_units_stays_for_the_gradient_of_what_it_took(
    poison: bool, flag: bool
) -> None:
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=poison)}
    torch.manual_seed(0)
    model = shard(FrozenBetween(options), **options)
    model(torch.ones(2, 4)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@FLAGS
@on_ranks(2)
def test_reentrant_recomputation_frees_each_unit_after_its_backward(rank: int, flag: bool) -> None:
    """Units in memory when each block's norm has its gradient, with reentrant recomputation around blocks."""
    model: Any = shard(RecomputedNet(reentrant=True), by_class(Block), optimize_backward_concat=flag)
    seen: list[int] = []
    units = [m.fsdp_state for m in (model, *model.blocks)]

    def count(*_: Any) -> None:
        seen.append(sum(not unit.is_sharded for unit in units))

    for block in model.blocks:
        block.norm.register_full_backward_hook(count)
    for (tokens,) in data(rank, 2, 1):
        seen.clear()
        model(tokens).backward()
    assert seen == [2, 2, 2], "the root and the block itself"


# ---- recomputation ---------------------------------------------------------------------------------------


@each_policy
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("around", [False, True], ids=["inside the unit", "around the unit"])
@on_ranks(2)
def test_recomputation_changes_nothing(rank: int, around: bool, reentrant: bool, policy: Any) -> None:
    nets = (plain_net(net) for net in (Net, partial(RecomputedNet, reentrant, around)))
    models = (shard(net, by_class(Block), **policy) for net in nets)
    result = same_trace(*(train(model, rank, steps=2, count=2) for model in models))
    assert all(result.values()), result


class InsideAndOutside(nn.Module):
    """One layer, used plainly and inside a reentrant checkpoint, in either order."""

    def __init__(self, recompute: tuple[bool, bool]) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for recompute in self.recompute:
            x = (checkpoint(self.layer, x, use_reentrant=True) if recompute else self.layer(x)).tanh()
        return self.head(x).sum()


@pytest.mark.parametrize("recompute", [(False, True), (True, False), (True, True)])
@on_ranks(2)
def test_a_layer_inside_and_outside_a_checkpoint_is_reduced_once(rank: int, recompute: Any) -> None:
    grads, reductions = [], []
    for flag in (False, True):
        torch.manual_seed(0)
        model = shard(InsideAndOutside(recompute), optimize_backward_concat=flag)
        torch.manual_seed(rank)
        model(torch.randn(3, 5)).backward()
        grads.append(grads_of(model))
        reductions.append(model.fsdp_state.shared.ledger.calls["reduce"])
    assert same(*grads)
    assert reductions == [1, 1], "what a nested backward brings does not count as the outer one's"
