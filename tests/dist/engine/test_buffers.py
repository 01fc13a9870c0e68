"""Lifetimes of buffers: as late and as short as possible; and their contents."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import Debug, Precision, Prefetch, by_class, microbatches, shard
from flatfsdp.engine.storage.state import ShardState
from flatfsdp.engine.whole.units import named_groups
from tests.support.meshes import REPLICATED
from tests.support.models import FLAGS, Block, Net, backward, build, data, grads_of, plain_net, same
from tests.support.ranks import on_ranks


def groups(model: Any) -> list[Any]:
    return [group for _, group in named_groups(model)]


def allocated_grads(model: Any) -> int:
    return sum(group.main_grad.holds_gradients for group in groups(model))


def unsharded(model: Any) -> list[bool]:
    """Whether each unit's full parameters are in memory, root first."""
    return [g.state.shard is not ShardState.SHARDED for g in groups(model)]


@FLAGS
@on_ranks(2)
def test_the_fp32_buffer_lives_from_first_gradient_to_reduction(rank: int, flag: bool) -> None:
    model = build(optimize_backward_concat=flag)
    assert allocated_grads(model) == 0, "after construction"
    tokens = next(data(rank, 1, 1))[0]
    with torch.no_grad():
        model(tokens)
    assert allocated_grads(model) == 0, "after an eval forward"
    model.state_dict()
    assert allocated_grads(model) == 0, "after state_dict"
    loss = model(tokens)
    assert allocated_grads(model) == 0, "after a training forward"
    with model.no_sync():
        loss.backward()
    assert allocated_grads(model) == 4, "between microbatches"
    model(tokens).backward()
    assert allocated_grads(model) == 0, "after the reducing backward"


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


@pytest.mark.parametrize(
    ("reshard", "count", "calls"), [(True, 1, 7), (True, 4, 28), (False, 1, 4), (False, 4, 4)]
)
@on_ranks(2)
def test_number_of_collectives(rank: int, reshard: bool, count: int, calls: int) -> None:
    """Root gathered once a microbatch, inner units twice (ZeRO-3), or all once a step; each reduced once."""
    model = build(reshard_after_forward=reshard)
    backward(model, next(data(rank, 1, count)))
    counted = dict(model.fsdp_state.shared.ledger.calls)
    assert (counted["gather"], counted["reduce"]) == (calls, 4)


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


@FLAGS
@on_ranks(2)
def test_a_sharded_parameter_reads_as_nan(rank: int, flag: bool) -> None:
    """Reading a parameter whose memory is gone must not crash the process."""
    model = build(optimize_backward_concat=flag, reshard_after_forward=False)
    tokens = next(data(rank, 1, 1))[0]
    weight = model.blocks[0].up.weight
    assert weight.shape == (60, 20)
    assert weight.isnan().all()
    assert "nan" in repr(weight)
    model(tokens)
    assert not model.blocks[0].up.weight.isnan().any(), "kept after forward"


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
