"""FP8 state in the checkpoints of FlatFSDP: training goes on as the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp import Precision, by_class, checkpoint, shard
from flatfsdp.fp8 import DelayedScaling, autocast
from tests.support.fp8_layers import SHORT, Block, Stack, assert_same_state, fp8_state, seeded, snapshot
from tests.support.fp8_training import batch, build, same_on_all_ranks, train
from tests.support.models import same
from tests.support.ranks import on_ranks, run_ranks


def save_and_load(kind: str, model: Any, other: Any, folder: str) -> None:
    if kind == "full":
        other.load_state_dict(checkpoint.full_state_dict(model))
    elif kind == "from_rank0":
        state = checkpoint.full_state_dict(model, rank0_only=True, cpu_offload=True)
        checkpoint.load_full_state_dict(other, state, from_rank0=True)
    elif kind == "sharded":
        checkpoint.save(folder, model)
        checkpoint.load(folder, other)
    else:
        state = {key: value.clone() for key, value in checkpoint.local_state_dict(model).items()}
        checkpoint.load_local_state_dict(other, state)


KINDS = pytest.mark.parametrize("kind", ["full", "from_rank0", "sharded", "local"])


@KINDS
@pytest.mark.parametrize("into", [("", 4), ("same", 4), ("other-length", 4), ("", 2), ("", 9)])
@on_ranks(2)
def test_resume_is_the_uninterrupted_run(rank: int, kind: str, into: tuple[str, int], tmp_path: Path) -> None:
    """Into a model that has run or not, and with the same or another length of histories."""
    ran_before, length = into
    model, other = build(), build(seed=9, flag=False)
    train(model, rank, recipe=SHORT)
    if ran_before:
        train(other, rank, recipe=SHORT if ran_before == "same" else DelayedScaling(amax_history_len=11))
    save_and_load(kind, model, other, str(tmp_path))
    assert_same_state(snapshot(model), snapshot(other))
    recipe = DelayedScaling(amax_history_len=length)
    assert same(*(train(each, rank, start=2, recipe=recipe) for each in (model, other)))
    assert_same_state(snapshot(model), snapshot(other))


@KINDS
@on_ranks(2)
def test_a_checkpoint_without_fp8_state(rank: int, kind: str, tmp_path: Path) -> None:
    """Loads a checkpoint from before FP8 into a model that has run with it, and the other way round."""
    before, model = build(seed=9), build()
    before(batch(rank))
    train(model, rank)
    save_and_load(kind, before, model, str(tmp_path))
    state = before.state_dict()
    assert_same_state({k: v for k, v in model.state_dict().items() if k in state}, state)
    train(model, rank)
    assert same_on_all_ranks(list(fp8_state(model).values()))


@KINDS
@on_ranks(2)
def test_loading_drops_weights_that_were_cast_before(rank: int, kind: str, tmp_path: Path) -> None:
    model, other = build(), build(seed=9)
    train(model, rank)
    train(other, rank)
    save_and_load(kind, model, other, str(tmp_path))
    with pytest.raises(RuntimeError, match="is_first_microbatch=True"), autocast(recipe=SHORT):
        other(batch(rank), False)


def write(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model = build()
    train(model, rank)
    checkpoint.save(folder, model)
    return snapshot(model)


def read(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model = build(seed=9)
    checkpoint.load(folder, model)
    return snapshot(model)


def test_another_number_of_ranks_reads_what_two_have_written(tmp_path: Path) -> None:
    folder = str(tmp_path)
    written = run_ranks(2, write, folder)
    for found in (*run_ranks(1, read, folder), *run_ranks(3, read, folder)):
        assert_same_state(written[0], found)


@on_ranks(2)
def test_plain_and_wrapped_models_read_each_other(rank: int) -> None:
    """Loads into the plain model, and back into another wrapped one."""
    model = build()
    train(model, rank)
    plain, again = seeded(Stack, seed=9), build(seed=8)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad(), autocast(recipe=SHORT):
        assert torch.equal(plain(batch(rank)), model(batch(rank)))
    again.load_state_dict(plain.state_dict())
    assert same(*(train(each, rank, start=2) for each in (model, again)))
    before = fp8_state(plain)
    rewrapped = shard(plain, by_class(Block), precision=Precision(buffer=torch.bfloat16))
    assert_same_state(fp8_state(rewrapped), before)
