"""Checkpoints of model and optimizer: written by 4 ranks, read by 1, 2 and 3, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.fsdp import fully_shard

import flatfsdp
from flatfsdp import FlatFSDP, Precision, checkpoint
from tests.dist.checkpoints import FORMS, equal, load_form, step
from tests.dist.models import Block
from tests.dist.ranks import run_ranks

FLAGS = pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])


class Model(nn.Module):
    """Tied and frozen parameters, one without dimensions, a 3-D one, a buffer; odd sizes throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 30)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale * self.cube.square().mean()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def wrapped(seed: int, flag: bool = True, **options: Any) -> FlatFSDP:
    torch.manual_seed(seed)
    return flatfsdp.auto_wrap(Model(), flatfsdp.by_class(Block), optimize_backward_concat=flag, **options)


def adamw(model: FlatFSDP, grouped: bool) -> torch.optim.Optimizer:
    """Grouped: no weight decay for what has fewer than two dimensions, another rate for one matrix."""
    groups: Any = model.parameters()
    if grouped:
        groups = flatfsdp.param_groups(
            model,
            [
                {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0},
                {"params": ["blocks.1.up.weight"], "lr": 3e-2},
            ],
        )
    return torch.optim.AdamW(groups, lr=1e-2)


def full_state(model: FlatFSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": checkpoint.full_state_dict(model),
        "optimizer": checkpoint.full_optimizer_state_dict(model, optimizer),
    }


def save(rank: int, world_size: int, folder: str, grouped: bool) -> None:
    model = wrapped(0)
    optimizer = adamw(model, grouped)
    for seed in range(2):
        step(model, optimizer, seed)
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
    """Whether a fresh model and optimizer, after loading, say what the saved ones said."""
    model = wrapped(1)
    optimizer = adamw(model, grouped)
    saved = load_form(form, folder, model, optimizer, rank)
    return equal(full_state(model, optimizer), saved)


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
def test_saved_by_four_ranks_loaded_by_one_two_three(tmp_path: Path, grouped: bool) -> None:
    run_ranks(4, save, str(tmp_path), grouped)
    for world_size in (1, 2, 3):
        for form in FORMS:
            assert all(run_ranks(world_size, load, str(tmp_path), grouped, form)), (world_size, form)


def test_a_sharded_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    """Read without FlatFSDP, it has whole tensors under the plain model's names."""
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


def to_fsdp2_and_back(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    flat = flatfsdp.auto_wrap(model, flatfsdp.by_class(Block))
    checkpoint.save(f"{folder}/flat", flat)
    theirs = fully_shard(nn.Sequential(*(fully_shard(Block()) for _ in range(2))))
    dist.checkpoint.load({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/flat")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value.full_tensor(), saved[name]), name
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter *= 2
    dist.checkpoint.save({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/theirs")
    checkpoint.load(f"{folder}/theirs", flat)
    assert equal(dict(flat.state_dict()), {name: 2 * value for name, value in saved.items()})


def test_fsdp2_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    run_ranks(3, to_fsdp2_and_back, str(tmp_path))


def optimizer_like_plain(rank: int, world_size: int, flag: bool, grouped: bool) -> None:
    """The gathered state is that of torch's optimizer over the plain model's parameters."""
    model = wrapped(0, flag)
    optimizer = adamw(model, grouped)
    torch.manual_seed(0)
    plain = Model()
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    groups: Any = [{"params": list(named.values())}]
    if grouped:
        low = {name: p for name, p in named.items() if p.dim() < 2}
        rest = [p for name, p in named.items() if name not in low and name != "blocks.1.up.weight"]
        groups = [
            {"params": list(low.values()), "weight_decay": 0.0},
            {"params": [named["blocks.1.up.weight"]], "lr": 3e-2},
            {"params": rest},
        ]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for seed in range(2):
        step(model, optimizer, seed)
        step(plain, reference, seed)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == set(named)
    for name, parameter in named.items():
        for key, value in reference.state[parameter].items():
            torch.testing.assert_close(state["state"][name][key], value, rtol=1e-5, atol=1e-7, msg=name)
    ours = checkpoint.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for ours_group, group in zip(state["param_groups"], reference.param_groups, strict=True):
        assert {named[name] for name in ours_group["params"]} == set(group["params"])
        assert ours_group["weight_decay"] == group["weight_decay"] and ours_group["lr"] == group["lr"]


@FLAGS
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizer_state_and_groups_are_those_of_the_plain_model(
    world_size: int, grouped: bool, flag: bool
) -> None:
    run_ranks(world_size, optimizer_like_plain, flag, grouped)


def save_async(rank: int, world_size: int, folder: str) -> None:
    model = wrapped(0)
    state = checkpoint.sharded_state_dict(model)
    done = dist.checkpoint.async_save(
        state,
        checkpoint_id=folder,
        process_group=dist.new_group(backend="gloo"),
        async_stager=BlockingAsyncStager(),
    )
    before = checkpoint.full_state_dict(model)
    # Staged copies are written, whatever happens to the model meanwhile.
    with torch.no_grad(), model.summon_full_params():
        for parameter in model.parameters():
            parameter.zero_()
    getattr(done, "upload_completion", done).result()
    other = wrapped(1)
    dist.checkpoint.load(checkpoint.sharded_state_dict(other), checkpoint_id=folder)
    assert equal(dict(checkpoint.full_state_dict(other)), dict(before))


def test_asynchronous_saving(tmp_path: Path) -> None:
    run_ranks(2, save_async, str(tmp_path))


def local(
    rank: int, world_size: int, mesh: bool
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    options: dict[str, Any] = {}
    if mesh:
        options["mesh"] = dist.init_device_mesh("cpu", (2, world_size // 2))
    model = wrapped(0, **options)
    optimizer = adamw(model, False)
    step(model, optimizer, 0)
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


def misfits(rank: int, world_size: int) -> list[str]:
    """Every error comes up on every rank, and leaves model and optimizer as they were."""
    model = wrapped(0)
    optimizer = adamw(model, False)
    step(model, optimizer, 0)
    before = full_state(model, optimizer)
    whole, state = before["model"], before["optimizer"]
    mine = rank == 0
    messages = []

    def fails(error: Any, load: Any, *args: Any) -> None:
        with pytest.raises(error) as caught:
            load(*args, from_rank0=True)
        messages.append(str(caught.value))

    without = {k: v for k, v in whole.items() if k != "blocks.0.up.weight"}
    reshaped = {**whole, "cube": torch.zeros(3, 5)}
    for bad in (without, reshaped, {**whole, "more": torch.ones(1)}):
        fails(RuntimeError, checkpoint.load_full_state_dict, model, bad if mine else {})
    strange = {"state": {"nobody": {}}, "param_groups": state["param_groups"]}
    short = {**state, "state": {**state["state"], "cube": {"exp_avg": torch.zeros(3)}}}
    split = {**state, "param_groups": [{**state["param_groups"][0], "params": ["cube"]}]}
    for bad in (strange, short, split, {"state": {}}):
        fails(ValueError, checkpoint.load_full_optimizer_state_dict, model, optimizer, bad if mine else {})
    with pytest.raises(ValueError, match="not the flat shards of this model"):
        checkpoint.full_optimizer_state_dict(model, torch.optim.SGD(wrapped(1).parameters(), lr=1.0))
    assert equal(full_state(model, optimizer), before)
    return messages


def test_misfits_are_named_on_every_rank() -> None:
    messages = run_ranks(2, misfits)
    assert messages[0] == messages[1]
    expected = [
        "Missing key: blocks.0.up.weight",
        "size mismatch for cube: (3, 5) in the checkpoint, (3, 5, 7) in the model",
        "Unexpected key: more",
        "'nobody', which is not a trained parameter",
        "'exp_avg' of cube has shape (3,)",
        "no saved parameter group contains all",
        'the keys "state" and "param_groups"',
    ]
    for message, part in zip(messages[0], expected, strict=True):
        assert part in message


def bf16_masters(rank: int, world_size: int) -> None:
    """States in the shards' own dtype, and gradients in main_grad."""
    model = wrapped(0, precision=Precision(param=torch.bfloat16, compute=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    step(model, optimizer, 0)
    saved = full_state(model, optimizer)
    assert saved["model"]["cube"].dtype == torch.bfloat16
    other = wrapped(1, precision=Precision(param=torch.bfloat16, compute=torch.bfloat16))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(saved["model"])
    checkpoint.load_full_optimizer_state_dict(other, fresh, saved["optimizer"])
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, o, 1)
    assert equal(full_state(model, optimizer), full_state(other, fresh))


def test_training_goes_on_as_if_never_stopped() -> None:
    run_ranks(2, bf16_masters)


def mesh_of(world_size: int) -> dict[str, Any]:
    return {"mesh": dist.init_device_mesh("cpu", (2, world_size // 2))}


def on_a_mesh(rank: int, world_size: int, folder: str, grouped: bool) -> None:
    """Sharded inside rows, replicated across them: saved, loaded, and trained on."""
    model = wrapped(0, **mesh_of(world_size))
    optimizer = adamw(model, grouped)
    step(model, optimizer, 0)
    checkpoint.save(folder, model, optimizer)
    other = wrapped(1, **mesh_of(world_size))
    resumed = adamw(other, grouped)
    checkpoint.load(folder, other, resumed)
    for m, o in ((model, optimizer), (other, resumed)):
        step(m, o, 1)
    assert equal(full_state(model, optimizer), full_state(other, resumed))


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "three groups"])
def test_sharded_checkpoints_of_hybrid_sharding(tmp_path: Path, grouped: bool) -> None:
    run_ranks(4, on_a_mesh, str(tmp_path), grouped)


def regrouped(rank: int, world_size: int) -> None:
    """One state for several portions: each counts its own steps, and what was saved stays as it was."""
    model, other = wrapped(0), wrapped(1)
    optimizer, resumed = adamw(model, False), adamw(other, True)
    step(model, optimizer, 0)
    state = full_state(model, optimizer)
    saved = {name: {k: v.clone() for k, v in s.items()} for name, s in state["optimizer"]["state"].items()}
    groups = checkpoint.full_optimizer_state_dict(other, resumed)["param_groups"]
    other.load_state_dict(state["model"])
    checkpoint.load_full_optimizer_state_dict(other, resumed, {**state["optimizer"], "param_groups": groups})
    for m, o in ((model, optimizer), (other, resumed)):
        step(m, o, 1)
        step(m, o, 2)
    assert equal(state["optimizer"]["state"], saved)
    for m, o in ((model, optimizer), (other, resumed)):
        steps = [s["step"].item() for s in checkpoint.full_optimizer_state_dict(m, o)["state"].values()]
        assert set(steps) == {3.0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_portion_counts_its_own_steps(world_size: int) -> None:
    run_ranks(world_size, regrouped)


def experts(rank: int, world_size: int, folder: str) -> None:
    """A unit that each rank has to itself would overwrite the other rank's in a common checkpoint."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    expert = FlatFSDP(nn.Linear(4, 4), alone)
    model = FlatFSDP(nn.Sequential(expert, nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for save in (
        lambda: checkpoint.save(folder, model, optimizer),
        lambda: checkpoint.sharded_optimizer_state_dict(model, optimizer),
        lambda: checkpoint.load_full_state_dict(model, {}, from_rank0=True),
    ):
        with pytest.raises(ValueError, match="spread over 1 ranks and others over 2"):
            save()


def test_experts_are_not_lost_silently(tmp_path: Path) -> None:
    run_ranks(2, experts, str(tmp_path))


def states_that_do_not_fit(rank: int, world_size: int) -> None:
    model = wrapped(0)
    optimizer = adamw(model, False)
    step(model, optimizer, 0)
    before = full_state(model, optimizer)
    state = before["optimizer"]
    some = {name: s for name, s in state["state"].items() if name != "blocks.0.norm.weight"}
    for from_rank0 in (False, True):
        mine = {**state, "state": some} if rank == 0 or not from_rank0 else None
        with pytest.raises(ValueError, match="or one of them is missing"):
            checkpoint.load_full_optimizer_state_dict(model, optimizer, mine, from_rank0=from_rank0)
    bad = {**before["model"], "cube": 3} if rank == 0 else {}
    with pytest.raises(RuntimeError, match="cube is no tensor, but int"):
        checkpoint.load_full_state_dict(model, bad, from_rank0=True)
    if rank == 0:
        # On one rank only.
        optimizer.state[model.flat_param]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"AdamW keeps 'history' \(list\)"):
        checkpoint.full_optimizer_state_dict(model, optimizer)
    optimizer.state[model.flat_param].pop("history", None)
    assert equal(full_state(model, optimizer), before)


def test_states_that_do_not_fit_raise_on_every_rank() -> None:
    run_ranks(2, states_that_do_not_fit)


def unfrozen(rank: int, world_size: int, folder: str) -> None:
    """A layer that was frozen joins, as a group of its own; the others go on with their state."""
    model = wrapped(0)
    optimizer = adamw(model, False)
    step(model, optimizer, 0)
    checkpoint.save(folder, model, optimizer)
    before = full_state(model, optimizer)
    torch.manual_seed(0)
    net = Model()
    net.frozen.requires_grad_(True)
    model = flatfsdp.auto_wrap(net, flatfsdp.by_class(Block))
    joining = ["frozen.weight", "frozen.bias"]
    with pytest.raises(ValueError, match="that were frozen then into groups of their own"):
        checkpoint.load(folder, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(
        flatfsdp.param_groups(model, [{"params": joining, "lr": 0.5}]), lr=0.1, weight_decay=0.0
    )
    for load_state in (
        lambda: checkpoint.load(folder, model, optimizer),
        lambda: checkpoint.load_full_optimizer_state_dict(model, optimizer, before["optimizer"]),
    ):
        load_state()
        state = checkpoint.full_optimizer_state_dict(model, optimizer)
        found = {n: s for n, s in state["state"].items() if s}
        assert equal(before["optimizer"]["state"], found)
        assert [(group["lr"], group["weight_decay"]) for group in state["param_groups"]] == [
            (0.5, 0.0),
            (1e-2, 1e-2),
        ]
    step(model, optimizer, 1)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)["state"]
    assert [int(state[name]["step"]) for name in ("frozen.bias", "head.bias")] == [1, 2]


def test_a_layer_that_is_unfrozen_joins_without_state(tmp_path: Path) -> None:
    run_ranks(2, unfrozen, str(tmp_path))


def tensor_rate(rank: int, world_size: int, folder: str) -> None:
    """A learning rate that is a tensor, as capturable optimizers have."""
    model = wrapped(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.25))
    step(model, optimizer, 0)
    checkpoint.save(folder, model, optimizer)
    resumed = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    checkpoint.load(folder, model, resumed)
    assert resumed.param_groups[0]["lr"] == 0.25


def test_a_tensor_learning_rate_is_saved(tmp_path: Path) -> None:
    run_ranks(2, tensor_rate, str(tmp_path))


def test_names_of_several_roots_and_of_several_paths() -> None:
    layer = FlatFSDP(nn.Linear(2, 2))
    model = nn.Sequential(layer, FlatFSDP(nn.Linear(2, 2)), layer)
    whole = checkpoint.consolidate([checkpoint.local_state_dict(model)], [checkpoint.local_metadata(model)])
    assert equal(whole, {name: whole[name] for name in whole})
    assert set(whole) == set(model.state_dict())
    assert all(torch.equal(whole[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="Linear contains no FlatFSDP module"):
        checkpoint.local_state_dict(nn.Linear(2, 2))


def resumed_with_padding(rank: int, world_size: int, folder: str) -> None:
    """Of 20 elements in shards of 16 the last rank has none."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))

    def trained(model: FlatFSDP, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made() -> tuple[FlatFSDP, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = FlatFSDP(nn.Linear(4, 4))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = made()
    trained(model, optimizer, 2)
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    if (state := full_state(model, optimizer)) and rank == 0:
        torch.save(state, f"{folder}/full.pt")
    dist.barrier()
    trained(model, optimizer, 1)
    for form in FORMS:
        other, its_optimizer = made()
        load_form(form, folder, other, its_optimizer, rank)
        trained(other, its_optimizer, 1)
        assert torch.equal(model.flat_param, other.flat_param), form
        states = (o.state_dict()["state"][0] for o in (optimizer, its_optimizer))
        ours, theirs = (dict(sorted(state.items())) for state in states)
        assert equal(ours, theirs), form


def test_ranks_with_padding_only_resume_as_the_others(tmp_path: Path) -> None:
    run_ranks(3, resumed_with_padding, str(tmp_path))
