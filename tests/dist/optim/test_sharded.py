"""`flatfsdp.optim` over sharded models: clipping over all ranks, parts, checkpoints by original names."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, checkpoint, microbatches, param_groups, shard
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import autocast
from flatfsdp.optim import AdamW
from tests.support.meshes import replicating
from tests.support.models import Block, Net, build, data, plain_net, same, update
from tests.support.ranks import on_ranks, run_ranks
from tests.support.stored_weights import RECIPE, batches
from tests.support.stored_weights import build as build_fp8

BF16 = torch.bfloat16
NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}


def backward(model: Any, rank: int, seed: int) -> None:
    ((tokens,),) = data(rank + 10 * seed, 1, 1)
    model(tokens).backward()


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for seed in steps:
        backward(model, rank, seed)
        update(optimizer)


def values(model: Any) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def equal(a: Any, b: Any) -> bool:
    """Whatever the order of keys."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


# ---- clipping -------------------------------------------------------------------------------------------


@on_ranks(3)
def test_local_shards_and_units_with_ranks_of_their_own(rank: int, world_size: int) -> None:
    """A rank may have nothing of a group, and units different ranks; the norm is that of all, as without."""
    net, plain = (plain_net(partial(Net, 2)) for _ in range(2))
    net.blocks[0] = shard(net.blocks[0], mesh=replicating())
    model = shard(net, by_class(Block))
    groups = param_groups(model, [NO_DECAY, {"params": ["head.weight"], "lr": 3e-2}])
    optimizer = AdamW(groups, lr=1e-2, weight_decay=0.5, max_grad_norm=0.3)
    decayed = [p for name, p in plain.named_parameters() if p.dim() >= 2 and name != "head.weight"]
    rest = [p for p in plain.parameters() if p.dim() < 2]
    reference = torch.optim.AdamW(
        [
            {"params": rest, "weight_decay": 0.0},
            {"params": [plain.head.weight], "lr": 3e-2},
            {"params": decayed},
        ],
        lr=1e-2,
        weight_decay=0.5,
    )
    for seed in range(3):
        backward(model, rank, seed)
        of_model = model.clip_grad_norm_(1e9)
        update(optimizer)
        for other in range(world_size):
            ((tokens,),) = data(other + 10 * seed, 1, 1)
            (plain(tokens) / world_size).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        update(reference)
        for found in (of_model, optimizer.grad_norm):
            torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
    state = model.state_dict()
    torch.testing.assert_close(state, plain.state_dict(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_ordinary_parameters_beside_shards(rank: int) -> None:
    """A parameter that every rank has counts once in the norm."""
    model = build()
    extra = nn.Parameter(torch.ones(5))
    optimizer = AdamW([*model.parameters(), extra], max_grad_norm=1e9)
    backward(model, rank, 0)
    norm = model.clip_grad_norm_(1e9)
    extra.grad = torch.full((5,), 2.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, (norm.square() + 20.0).sqrt())


# ---- what the engine has no more to do ------------------------------------------------------------------


def check_ledger(model: Any, is_told: bool) -> None:
    """Checks the bytes of a step after an optimizer's, in which FP8 weights are cast: 4 + 1 bytes."""
    shards = {False: 0, True: 0}
    for _, group in named_groups(model):
        shards[group.layout.role is Role.FP8] += group.master.flat.numel()
    assert model.fsdp_state.shared.ledger.bytes["cast"] == 5 * shards[True] + (
        0 if is_told else 6 * shards[False]
    )
    assert (model.fsdp_state.shared.ledger.bytes["measure"] == 0) == is_told


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@on_ranks(1, 3)
def test_the_optimizer_writes_what_the_engine_would(rank: int, reshard: bool, grouped: bool) -> None:
    """Copies and amaxes by the optimizer, against those that the engine takes when it is not told of them."""
    options = {"reshard_after_forward": reshard}
    results = []
    for is_told in (True, False):
        model = build_fp8(True, BF16, **options)
        groups: Any = param_groups(model, [NO_DECAY]) if grouped else [{"params": list(model.parameters())}]
        if not is_told:
            for parameter in (p for group in groups for p in group["params"]):
                del parameter.flat_shard, parameter.viewed_shard
        nonfinite: Any = "raise" if is_told else "step"
        optimizer, losses = AdamW(groups, lr=0.05, nonfinite=nonfinite), []
        for index, batch in enumerate(batches(rank, 3, 2)):
            for x in microbatches(model, batch):
                with autocast(recipe=RECIPE):
                    loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            if index > 0:
                check_ledger(model, is_told)
            model.fsdp_state.shared.ledger.reset()
            update(optimizer)
        results.append([*losses, *values(model)])
    assert same(*results)


@on_ranks(2)
def test_gradients_of_another_dtype(rank: int) -> None:
    """Gradients in `.main_grad` give the same results as their FP32 values in `.grad`."""
    precision = Precision(compute=BF16, grad=BF16)
    ours, theirs = (build(precision=precision) for _ in range(2))
    optimizer, reference = AdamW(ours.parameters(), lr=1e-2), AdamW(theirs.parameters(), lr=1e-2)
    for seed in range(3):
        for model in (ours, theirs):
            backward(model, rank, seed)
        for parameter in theirs.parameters():
            parameter.grad, parameter.main_grad = parameter.main_grad.float(), None
        update(optimizer, reference)
        assert all(parameter.main_grad is None for parameter in ours.parameters())
    assert same(list(ours.parameters()), list(theirs.parameters()))


# ---- checkpoints ----------------------------------------------------------------------------------------


def optimizer_of(model: Any, moment_dtype: torch.dtype | None = None) -> AdamW:
    groups = param_groups(model, [NO_DECAY])
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "max_grad_norm": 0.3}
    return AdamW(groups, **options, moment_dtype=moment_dtype)


@pytest.mark.parametrize("moment_dtype", [None, BF16], ids=str)
@pytest.mark.parametrize("form", ["full", "sharded", "of this rank"])
@on_ranks(2)
def test_training_goes_on_as_if_never_stopped(
    rank: int, tmp_path: Path, moment_dtype: torch.dtype | None, form: str
) -> None:
    """Three steps, saved, three more; and the same three after loading into a new model."""
    model = build()
    optimizer = optimizer_of(model, moment_dtype)
    train(model, optimizer, rank, range(3))
    if form == "sharded":
        checkpoint.save(tmp_path, model, optimizer)
    saved = copy.deepcopy(
        (
            checkpoint.full_state_dict(model),
            checkpoint.full_optimizer_state_dict(model, optimizer),
            optimizer.state_dict(),
        )
    )
    train(model, optimizer, rank, range(3, 6))
    again = build(seed=1)
    other = optimizer_of(again, moment_dtype)
    if form == "sharded":
        checkpoint.load(tmp_path, again, other)
    else:
        checkpoint.load_full_state_dict(again, saved[0])
        if form == "full":
            checkpoint.load_full_optimizer_state_dict(again, other, saved[1])
        else:
            other.load_state_dict(saved[2])
    train(again, other, rank, range(3, 6))
    assert equal(values(again), values(model))
    ours = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert equal(checkpoint.full_optimizer_state_dict(again, other), ours)
    moments = {v.dtype for state in other.state.values() for v in state.values() if v.dim()}
    assert moments == {moment_dtype or torch.float32}


def save(rank: int, world_size: int, folder: str) -> None:
    model = build()
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, range(2))
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")


def load(rank: int, world_size: int, folder: str) -> bool:
    model = build(seed=1)
    optimizer = optimizer_of(model)
    checkpoint.load(f"{folder}/sharded", model, optimizer)
    return equal(checkpoint.full_optimizer_state_dict(model, optimizer), torch.load(f"{folder}/full.pt"))


def test_saved_by_three_ranks_loaded_by_one_and_two(tmp_path: Path) -> None:
    run_ranks(3, save, str(tmp_path))
    for world_size in (1, 2):
        assert all(run_ranks(world_size, load, str(tmp_path)))
