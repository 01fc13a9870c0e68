"""Checkpoints of split and staged models hold whole tensors: any other arrangement reads the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh

import flatfsdp
from flatfsdp import checkpoint, shard
from tests.support.checkpoints import FORMS, equal, load_form, step
from tests.support.models import Block
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks
from tests.support.tp_models import ParallelNet, build_tp, tp_mesh

NO_DECAY = {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}


def model_and_optimizer(
    sizes: tuple[int, ...] | None, seed: int, grouped: bool
) -> tuple[Any, torch.optim.Optimizer]:
    model = build_tp(sizes and tp_mesh(*sizes), seed=seed)
    groups: Any = flatfsdp.param_groups(model, [NO_DECAY]) if grouped else model.parameters()
    return model, flatfsdp.optim.AdamW(groups, lr=1e-2)


def full_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by name; parameters are in the order of flat groups."""
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    return {
        "model": dict(checkpoint.full_state_dict(model)),
        "optimizer": {
            "state": dict(sorted(state["state"].items())),
            "param_groups": [{**g, "params": sorted(g["params"])} for g in state["param_groups"]],
        },
    }


def save(rank: int, world_size: int, folder: str, sizes: tuple[int, ...], grouped: bool) -> Any:
    model, optimizer = model_and_optimizer(sizes, 0, grouped)
    torch.manual_seed(0)
    # What TP ranks have is a part of what one process has, and they have all of it.
    assert equal(dict(checkpoint.full_state_dict(model)), dict(ParallelNet().state_dict()))
    assert model.state_dict()["blocks.0.down_weight"].shape[1] * sizes[-1] == 36
    for seed in range(2):
        step(model, optimizer, seed)
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    state = full_state(model, optimizer)
    only = checkpoint.full_state_dict(model, rank0_only=True, cpu_offload=True)
    assert equal(only, state["model"] if rank == 0 else {})
    only = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=True)
    assert equal(dict(sorted(only["state"].items())), state["optimizer"]["state"]) if rank == 0 else not only
    if rank == 0:
        torch.save(state, f"{folder}/full.pt")
    return checkpoint.local_state_dict(model), checkpoint.local_metadata(model)


def load(rank: int, world_size: int, folder: str, sizes: tuple[int, ...] | None, grouped: bool) -> None:
    for form in FORMS:
        model, optimizer = model_and_optimizer(sizes, 1, grouped)
        saved = load_form(form, folder, model, optimizer, rank)
        assert equal(full_state(model, optimizer), saved), form
    # And goes on.
    step(model, optimizer, 5)
    own = dict(model.state_dict())
    model.load_state_dict(own)
    assert equal(dict(model.state_dict()), own)


@pytest.mark.parametrize(
    ("grouped", "arrangements"),
    [(False, [(2, 1, 2), None]), (True, [(2, 2), (1, 4)])],
    ids=["one group", "two groups"],
)
def test_any_other_arrangement_reads_the_same_bits(tmp_path: Path, grouped: bool, arrangements: Any) -> None:
    files = run_ranks(4, save, str(tmp_path), (2, 2), grouped)
    for sizes in arrangements:
        run_ranks(4, load, str(tmp_path), sizes, grouped)
    run_ranks(1, load, str(tmp_path), None, grouped)
    saved = torch.load(tmp_path / "full.pt")
    local = checkpoint.consolidate(*zip(*files, strict=True))
    assert local.keys() == saved["model"].keys()
    assert all(torch.equal(local[name], value) for name, value in saved["model"].items())
    with pytest.raises(ValueError, match="flat_param: shard 0 of 2 of tensor-parallel rank 1 is missing"):
        checkpoint.consolidate(*zip(*files[::2], strict=True))
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    assert all(torch.equal(plain["model"][name], value) for name, value in saved["model"].items())
    for name, state in saved["optimizer"]["state"].items():
        assert torch.equal(plain["optimizer"]["state"][name]["exp_avg"], state["exp_avg"])


def test_one_process_is_read_by_tensor_parallel_ranks(tmp_path: Path) -> None:
    run_ranks(4, save, str(tmp_path), (4, 1), True)
    run_ranks(4, load, str(tmp_path), (2, 2), True)


@on_ranks(4)
def test_misfits_are_named_on_every_rank(rank: int) -> None:
    model, optimizer = model_and_optimizer((2, 2), 0, False)
    step(model, optimizer, 0)
    before = full_state(model, optimizer)
    whole, state = before["model"], before["optimizer"]
    short = {**whole, "blocks.0.up_bias": torch.zeros(36)}
    messages = []
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.up_bias") as caught:
        checkpoint.load_full_state_dict(model, short if rank == 0 else {}, from_rank0=True)
    messages.append(str(caught.value))
    bad = {**state, "state": {**state["state"], "blocks.0.up_bias": {"exp_avg": torch.zeros(36)}}}
    with pytest.raises(ValueError, match=r"of blocks\.0\.up_bias has shape") as raised:
        checkpoint.load_full_optimizer_state_dict(model, optimizer, bad if rank == 0 else {}, from_rank0=True)
    messages.append(str(raised.value))
    with pytest.raises(
        RuntimeError, match=r"blocks\.0\.up_bias.* load whole tensors with flatfsdp\.checkpoint"
    ):
        model.load_state_dict({**model.state_dict(), "blocks.0.up_bias": whole["blocks.0.up_bias"]})
    assert equal(full_state(model, optimizer), before)
    assert all(each == messages for each in of_all_ranks(messages))
    assert "(36,) in the checkpoint, (72,) in the model" in messages[0]


# ---- pipelines ------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Some blocks of a model of four, under their numbers in it."""

    def __init__(self, numbers: list[int], named: bool = True) -> None:
        super().__init__()
        blocks = {}
        for place, number in enumerate(numbers):
            torch.manual_seed(number)
            blocks[str(number if named else place)] = Block()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def stages(parts: list[list[int]], shift: float, **options: Any) -> tuple[list[Any], torch.optim.Optimizer]:
    """Trains each of this rank's stages, alone, for one step, with parameters moved by `shift`."""
    models = [flatfsdp.shard(Stage(part), flatfsdp.by_class(Block), **options) for part in parts]
    chosen = {"params": lambda name, shape: "bias" in name, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(flatfsdp.param_groups(models, [chosen]), lr=1e-2)
    for model in models:
        model(torch.randn(1, 20)).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in (p for model in models for p in model.parameters()):
            parameter += shift
    return models, optimizer


def states(models: list[Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Value and optimizer state of each parameter, by name."""
    values = {k: v for model in models for k, v in checkpoint.full_state_dict(model).items()}
    kept = checkpoint.full_optimizer_state_dict(models, optimizer)["state"]
    return {name: {"value": value, **kept[name]} for name, value in values.items()}


def save_stages(rank: int, world_size: int, folder: str, interleaved: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    pp = mesh.get_local_rank("pp")
    parts = [[pp], [pp + 2]] if interleaved else [[2 * pp, 2 * pp + 1]]
    models, optimizer = stages(parts, 0.0, mesh=mesh["dp"])
    checkpoint.save(folder, models if interleaved else models[0], optimizer)
    before = states(models, optimizer)
    others, resumed = stages(parts, 1.0, mesh=mesh["dp"])
    checkpoint.load(folder, others, resumed)
    assert equal(states(others, resumed), before)
    return before


def load_whole(rank: int, world_size: int, folder: str, expected: dict[str, Any]) -> None:
    models, optimizer = stages([[0, 1, 2, 3]], 1.0)
    checkpoint.load(folder, models[0], optimizer)
    assert equal(states(models, optimizer), expected)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 1e-2]
    some, its_optimizer = stages([[0, 1]], 1.0)
    with pytest.raises(ValueError, match=r"blocks\.2\.down.* only in the checkpoint; accept=\('surplus',\)"):
        checkpoint.load(folder, some, its_optimizer)
    checkpoint.load(folder, some, its_optimizer, accept=["surplus"])
    found = states(some, its_optimizer)
    assert equal(found, {name: expected[name] for name in found})


@pytest.mark.parametrize("interleaved", [False, True], ids=["one stage", "two stages"])
def test_stages_are_one_checkpoint(tmp_path: Path, interleaved: bool) -> None:
    found = run_ranks(4, save_stages, str(tmp_path), interleaved)
    merged = {name: value for of_rank in found for name, value in of_rank.items()}
    expected = {name: merged[name] for name in Stage([0, 1, 2, 3]).state_dict()}
    run_ranks(1, load_whole, str(tmp_path), expected)


@on_ranks(4)
def test_stages_of_the_same_names_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "nothing")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = shard(Stage([mesh.get_local_rank("pp")], named=False), mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"two stages have a parameter .blocks\.0\.norm\.weight."):
        checkpoint.save(folder, model)
    assert not Path(folder).exists()
