"""Differences from the CPU: host memory beside device memory, NCCL's collectives, the scaler's device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from flatfsdp import Precision, auto_wrap, by_class, checkpoint
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.gpu.models import BF16, SMALL, backward, build, tokens, train
from tests.support.gpu.waiting import without_synchronisation
from tests.support.models import FLAGS, repeatable, same, same_trace, update
from tests.support.ranks import of_all_ranks, on_ranks, run_ranks

pytestmark = NEEDS_GPU


@FLAGS
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@on_ranks(1, 2, backend="nccl")
def test_cpu_offload_changes_no_bit(rank: int, precision: Precision, flag: bool) -> None:
    """With SGD, whose arithmetic is the same on both devices, offloading changes no bit."""
    options = {"precision": precision, "optimize_backward_concat": flag}
    batches = tokens(SMALL, rank, 3)
    finals = []
    for cpu_offload in (False, True):
        model = build(cpu_offload=cpu_offload, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        shards = [group.master.flat for _, group in named_groups(model)]
        assert all(shard.is_pinned() == cpu_offload != shard.is_cuda for shard in shards)
        for _ in range(3):
            backward(model, batches)
            assert all(parameter.grad.is_cuda != cpu_offload for parameter in model.parameters())
            model.clip_grad_norm_(1e6)
            update(optimizer)
        finals.append({k: v.cpu() for k, v in checkpoint.full_state_dict(model).items()})
        assert all(shard.isfinite().all() for shard in shards)
    assert same(list(finals[0].values()), list(finals[1].values()))
    numel = sum(shard.numel() for shard in shards)
    ledger = model.fsdp_state.shared.ledger
    ledger.reset()
    backward(model, batches)
    assert ledger.bytes["offload"] == 2 * 4 * numel, "each shard up and its gradient down, once a step"


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@on_ranks(4, backend="nccl")
@repeatable()
def test_hybrid_sharding(rank: int, precision: Precision, reshard: bool, sync: str) -> None:
    options = {"precision": precision, "reshard_after_forward": reshard, "grad_sync": sync}
    mesh = dist.init_device_mesh("cuda", (2, 2))
    batches = tokens(SMALL, rank, 3)
    models = [build(mesh=mesh, optimize_backward_concat=flag, **options) for flag in (False, True)]
    traces = [train(model, batches) for model in models]
    model = models[1]
    ledger = model.fsdp_state.shared.ledger
    ledger.reset()
    backward(model, batches)
    held = sum(group.master.flat.numel() for _, group in named_groups(model))
    backwards = len(batches) if sync == "every" else 1
    # FP32, two ranks inside and two across: half of the row's elements, and this rank's elements.
    assert ledger.bytes["reduce"] == backwards * 4 * held
    assert ledger.bytes["all_reduce"] == 4 * held
    equal = same_trace(*traces)
    assert all(equal.values()), equal


@on_ranks(4, backend="nccl")
def test_hybrid_sharding_trains_like_plain_sharding(rank: int) -> None:
    """The mean over rows and columns is the mean over all ranks, up to the order of additions."""
    batches = tokens(SMALL, rank, 2)
    flat = train(build(), batches)
    grid = train(build(mesh=dist.init_device_mesh("cuda", (2, 2))), batches)
    losses, expected = torch.stack(grid.losses), torch.stack(flat.losses)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def save(rank: int, world_size: int, folder: str) -> None:
    model = build(optimize_backward_concat=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (batch,) = tokens(SMALL, 0, 1)
    model(batch, batch).backward()
    optimizer.step()
    checkpoint.save(f"{folder}/sharded", model, optimizer)
    model_state = checkpoint.full_state_dict(model, rank0_only=True, cpu_offload=True)
    state = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=True, cpu_offload=True)
    if rank == 0:
        torch.save({"model": model_state, "optimizer": state}, f"{folder}/full.pt")


def load(rank: int, world_size: int, folder: str, form: str) -> None:
    saved = torch.load(f"{folder}/full.pt")
    torch.manual_seed(5)
    model = build(optimize_backward_concat=True, cpu_offload=form == "offloaded")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if form == "sharded":
        checkpoint.load(f"{folder}/sharded", model, optimizer)
    else:
        mine = saved if rank == 0 else {"model": {}, "optimizer": {}}
        checkpoint.load_full_state_dict(model, mine["model"], from_rank0=True)
        checkpoint.load_full_optimizer_state_dict(model, optimizer, mine["optimizer"], from_rank0=True)
    for name, value in checkpoint.full_state_dict(model).items():
        assert torch.equal(value.cpu(), saved["model"][name]), name
    again = checkpoint.full_optimizer_state_dict(model, optimizer)
    for name, state in saved["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(again["state"][name][key].cpu(), value), (name, key)


def test_checkpoints_move_between_world_sizes(tmp_path: Path) -> None:
    most = 4
    run_ranks(most, save, str(tmp_path), backend="nccl")
    for world_size in range(1, most + 1):
        for form in ("rank 0", "sharded", "offloaded"):
            run_ranks(world_size, load, str(tmp_path), form, backend="nccl")


@on_ranks(1, 2, backend="nccl")
def test_a_thread_writes_what_was_in_device_memory_at_the_call(rank: int, tmp_path: Path) -> None:
    """Twice, as the second copy goes into the pinned memory of the first."""
    model = build(optimize_backward_concat=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = tokens(SMALL, rank, 1)
    manager = checkpoint.CheckpointManager(tmp_path, keep=1, async_save=True)
    for number in (1, 2):
        backward(model, batches)
        update(optimizer)
        expected = {key: value.cpu() for key, value in checkpoint.full_state_dict(model).items()}
        assert manager.save(number, model, optimizer)
        backward(model, batches)
        update(optimizer)
        assert manager.resume(model, optimizer) == (number, {})
        found = {key: value.cpu() for key, value in checkpoint.full_state_dict(model).items()}
        assert same(list(found.values()), list(expected.values()))


@on_ranks(2, backend="nccl")
def test_rank_0_writes_for_all(rank: int) -> None:
    model = build(optimize_backward_concat=True)
    with model.summon_full_params(rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            assert not model.head.weight.is_cuda
            nn.init.constant_(model.head.weight, 0.5)
    with model.summon_full_params():
        assert model.head.weight.is_cuda and bool((model.head.weight == 0.5).all())


@on_ranks(2, backend="nccl")
def test_a_gradient_scaler_finds_a_scale_together(rank: int) -> None:
    model = build(precision=Precision(compute=torch.float16), optimize_backward_concat=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0**60, growth_interval=100)
    (batch,) = tokens(SMALL, rank, 1)
    scales = []
    for _ in range(60):
        scaler.scale(model(batch, batch)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[-1] == scales[-10] < scales[0], "overflows first, then a scale that fits"
    everyone = of_all_ranks(scales)
    assert everyone[0] == everyone[1]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@FLAGS
@on_ranks(2, backend="nccl")
def test_a_step_never_waits_for_the_device(rank: int, flag: bool) -> None:
    """Nothing in a step makes the host wait for the device."""
    model = build(precision=BF16, optimize_backward_concat=flag)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    batches = tokens(SMALL, rank, 3)
    for step in range(3):
        with without_synchronisation() if step == 2 else nullcontext():
            backward(model, batches)
            model.clip_grad_norm_(1.0)
            update(optimizer)


def init_plain(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:
            nn.init.ones_(parameter)


@on_ranks(2, backend="nccl")
def test_a_meta_model_is_built_unit_by_unit(rank: int) -> None:
    """Peak memory while wrapping: this rank's half of the model, and little more than one unit."""
    config = GPTConfig(layers=16, hidden=1024, heads=16, seq=128)
    torch.manual_seed(0)
    with torch.device("meta"):
        net = GPT(config)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = auto_wrap(
        net, by_class(Block), device="cuda", param_init_fn=init_plain, optimize_backward_concat=False
    )
    peak = torch.cuda.max_memory_allocated() - before
    (batch,) = tokens(config, rank, 1)
    assert model(batch, batch).isfinite()
    assert peak < 0.7 * 4 * model.fsdp_state.shared.ledger.parameters
