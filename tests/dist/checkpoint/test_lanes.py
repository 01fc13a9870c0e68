"""Checkpoints of models with lanes: on any number of ranks a run goes on with the bits it would have had."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import Precision, by_class, checkpoint, optim, shard
from flatfsdp.checkpoint import CheckpointError, CheckpointManager
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.comm.lanes import Lanes
from tests.support.checkpoints import Model, equal, full_state
from tests.support.lanes import OfStep, differing, microbatch
from tests.support.meshes import HYBRID, placed
from tests.support.models import Block, backward, plain_net, update
from tests.support.ranks import on_ranks, run_ranks

TOTAL = 12
LANES = Lanes(12, block=2)
BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
OPTIMIZERS: dict[str, Any] = {"torch's": torch.optim.AdamW, "ours": optim.AdamW}


class Run:
    """A model in training, its optimizer, and an average of its weights."""

    def __init__(self, seed: int, lanes: Lanes | None, optimizer: str = "torch's", **options: Any) -> None:
        self.model: Any = shard(plain_net(Model, seed), by_class(Block), lanes=lanes, **placed(options))
        self.lanes = lanes
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=1e-2)
        self.ema = EMA(self.model, 0.5)

    def train(self, *steps: int) -> None:
        numbers = range(TOTAL) if self.lanes is None else self.model.microbatch_numbers(TOTAL)
        for step in steps:
            backward(OfStep(self.model, TOTAL), [microbatch(step, number) for number in numbers])
            update(self.optimizer)
            self.ema.update()

    def state(self) -> dict[str, Any]:
        state = full_state(self.model, self.optimizer)
        # It counts the forwards of a rank, of which several ranks have fewer.
        del state["model"]["count"]
        with self.ema.averaged():
            state["average"] = dict(checkpoint.full_state_dict(self.model))
        del state["average"]["count"]
        return copy.deepcopy({**state, "updates": self.ema.updates})

    def save(self, folder: Path) -> None:
        extra = {"generator": torch.get_rng_state()}
        checkpoint.save(folder, self.model, self.optimizer, ema=self.ema, extra=extra)

    def load(self, folder: Path, **options: Any) -> dict[str, Any]:
        return checkpoint.load(folder, self.model, self.optimizer, ema=self.ema, **options)


def written(
    rank: int, world_size: int, folder: Path, lanes: Lanes | None, options: dict[str, Any], *then: int
) -> tuple[dict[str, Any], ...]:
    """The states of a run when it was saved, and after further steps."""
    run = Run(0, lanes, **options)
    run.train(0, 1)
    run.save(folder)
    saved = run.state()
    run.train(*then)
    return saved, run.state()


def gone_on(
    rank: int, world_size: int, folder: Path, lanes: Lanes | None, options: dict[str, Any], *then: int
) -> tuple[dict[str, Any], ...]:
    """The states of a run when it was loaded, and after further steps."""
    run = Run(1, lanes, **options)
    assert list(run.load(folder)) == ["generator"]
    loaded = run.state()
    run.train(*then)
    return loaded, run.state()


@pytest.mark.parametrize(
    ("optimizer", "precision", "elsewhere"),
    [("torch's", Precision(), [(1, {}), (4, HYBRID)]), ("ours", BF16, [(1, {}), (4, {}), (4, HYBRID)])],
    ids=["fp32", "bf16, ours"],
)
def test_a_run_goes_on_with_its_bits_on_other_ranks(
    tmp_path: Path, optimizer: str, precision: Precision, elsewhere: list[tuple[int, dict[str, Any]]]
) -> None:
    options = {"optimizer": optimizer, "precision": precision}
    saved, ended = run_ranks(2, written, tmp_path, LANES, options, 2, 3)[0]
    assert not equal(saved, ended)
    for world_size, mesh in elsewhere:
        for loaded, found in run_ranks(world_size, gone_on, tmp_path, LANES, {**options, **mesh}, 2, 3):
            assert equal(loaded, saved), (world_size, mesh)
            assert equal(found, ended), (world_size, mesh)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lanes_come_and_go(tmp_path: Path, optimizer: str) -> None:
    """Nothing but a checkpoint's values is loaded into shards with another padding."""
    options = {"optimizer": optimizer}
    for before, ranks, afters in ((LANES, 2, [(None, 1), (None, 4)]), (None, 3, [(Lanes(12), 4), (None, 1)])):
        folder = tmp_path / str(before)
        saved, _ = run_ranks(ranks, written, folder, before, options)[0]
        for after, world_size in afters:
            found = run_ranks(world_size, gone_on, folder, after, options)
            assert all(equal(loaded, saved) for loaded, _ in found), (before, after, world_size)


@on_ranks(2)
def test_other_lanes_are_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run(0, Lanes(4))
    run.train(0)
    run.save(tmp_path / "saved")
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, run.model, run.optimizer)
    for lanes in (Lanes(6), Lanes(4, block=2)):
        other = Run(1, lanes)
        other.train(1)
        before = other.state()
        both = f"the checkpoint has {Lanes(4)}, and the model {lanes}: "
        with pytest.raises(CheckpointError, match=re.escape(both) + r".*accept=\('lanes',\)"):
            other.load(tmp_path / "saved")
        # It is not passed over for an older one.
        with pytest.raises(CheckpointError, match="in another order"):
            manager.resume(other.model, other.optimizer)
        with pytest.raises(CheckpointError, match="in another order"):
            checkpoint.load(tmp_path / "saved", other.model)
        assert equal(other.state(), before)
        other.load(tmp_path / "saved", accept=["lanes"])
        assert equal(other.state(), run.state())


@on_ranks(2)
def test_stages_with_different_lanes_are_not_saved(tmp_path: Path, rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))["shard"]
    stage = shard(nn.Sequential(OrderedDict({f"of {rank}": nn.Linear(2, 2)})), mesh=mesh, lanes=rank + 1)
    with pytest.raises(ValueError, match="stages have different lanes"):
        checkpoint.save(tmp_path, [stage])


def local(rank: int, world_size: int, lanes: Lanes | None) -> tuple[dict[str, Any], ...]:
    """This rank's shards and their metadata, and the whole; what its own lanes load, and other lanes not."""
    run = Run(0, lanes)
    run.train(0)
    state = {name: value.clone() for name, value in checkpoint.local_state_dict(run.model).items()}
    again = Run(1, lanes)
    checkpoint.load_local_state_dict(again.model, state)
    whole = dict(checkpoint.full_state_dict(run.model))
    assert equal(dict(checkpoint.full_state_dict(again.model)), whole)
    with pytest.raises(RuntimeError, match="with equal lanes, so consolidate them"):
        checkpoint.load_local_state_dict(Run(1, Lanes(120)).model, state)
    return state, checkpoint.local_metadata(run.model), whole


def test_local_shards_with_lanes_are_consolidated() -> None:
    states, metadata, (whole, *_) = zip(*run_ranks(3, local, Lanes(12)), strict=True)
    found = checkpoint.consolidate(states, metadata)
    assert differing(found, whole) == []
