"""Lightning Fabric drives the engine: the same bits as without it, checkpoints, and misuse that is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, checkpoint, microbatches
from flatfsdp.checkpoint import media
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import convert
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from tests.support.against_plain import assert_equal
from tests.support.assertions import assert_raises
from tests.support.lanes import differing
from tests.support.models import Trace, grads_of, same, same_trace, update
from tests.support.ranks import on_ranks, run_ranks

lightning = pytest.importorskip("flatfsdp.compat.lightning", reason="needs Lightning Fabric")

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, seq=16, vocab=32)
COUNT = 3
"""Microbatches of a step."""


def start(rank: int, world_size: int, **options: Any) -> Any:
    """Makes a Fabric on a rank that exists already."""
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = lightning.Fabric(
        accelerator="cpu", devices=world_size, strategy=lightning.FlatFSDPStrategy(), **options
    )
    fabric.launch()
    return fabric


def build(flag: bool = True, compiled: bool = False, **options: Any) -> FlatFSDP:
    """A GPT with FP8 layers and sharded FP8 weights."""
    model = GPT(CONFIG)
    convert(model.blocks, filter=lambda linear, name: True, fuse_wgrad_accumulation=True)
    for block in model.blocks if compiled else ():
        block.forward = torch.compile(block.forward, backend="eager")
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    options |= {"precision": precision, "optimize_backward_concat": flag}
    return auto_wrap(model, by_class(Block), **options)


def batches_of(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [
        tuple(torch.randint(0, CONFIG.vocab, (2, 2, CONFIG.seq), generator=generator)) for _ in range(COUNT)
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        return model(*batch)


def trace(
    model: FlatFSDP, optimizer: torch.optim.Optimizer, losses: list[Tensor], grads: list[Tensor]
) -> Trace:
    state = [each for p in model.parameters() for each in optimizer.state[p].values()]
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], state)


def train_plainly(model: FlatFSDP, rank: int) -> Trace:
    optimizer = adamw(model)
    losses, grads = [], []
    for step in range(2):
        for batch in microbatches(model, batches_of(step, rank)):
            losses.append(loss_of(model, batch))
            losses[-1].backward()
        grads += grads_of(model)
        model.clip_grad_norm_(0.5)
        update(optimizer)
    return trace(model, optimizer, losses, grads)


def train_with_fabric(fabric: Any, flat: FlatFSDP, *, by_hand: bool = False) -> Trace:
    """
    Args:
        by_hand: accumulate with Fabric's `no_backward_sync`, not with our `microbatches`.
    """
    flat_optimizer = adamw(flat)
    model, optimizer = fabric.setup(flat, flat_optimizer)
    losses, grads = [], []
    for step in range(2):
        batches = batches_of(step, fabric.global_rank)
        for number, batch in enumerate(batches if by_hand else microbatches(model, batches)):
            with fabric.no_backward_sync(model, enabled=by_hand and number < COUNT - 1):
                losses.append(loss_of(model, batch))
                fabric.backward(losses[-1])
        grads += grads_of(flat)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        update(optimizer)
    return trace(flat, flat_optimizer, losses, grads)


@on_ranks(1, 2)
def test_fabric_gives_the_same_bits(rank: int, world_size: int) -> None:
    """The same with the flag off, with compiled blocks, and with reductions in every microbatch."""
    expected = train_plainly(build(), rank)
    for options, by_hand in (({}, False), ({}, True), ({"flag": False}, False), ({"compiled": True}, False)):
        found = train_with_fabric(start(rank, world_size), build(**options), by_hand=by_hand)
        assert same_trace(found, expected) == dict.fromkeys(Trace._fields, True), (options, by_hand)
    often = train_plainly(build(grad_sync="every"), rank)
    # Alone it reduces nothing.
    assert same(often.grads, expected.grads) == (world_size == 1)
    for by_hand in (False, True):
        found = train_with_fabric(start(rank, world_size), build(grad_sync="every"), by_hand=by_hand)
        assert same_trace(found, often) == dict.fromkeys(Trace._fields, True), by_hand


LANES = 4
"""With one microbatch each."""


def train_in_lanes(rank: int, world_size: int, folder: Path, steps: range) -> dict[str, Tensor]:
    """Trains these steps, from a checkpoint unless they are the first, and saves; returns whole weights."""
    fabric, flat = start(rank, world_size), build(lanes=LANES)
    model, optimizer = fabric.setup(flat, adamw(flat))
    state = {"model": model, "optimizer": optimizer}
    if steps.start:
        fabric.load(folder / str(steps.start), state)
    for step in steps:
        batches = [batches_of(step, number)[0] for number in flat.microbatch_numbers(LANES)]
        for batch in microbatches(model, batches):
            fabric.backward(loss_of(model, batch) / LANES)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        update(optimizer)
    fabric.save(folder / str(steps.stop), state)
    return flat.state_dict()


def test_with_lanes_a_run_goes_on_with_its_bits_on_another_number_of_ranks(tmp_path: Path) -> None:
    expected, *_ = run_ranks(1, train_in_lanes, tmp_path / "whole", range(4))
    for before, after in ((2, 1), (1, 4)):
        folder = tmp_path / f"{before} and {after}"
        run_ranks(before, train_in_lanes, folder, range(2))
        found, *_ = run_ranks(after, train_in_lanes, folder, range(2, 4))
        assert not differing(found, expected)


@on_ranks(4)
def test_replicas_of_shard_groups(rank: int, world_size: int) -> None:
    expected = train_plainly(build(mesh=dist.init_device_mesh("cpu", (2, 2))), rank)
    flat = build(dp_shard=2)
    assert (flat.fsdp_state.grid.replicate.size, flat.fsdp_state.grid.shard.size) == (2, 2)
    found = train_with_fabric(start(rank, world_size), flat)
    assert same_trace(found, expected) == dict.fromkeys(Trace._fields, True)


# ---- checkpoints ----------------------------------------------------------------------------------------


class Run:
    """Training that can be interrupted, with a scheduler and a number beside the model."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.fabric = rank, start(rank, world_size)
        self.flat = build()
        self.optimizer = adamw(self.flat)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        model, optimizer = self.fabric.setup(self.flat, self.optimizer)
        self.state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler, "step": 0}

    def train(self, until: int) -> None:
        model, optimizer = self.state["model"], self.state["optimizer"]
        for step in range(self.state["step"], until):
            for batch in microbatches(model, batches_of(step, self.rank)):
                self.fabric.backward(loss_of(model, batch))
            update(optimizer)
            self.scheduler.step()
        self.state["step"] = until

    def result(self) -> list[Tensor]:
        schedule = torch.tensor([self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch])
        return [*trace(self.flat, self.optimizer, [], []).parameters, schedule]


@on_ranks(1, 2)
def test_a_run_goes_on_from_its_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "checkpoint"
    through, first, second = (Run(rank, world_size) for _ in range(3))
    through.train(4)
    first.train(2)
    first.fabric.save(folder, first.state)
    rest = second.fabric.load(folder, second.state)
    assert second.state["step"] == 2 and rest == {}
    second.train(4)
    assert same(second.result(), through.result())

    engine_only = build()
    checkpoint.load(folder, engine_only)
    assert same(list(engine_only.parameters()), first.result()[:-1])
    partly = Run(rank, world_size)
    rest = partly.fabric.load(folder, {"net": partly.flat})
    assert rest["step"] == 2 and set(rest) == {"step", "scheduler"}
    assert_raises(KeyError, "no epoch; it has", partly.fabric.load, folder, {"net": partly.flat, "epoch": 0})
    partly.fabric.load(folder, {"net": partly.flat, "epoch": 0}, strict=False)
    assert same(list(partly.flat.parameters()), first.result()[:-1])


@on_ranks(1, 2)
def test_a_checkpoint_is_overwritten_whole_or_not_at_all(rank: int, world_size: int, tmp_path: Path) -> None:
    run = Run(rank, world_size)
    run.fabric.save(tmp_path, run.state)
    before = run.result()
    run.train(1)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(media.os, "replace", side_effect=full):
        with pytest.raises(
            checkpoint.CheckpointError, match="was not saved: rank 0: No space left on device"
        ):
            run.fabric.save(tmp_path, run.state)
    other = Run(rank, world_size)
    other.fabric.load(tmp_path, other.state)
    assert same(other.result(), before) and other.state["step"] == 0
    run.fabric.save(tmp_path, run.state)
    other.fabric.load(tmp_path, other.state)
    assert same(other.result(), run.result()) and other.state["step"] == 1
    run.fabric.strategy._overwrite = False
    assert_raises(FileExistsError, "holds a checkpoint", run.fabric.save, tmp_path, run.state)


@on_ranks(1, 2)
def test_what_a_load_would_refuse_is_not_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    """A data loader in the state, as in litgpt: the run could not be resumed."""
    run = Run(rank, world_size)
    loader = torch.utils.data.DataLoader([1, 2, 3])
    for name, state in {"loader": loader, "data": {"train": [0, loader]}}.items():
        where = {"loader": r"\['loader'\]", "data": r"\['data'\]\['train'\]\[1\]"}[name]
        with pytest.raises(
            TypeError, match=rf"extra{where} \(DataLoader\) is more.*save plain values"
        ) as caught:
            run.fabric.save(tmp_path / name, {**run.state, name: state})
        assert caught.value.args[0].isprintable()
        assert not (tmp_path / name / ".metadata").exists()
    run.fabric.save(tmp_path, {**run.state, "rows": [1, (2, "three")], "path": None})
    run.fabric.load(tmp_path, run.state)


@on_ranks(2)
def test_the_state_dict_of_a_plain_model_can_be_loaded(rank: int, world_size: int, tmp_path: Path) -> None:
    run, saved = Run(rank, world_size), GPT(CONFIG, seed=7).state_dict()
    torch.save(saved, tmp_path / f"plain-{rank}.pt")
    run.fabric.load_raw(tmp_path / f"plain-{rank}.pt", run.state["model"])
    assert_equal(dict(run.state["model"].state_dict()), dict(saved))


# ---- other calls ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_gradients_are_clipped_by_value(rank: int, world_size: int) -> None:
    run = Run(rank, world_size)
    model, optimizer = run.state["model"], run.state["optimizer"]
    run.fabric.backward(loss_of(model, batches_of(0, rank)[0]))
    largest = [max(grad.abs().max().item() for grad in grads_of(run.flat) if grad.numel())]
    run.fabric.clip_gradients(model, optimizer, clip_val=1e-3)
    before, after = [*largest, max(grad.abs().max().item() for grad in grads_of(run.flat) if grad.numel())]
    assert before > 2e-3 and after == pytest.approx(1e-3)


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///bucket/run"])
@on_ranks(2)
def test_urls_never_become_folders(rank: int, world_size: int, tmp_path: Path, url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        fabric = start(rank, world_size)
        model = fabric.setup(build())
        for call in (
            lambda: fabric.save(url, {"model": model}),
            lambda: fabric.load(url, {"model": model}),
            lambda: fabric.load_raw(url, model),
        ):
            assert_raises(ValueError, "is a URL", call)
        assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_misuse_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no option find_unused_parameters"):
        lightning.FlatFSDPStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"precision='bf16-mixed'.*wrap the model with precision="):
        start(rank, world_size, precision="bf16-mixed")

    fabric = start(rank, world_size)
    assert_raises(TypeError, r"not a GPT; wrap it before fabric\.setup", fabric.setup, GPT(CONFIG))
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match=r"over 1 of 2 ranks.*wrap it after fabric\.launch"):
        fabric.setup(auto_wrap(GPT(CONFIG), by_class(Block), mesh=DeviceMesh.from_group(alone, "cpu")))
    elsewhere = auto_wrap(GPT(CONFIG), by_class(Block))
    elsewhere.fsdp_state.shared.device = torch.device("cuda", 0)
    assert_raises(ValueError, "model is on cuda:0, and Lightning's device is cpu", fabric.setup, elsewhere)
    plain = GPT(CONFIG)
    optimizer = adamw(plain)
    with pytest.raises(ValueError, match=r"has parameter tokens\.weight.*make it after the model is sharded"):
        fabric.setup(auto_wrap(plain, by_class(Block)), optimizer)

    model = build()
    assert_raises(ValueError, "the state has 0, 0 and 0", fabric.save, tmp_path, {"step": 1})
    with pytest.raises(ValueError, match="the state has 2, 0 and 0"):
        fabric.save(tmp_path, {"model": model, "other": build()})
    assert_raises(ValueError, "the state has 0, 0 and 0", fabric.load, tmp_path)
    with pytest.raises(NotImplementedError, match="saves whole models"):
        fabric.save(tmp_path, {"model": model}, filter={"model": lambda name, value: True})
