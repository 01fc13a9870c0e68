"""Checkpoints of model and optimizer: written by 4 ranks, read by 1, 2 and 3, bit for bit."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import flatfsdp
from flatfsdp import checkpoint, shard
from tests.support.checkpoints import FORMS, Model, build, equal, full_state, load_form, step, trained
from tests.support.models import Block
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks


def save(rank: int, world_size: int, folder: str, grouped: bool) -> None:
    model, optimizer = trained(2, grouped=grouped)
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    state = full_state(model, optimizer)
    rank0_only = {
        "model": checkpoint.full_state_dict(model, rank0_only=True, cpu_offload=True),
        "optimizer": checkpoint.full_optimizer_state_dict(
            model, optimizer, rank0_only=True, cpu_offload=True
        ),
    }
    if rank == 0:
        assert equal(rank0_only, state)
        torch.save(state, f"{folder}/full.pt")
    else:
        assert rank0_only == {"model": {}, "optimizer": {}}


def load(rank: int, world_size: int, folder: str, grouped: bool, form: str) -> bool:
    """Whether a fresh model and optimizer, after loading, equal the saved ones."""
    model, optimizer = trained(0, seed=1, grouped=grouped)
    saved = load_form(form, folder, model, optimizer, rank)
    return equal(full_state(model, optimizer), saved)


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
def test_saved_by_four_ranks_loaded_by_one_two_three(tmp_path: Path, grouped: bool) -> None:
    run_ranks(4, save, str(tmp_path), grouped)
    for world_size in (1, 2, 3):
        for form in FORMS:
            assert all(run_ranks(world_size, load, str(tmp_path), grouped, form)), (world_size, form)


def test_a_sharded_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    """The checkpoint, read without FlatFSDP, has whole tensors under the plain model's names."""
    run_ranks(4, save, str(tmp_path), False)
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    saved = torch.load(tmp_path / "full.pt")
    names = [name for name, _ in Model().named_parameters()]
    for name in names:
        assert torch.equal(plain["model"][name].view_as(saved["model"][name]), saved["model"][name])
    assert torch.equal(plain["model"]["count"], saved["model"]["count"])
    moments = saved["optimizer"]["state"]["cube"]["exp_avg_sq"]
    assert torch.equal(plain["optimizer"]["state"]["cube"]["exp_avg_sq"], moments)


@on_ranks(3)
def test_fsdp2_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    flat = flatfsdp.shard(model, flatfsdp.by_class(Block))
    checkpoint.save(tmp_path / "flat", flat)
    theirs = fully_shard(nn.Sequential(*(fully_shard(Block()) for _ in range(2))))
    dist.checkpoint.load({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "flat")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.full_tensor(), saved[name]), name
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter *= 2
    dist.checkpoint.save({"model": theirs.state_dict()}, checkpoint_id=tmp_path / "theirs")
    checkpoint.load(tmp_path / "theirs", flat)
    assert equal(dict(flat.state_dict()), {name: 2 * value for name, value in saved.items()})


@on_ranks(2)
def test_asynchronous_saving(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    extra = {"step": torch.tensor(1)}
    state = {"model": checkpoint.sharded_state_dict(model)}
    state["optimizer"] = checkpoint.sharded_optimizer_state_dict(model, optimizer)
    done = dist.checkpoint.async_save(
        state,
        storage_writer=checkpoint.Writer(tmp_path, extra=extra),
        process_group=dist.new_group(backend="gloo"),
    )
    before = copy.deepcopy(full_state(model, optimizer))
    # Staged copies are written, whatever happens meanwhile.
    extra["step"] += 1
    step(model, optimizer, 1)
    getattr(done, "upload_completion", done).result()
    other, resumed = trained(0, seed=1)
    assert checkpoint.load(tmp_path, other, resumed) == {"step": torch.tensor(1)}
    assert equal(full_state(other, resumed), before)


def local(
    rank: int, world_size: int, mesh: bool
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    options: dict[str, Any] = {}
    if mesh:
        options["mesh"] = dist.init_device_mesh("cpu", (2, world_size // 2))
    model, optimizer = trained(1, **options)
    saved = {key: value.clone() for key, value in checkpoint.local_state_dict(model).items()}
    full = checkpoint.full_state_dict(model)
    step(model, optimizer, 1)
    model(torch.zeros(1, 2, dtype=torch.long))
    model.count.zero_()
    checkpoint.load_local_state_dict(model, saved)
    assert equal(checkpoint.full_state_dict(model), full)
    for key in ("flat_param", "blocks.1.flat_param", "frozen_flat_param", "count"):
        with pytest.raises(RuntimeError, match=f"Missing key: {key}"):
            checkpoint.load_local_state_dict(model, {k: v for k, v in saved.items() if k != key})
    with pytest.raises(RuntimeError, match="Unexpected key: more"):
        checkpoint.load_local_state_dict(model, {**saved, "more": torch.ones(1)})
    with pytest.raises(RuntimeError, match="shards fit only as many ranks"):
        checkpoint.load_local_state_dict(model, {**saved, "flat_param": torch.ones(3)})
    return saved, checkpoint.local_metadata(model), full


@pytest.mark.parametrize("mesh", [False, True], ids=["1-D", "2-D"])
def test_local_shards_load_where_they_came_from_and_consolidate_offline(mesh: bool) -> None:
    shards, metadata, fulls = zip(*run_ranks(4, local, mesh), strict=True)
    whole = checkpoint.consolidate(shards[::-1], metadata[::-1])
    assert whole.keys() == fulls[0].keys()
    assert all(torch.equal(whole[key], fulls[0][key]) for key in whole)
    assert whole["head.weight"] is whole["embedding.weight"]
    Model().load_state_dict(whole)
    with pytest.raises(ValueError, match="of all ranks"):
        checkpoint.consolidate(shards[:1], metadata[:1])
    with pytest.raises(ValueError, match="one pair a rank"):
        checkpoint.consolidate(shards, metadata[:1])
    short = {**shards[1], "flat_param": shards[1]["flat_param"][:-1]}
    with pytest.raises(ValueError, match="flat_param: shards have different lengths"):
        checkpoint.consolidate([shards[0], short, *shards[2:]], metadata)


@on_ranks(2)
def test_misfits_are_named_on_every_rank(rank: int) -> None:
    """Every error comes up on every rank, and leaves model and optimizer as they were."""
    model, optimizer = trained(1)
    before = full_state(model, optimizer)
    whole, state = before["model"], before["optimizer"]
    without = {k: v for k, v in whole.items() if k != "blocks.0.up.weight"}
    strange = {"state": {"nobody": {}}, "param_groups": state["param_groups"]}
    short = {**state, "state": {**state["state"], "cube": {"exp_avg": torch.zeros(3)}}}
    split = {**state, "param_groups": [{**state["param_groups"][0], "params": ["cube"]}]}
    load_model = partial(checkpoint.load_full_state_dict, model)
    load_optimizer = partial(checkpoint.load_full_optimizer_state_dict, model, optimizer)
    shapes = "size mismatch for cube: (3, 5) in the checkpoint, (3, 5, 7) in the model"
    for load, bad, error, message in (
        (load_model, without, RuntimeError, "Missing key: blocks.0.up.weight"),
        (load_model, {**whole, "cube": torch.zeros(3, 5)}, RuntimeError, shapes),
        (load_model, {**whole, "more": torch.ones(1)}, RuntimeError, "Unexpected key: more"),
        (load_optimizer, strange, ValueError, "'nobody', which is not a trained parameter"),
        (load_optimizer, short, ValueError, "'exp_avg' of cube has shape (3,)"),
        (load_optimizer, split, ValueError, "no saved parameter group contains all"),
        (load_optimizer, {"state": {}}, ValueError, 'the keys "state" and "param_groups"'),
    ):
        with pytest.raises(error, match=re.escape(message)) as caught:
            load(bad if rank == 0 else {}, from_rank0=True)
        assert len({*of_all_ranks(str(caught.value))}) == 1
    with pytest.raises(ValueError, match="not the shards of this model"):
        checkpoint.full_optimizer_state_dict(model, torch.optim.SGD(build(1).parameters(), lr=1.0))
    assert equal(full_state(model, optimizer), before)


def mesh_of(world_size: int) -> dict[str, Any]:
    return {"mesh": dist.init_device_mesh("cpu", (2, world_size // 2))}


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
@on_ranks(4)
def test_sharded_checkpoints_of_hybrid_sharding(world_size: int, tmp_path: Path, grouped: bool) -> None:
    """Sharded inside rows, replicated across them: saved, loaded, and trained on."""
    model, optimizer = trained(1, grouped=grouped, **mesh_of(world_size))
    checkpoint.save(tmp_path, model, optimizer)
    other, resumed = trained(0, seed=1, grouped=grouped, **mesh_of(world_size))
    checkpoint.load(tmp_path, other, resumed)
    for m, o in ((model, optimizer), (other, resumed)):
        step(m, o, 1)
    assert equal(full_state(model, optimizer), full_state(other, resumed))


@on_ranks(2)
def test_experts_are_not_lost_silently(rank: int, world_size: int, tmp_path: Path) -> None:
    """A unit on one rank alone would overwrite the other rank's in a common checkpoint."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    expert = shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(alone, "cpu"))
    model = shard(nn.Sequential(expert, nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for save in (
        lambda: checkpoint.save(tmp_path, model, optimizer),
        lambda: checkpoint.sharded_optimizer_state_dict(model, optimizer),
        lambda: checkpoint.load_full_state_dict(model, {}, from_rank0=True),
    ):
        with pytest.raises(ValueError, match="spread over 1 ranks and others over 2"):
            save()


def test_names_of_several_roots_and_of_several_paths() -> None:
    layer = shard(nn.Linear(2, 2))
    model = nn.Sequential(layer, shard(nn.Linear(2, 2)), layer)
    whole = checkpoint.consolidate([checkpoint.local_state_dict(model)], [checkpoint.local_metadata(model)])
    assert equal(whole, {name: whole[name] for name in whole})
    assert set(whole) == set(model.state_dict())
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="Linear contains no unit of FlatFSDP"):
        checkpoint.local_state_dict(nn.Linear(2, 2))


@on_ranks(1, 2)
def test_a_layer_with_two_names_is_loaded(rank: int) -> None:
    layer = nn.Linear(3, 3)
    model = shard(nn.Sequential(layer, layer))
    halves = {name: value / 2 for name, value in model.state_dict().items()}
    assert len(halves) == 4
    model.load_state_dict(halves)
    assert all(torch.equal(value, halves[name]) for name, value in model.state_dict().items())
