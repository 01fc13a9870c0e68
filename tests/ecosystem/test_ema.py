"""Moving averages of sharded weights: evaluated, saved in Hugging Face's format, and kept in checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from flatfsdp import Precision, checkpoint, shard
from flatfsdp.checkpoint.ema import EMA
from tests.support.assertions import assert_raises
from tests.support.ecosystem.families import FAMILIES, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.models import Net, build, data
from tests.support.ranks import on_ranks, run_ranks, stop_pools

DECAYS = (0.5, 0.9, 0.9)


def trained(model: Any, rank: int, steps: int = 3, **options: Any) -> tuple[EMA, torch.optim.Optimizer]:
    """A model and its average after `steps` steps."""
    ema, optimizer = EMA(model, 0.9, **options), torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for decay, (tokens,) in zip(DECAYS, data(rank, steps, 1), strict=False):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(decay)
    return ema, optimizer


def by_hand(rank: int) -> dict[str, Tensor]:
    """The same average of whole tensors."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    average = copy.deepcopy(model.state_dict())
    for decay, (tokens,) in zip(DECAYS, data(rank, 3, 1), strict=True):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - decay)
    return average


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@on_ranks(2)
def test_a_model_is_evaluated_with_its_average_and_trains_on(rank: int) -> None:
    model, (held_out,) = build(reshard_after_forward=False), next(data(99, 1, 1))
    ema, optimizer = trained(model, rank)
    before, expected = model.state_dict(), by_hand(rank)
    plain = Net()
    plain.load_state_dict(expected)
    with ema.averaged():
        assert same(model.state_dict(), expected)
        with torch.no_grad():
            assert torch.equal(model(held_out), plain(held_out))
        assert_raises(RuntimeError, r"EMA\.update was called inside", ema.update)
        for goes_on in ({"optimizer": optimizer}, {"ema": ema}):
            with pytest.raises(RuntimeError, match="needs the trained ones: save it outside"):
                checkpoint.save("nowhere", model, **goes_on)
    assert same(model.state_dict(), before) and ema.updates == 3

    def train_inside() -> None:
        with ema.averaged():
            model(held_out).backward()
            optimizer.step()

    assert_raises(RuntimeError, r"written to inside .* train, and load, outside", train_inside)
    optimizer.zero_grad()
    assert same(model.state_dict(), before)
    with pytest.raises(KeyError), ema.averaged():
        raise KeyError
    assert same(model.state_dict(), before)


@on_ranks(2)
def test_what_cannot_be_averaged_is_named(rank: int) -> None:
    model = build()
    assert_raises(ValueError, r"decay is 1\.5", EMA, model, 1.5)
    assert_raises(ValueError, "contains no unit", EMA, Net())
    with pytest.raises(TypeError):
        AveragedModel(model)
    model.blocks[0].requires_grad_(False)
    ema = EMA(model)
    model.blocks[0].requires_grad_(True)
    assert_raises(RuntimeError, "were frozen when the EMA was made", ema.update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(2)
def test_dtypes(rank: int, dtype: torch.dtype) -> None:
    """An average is computed in the wider dtype, and the weights are rounded once from it."""
    model = build(precision=Precision(param=torch.bfloat16, grad=torch.bfloat16))
    before = model.state_dict()
    ema = EMA(model, 0.5, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = {name: value.to(torch.promote_types(dtype, torch.bfloat16)) for name, value in before.items()}
    now = model.state_dict()
    ema.update()
    with ema.averaged():
        for name, value in model.state_dict().items():
            wide = expected[name].lerp(now[name].to(expected[name].dtype), 0.5)
            assert torch.equal(value, wide.to(dtype).bfloat16())
    assert same(model.state_dict(), now)


def saved(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    model = build()
    ema, optimizer = trained(model, rank)
    checkpoint.save(folder / "with", model, optimizer, ema=ema)
    checkpoint.save(folder / "without", model, optimizer)
    manager = checkpoint.CheckpointManager(folder / "run")
    manager.save(3, model, optimizer, ema=ema)
    with ema.averaged():
        return model.state_dict()


def loaded(rank: int, world_size: int, folder: Path) -> list[dict[str, Tensor]]:
    found = []
    for resumes in (False, True):
        model = build()
        ema = EMA(model)
        before = model.state_dict()
        if resumes:
            checkpoint.CheckpointManager(folder / "run").resume(model, ema=ema)
        else:
            with pytest.raises(ValueError, match="the checkpoint has no average; save it with"):
                checkpoint.load(folder / "without", model, ema=ema)
            with pytest.raises(ValueError, match=r"average is not of these weights: .*float16"):
                checkpoint.load(folder / "with", model, ema=EMA(model, dtype=torch.float16))
            assert same(model.state_dict(), before)
            checkpoint.load(folder / "with", model, ema=ema)
        assert ema.updates == 3
        with ema.averaged():
            found.append(model.state_dict())
    return found


def test_checkpoints_have_the_average_for_any_number_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(2, saved, tmp_path)[0]
    assert all(same(each, expected) for world in (1, 3) for each in run_ranks(world, loaded, tmp_path)[0])


@needs_transformers
@on_ranks(2)
def test_save_pretrained_writes_the_average(rank: int) -> None:
    family = FAMILIES["Llama"]
    model = shard(family.build(), family.is_unit)
    before, ema = model.state_dict(), EMA(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    ema.update()
    with shared_folder() as folder:
        with ema.averaged():
            model.save_pretrained(folder)
        read = type(family.build()).from_pretrained(folder).state_dict()
    torch.testing.assert_close(read, {name: value + 0.5 for name, value in before.items()})


@on_ranks(1)
def test_the_trained_weights_are_back_where_not_all_are_written(rank: int) -> None:
    model = build()
    ema, _ = trained(model, rank)
    before = {name: value.clone() for name, value in checkpoint.local_state_dict(model).items()}
    ema.shards[-1] = torch.zeros(3)  # of another size, which cannot be copied
    with pytest.raises(RuntimeError), ema.averaged():
        pass
    assert same(checkpoint.local_state_dict(model), before)


def fails_on_rank_0(rank: int, _world_size: int) -> None:
    model = build(timeout=2.0)
    ema, _ = trained(model, rank)
    before = checkpoint.local_state_dict(model)
    before = {name: value.clone() for name, value in before.items()}

    def evaluate() -> None:
        with ema.averaged():
            if rank == 0:
                raise KeyError("a metric")

    error, words = (KeyError, "a metric") if rank == 0 else (RuntimeError, r"rank 0")
    assert_raises(error, words, evaluate)
    assert same(checkpoint.local_state_dict(model), before)


def test_the_trained_weights_are_back_where_one_rank_alone_fails() -> None:
    """An emergency checkpoint has them, although ranks cannot go on together."""
    run_ranks(2, fails_on_rank_0)
    stop_pools()  # whose process group has ended
