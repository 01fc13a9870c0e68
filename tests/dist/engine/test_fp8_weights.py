"""Weights kept in FP8 in the flat buffer: the same bits as layers that cast their own, and fewer bytes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.copy_counter import CopyCounter, Kind
from flatfsdp import Precision, by_class, checkpoint, fp8, microbatches, shard
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import Linear
from flatfsdp.optim import AdamW
from tests.support.fp8_layers import Block, assert_same_state, seeded, snapshot
from tests.support.meshes import HYBRID, REPLICATED
from tests.support.models import each_policy, same, update
from tests.support.ranks import on_ranks
from tests.support.stored_weights import RECIPE, Net, batches, build, train

FP32, BF16 = torch.float32, torch.bfloat16


def groups_of(model: Any) -> list[Any]:
    return [group for _, group in named_groups(model)]


# ---- the same bits -----------------------------------------------------------------------------------------


def assert_same_runs(rank: int, *models: Any) -> None:
    """Trains all of them; losses and states are those of the first one."""
    runs = [(train(model, rank), snapshot(model)) for model in models]
    for losses, state in runs:
        assert same(losses, runs[0][0]) and all(loss.isfinite() for loss in losses)
        assert_same_state(runs[0][1], state)


@each_policy
@pytest.mark.parametrize("fuse", [False, True, "two_pass"])
@pytest.mark.parametrize("compute", [FP32, BF16], ids=["fp32", "bf16"])
@on_ranks(1, 2, 4)
def test_the_same_bits_as_layers_that_cast_their_own_weights(
    rank: int, compute: torch.dtype, fuse: Any, policy: dict[str, Any]
) -> None:
    """Shard boundaries may cut weights anywhere, most of all on four ranks."""
    assert_same_runs(rank, *(build(in_fp8, compute, fuse, **policy) for in_fp8 in (False, True)))


@pytest.mark.parametrize("sync", ["last", "every"])
@on_ranks(4)
def test_hybrid_sharding(rank: int, sync: str) -> None:
    options = {**HYBRID, "grad_sync": sync}
    assert_same_runs(rank, *(build(in_fp8, BF16, **options) for in_fp8 in (False, True)))


@on_ranks(2)
def test_recompute(rank: int) -> None:
    models = [build(in_fp8, BF16, True) for in_fp8 in (False, True, False, True)]
    for model in models[2:]:
        model.call = fp8.checkpoint
    assert_same_runs(rank, *models)


@on_ranks(2)
def test_other_tensors_may_have_delayed_scales(rank: int) -> None:
    """The weights keep scales of their own, whatever the recipe of the activations."""
    losses = train(build(True, BF16, True), rank, recipe=DelayedScaling(amax_history_len=4))
    assert all(loss.isfinite() for loss in losses)


# ---- bytes and collectives ---------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_one_byte_a_weight_is_gathered(rank: int, world_size: int) -> None:
    model = build(True, BF16, True, reshard_after_forward=False)
    train(model, rank, 1)
    model.fsdp_state.shared.ledger.reset()
    train(model, rank, 1)
    size = {Role.FP8: 1, Role.COMPUTE: 2}
    layouts = [group.layout for group in groups_of(model)]
    full = sum(layout.padded_numel(world_size) * size[layout.role] for layout in layouts)
    assert model.fsdp_state.shared.ledger.bytes["gather"] == full * (world_size - 1) // world_size
    weights = sum(slot.numel for layout in layouts if layout.role is Role.FP8 for slot in layout.slots)
    assert model.fsdp_state.shared.ledger.bytes["transpose"] == 2 * weights


@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@on_ranks(2)
def test_casts_once_a_step_and_one_collective_of_a_kind_a_unit(
    rank: int, world_size: int, reshard: bool
) -> None:
    model = build(True, BF16, True, reshard_after_forward=reshard)
    steps, count = 3, 2
    train(model, rank, steps, count)
    model.fsdp_state.shared.ledger.reset()
    train(model, rank, steps, count)
    padded = dict.fromkeys(Role, 0)
    for group in groups_of(model):
        padded[group.layout.role] += group.layout.padded_numel(world_size)
    units, gathers = len(model.fsdp_state.root.units), 2 * count if reshard else 1
    ledger = model.fsdp_state.shared.ledger
    shards = {role: numel // world_size for role, numel in padded.items()}
    assert ledger.bytes["cast"] == steps * (5 * shards[Role.FP8] + 6 * shards[Role.COMPUTE])
    assert ledger.calls["amax"] == steps
    assert ledger.calls["reduce"] == steps * units
    # The root keeps its own from forward to backward.
    assert ledger.calls["gather"] == steps * ((units - 1) * gathers + (count if reshard else 1))


class Matrices(nn.Module):
    """Weights larger than all activations, and nothing that is not stored in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(64, 256, bias=False, fuse_wgrad_accumulation=True)
        self.down = Linear(256, 64, bias=False, fuse_wgrad_accumulation=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


@on_ranks(2, 4)
def test_nothing_is_copied_in_or_out(world_size: int) -> None:
    net = seeded(lambda: nn.Sequential(Matrices(), Matrices(), Matrices()))
    precision = Precision(compute=BF16, fp8_weights=RECIPE)
    model = shard(net, by_class(Matrices), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    count = 2

    def step() -> None:
        for x in microbatches(model, [torch.randn(16, 64) for _ in range(count)]):
            with autocast(recipe=RECIPE):
                loss = model(x).float().square().mean()
            loss.backward()
        update(optimizer)

    step()
    with CopyCounter(min_numel=4096) as counter:
        step()
    # No copy in, no copy out: bytes move in the engine's casts and transposes, in the kernels of the layers,
    # and on the wire.
    assert [copy for copy in counter.copies if not copy.via and copy.kind is not Kind.STAGING] == []
    weights, units = 2 * 64 * 256, 3
    assert [c.payload for c in counter.collectives if c.name == "all_gather"] == [weights] * 2 * count * units
    assert [c.payload for c in counter.collectives if c.name == "reduce_scatter"] == [4 * weights] * units
    moved = Counter[str]()
    for copy in counter.copies:
        moved[copy.op] += copy.bytes
    assert moved["flatfsdp.cast_many_"] == (4 + 1) * units * weights // world_size
    assert moved["flatfsdp.transpose_many_"] == 2 * units * weights * count


# ---- state -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_frozen_weights(rank: int, world_size: int) -> None:
    """Frozen weights are cast once."""
    runs = []
    for in_fp8 in (False, True):
        net = seeded(Net)
        for block in net.blocks:
            for name, parameter in block.named_parameters():
                parameter.requires_grad = not name.endswith("weight")
        precision = Precision(compute=BF16, fp8_weights=RECIPE if in_fp8 else None)
        model = shard(net, by_class(Block), precision=precision)
        runs.append((train(model, rank), snapshot(model)))
        model.fsdp_state.shared.ledger.reset()
        train(model, rank, 1)
        # Frozen FP8 weights were cast in the first step.
        groups = [g for g in groups_of(model) if g.trains or g.operands.columnwise is None]
        per_element = {Role.FP8: 5 if in_fp8 else 6, Role.COMPUTE: 6}
        expected = sum(per_element[g.layout.role] * g.layout.shard_numel(world_size) for g in groups)
        assert model.fsdp_state.shared.ledger.bytes["cast"] == expected
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert_same_state(runs[0][1], runs[1][1])


@on_ranks(2)
def test_a_loaded_checkpoint_is_cast_anew(rank: int) -> None:
    model = build(True, BF16, True)
    train(model, rank)
    saved, local = snapshot(model), checkpoint.local_state_dict(model)
    local = {key: value.clone() for key, value in local.items()}
    expected = train(model, rank, 1)
    for load in ("full", "local"):
        other = build(True, BF16, True)
        train(other, rank, 1)
        if load == "full":
            other.load_state_dict(saved)
        else:
            checkpoint.load_local_state_dict(other, local)
        assert same(expected, train(other, rank, 1))


@on_ranks(2)
def test_summoned_parameters(rank: int) -> None:
    """Full parameters are those of the master, not of FP8; writes to them are cast again."""
    model, plain = build(True, BF16), build(False, BF16)
    for each in (model, plain):
        train(each, rank, 1)
        with each.summon_full_params(), torch.no_grad():
            for parameter in each.parameters():
                assert parameter.dtype == FP32
                parameter.mul_(3.0)
    assert all(torch.equal(a, b) for a, b in zip(train(model, rank), train(plain, rank), strict=True))


@on_ranks(1, 2)
def test_saved_tensors_may_be_offloaded(rank: int) -> None:
    """The transposes do not exist yet when the forward saves its tensors for backward."""
    runs = []
    for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        model = build(True, BF16, True)
        (x,) = next(batches(rank, 1, 1))
        x.requires_grad_()
        with hooks, autocast(recipe=RECIPE):
            loss = model(x).float().square().mean()
        loss.backward()
        runs.append(x.grad)
    assert runs[0] is not None and torch.equal(runs[0], runs[1])


@on_ranks(2)
def test_inference_mode_before_training(rank: int) -> None:
    """Scales of frozen weights are made once."""
    net = seeded(Net)
    for block in net.blocks:
        block.requires_grad_(False)
    precision = Precision(compute=BF16, fp8_weights=RECIPE)
    model = shard(net, by_class(Block), precision=precision)
    (x,) = next(batches(rank, 1, 1))
    with torch.inference_mode(), autocast(recipe=RECIPE):
        expected = model(x)
    with autocast(recipe=RECIPE):
        out = model(x.requires_grad_())
    out.float().square().mean().backward()
    assert torch.equal(out, expected) and x.grad is not None


@on_ranks(2)
def test_an_evaluation_with_other_weights_before_the_backward(rank: int) -> None:
    """An evaluation with other weights, which are put back, between a forward and its backward."""
    grads = []
    for swaps in (False, True):
        model = build(True, BF16, True)
        (x,) = next(batches(rank, 1, 1))
        with autocast(recipe=RECIPE):
            loss = model(x.requires_grad_()).float().square().mean()
        if swaps:
            kept = [flat.detach().clone() for flat in model.parameters()]
            with torch.no_grad(), autocast(recipe=RECIPE):
                # A write that is counted would be a change since the forward.
                for flat in model.parameters():
                    flat.data.mul_(37.0)
                model(x)
                for flat, before in zip(model.parameters(), kept, strict=True):
                    flat.data.copy_(before)
        loss.backward()
        grads.append(x.grad)
    assert grads[0] is not None and torch.equal(grads[0], grads[1])


@on_ranks(2)
def test_a_load_into_a_frozen_weight_of_one_rank() -> None:
    """Writes in place into a frozen weight that one rank holds; all ranks have to find out."""
    net = nn.Sequential(Linear(32, 32), Linear(32, 32))
    for name, parameter in net.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    model = shard(net, precision=Precision(compute=BF16, fp8_weights=RECIPE))
    x = torch.ones(16, 32)
    with autocast(recipe=RECIPE):
        before = model(x)
        state = checkpoint.sharded_state_dict(model)["0.weight"]
        with torch.no_grad():
            for each in state.local_shards():
                each.tensor.mul_(4.0)
        after = model(x)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, REPLICATED), (2, {})])
@on_ranks()
def test_transposes_are_freed_after_the_backward(rank: int, options: dict[str, Any]) -> None:
    model = build(True, BF16, True, **options)
    train(model, rank, 1)
    groups = [group for group in groups_of(model) if group.layout.role is Role.FP8]
    assert groups and not any(group.state.has_transposes for group in groups)


@pytest.mark.parametrize("blocks", [3, 5])
@on_ranks(2)
def test_memory_does_not_grow_with_the_number_of_blocks(rank: int, blocks: int) -> None:
    """Largest number of blocks' FP8 buffers, of both forms, in memory while a block runs, in a step.

    Those of the block that runs and the next one: bytes alone in forward, with their transposes in backward.
    """
    net = seeded(partial(Net, True, blocks=blocks))
    precision = Precision(compute=BF16, fp8_weights=RECIPE)
    model = shard(net, by_class(Block), precision=precision)
    groups = [
        group for block in net.blocks for group in block.fsdp_state.groups if group.layout.role is Role.FP8
    ]
    assert len(groups) == blocks
    most = Counter[str]()

    def note(phase: str, *_: Any) -> None:
        forms = [form.tensor for group in groups for form in (group.buffer, group.operands.columnwise)]
        most[phase] = max(most[phase], sum(form.untyped_storage().nbytes() > 0 for form in forms))

    for block in net.blocks:
        block.register_forward_hook(partial(note, "forward"))
        block.mlp.register_full_backward_hook(partial(note, "backward"))
    train(model, rank, 2, 2)
    assert most == {"forward": 2, "backward": 4}


@pytest.mark.parametrize("own", [True, False], ids=["our AdamW", "torch's"])
@on_ranks(2)
def test_resuming_from_a_sharded_checkpoint(rank: int, own: bool, tmp_path: Path) -> None:
    """A sharded checkpoint of model and optimizer; a unit has two flat parameters under one prefix."""
    make = AdamW if own else partial(torch.optim.AdamW, foreach=False)

    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
        (x,) = next(batches(rank + 10 * seed, 1, 1))
        with autocast(recipe=RECIPE):
            loss = model(x).float().square().mean()
        loss.backward()
        update(optimizer)
        return loss.detach()

    model = build(True, BF16, True)
    optimizer = make(model.parameters(), lr=0.05)
    for seed in range(2):
        step(model, optimizer, seed)
    checkpoint.save(tmp_path, model, optimizer)
    expected = [step(model, optimizer, seed) for seed in (2, 3)]
    other = build(True, BF16, True)
    other_optimizer = make(other.parameters(), lr=0.05)
    checkpoint.load(tmp_path, other, other_optimizer)
    losses = [step(other, other_optimizer, seed) for seed in (2, 3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, losses, strict=True))
    assert_same_state(snapshot(model), snapshot(other))
