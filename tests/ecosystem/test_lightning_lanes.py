"""Lightning's Trainer with lanes: a fit has the same bits on any number of ranks, also one that changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from flatfsdp import by_class
from tests.support.assertions import assert_raises
from tests.support.ranks import on_ranks, run_ranks

L = pytest.importorskip("lightning", reason="needs Lightning")

from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint  # noqa: E402

from flatfsdp.checkpoint import CheckpointError  # noqa: E402
from flatfsdp.compat.lightning.trainer import FlatFSDPStrategy  # noqa: E402
from tests.ecosystem.test_lightning import Program, trainer  # noqa: E402

TOTAL, SAMPLES = 8, 40
"""Microbatches of a step, of two samples each: an epoch has steps of 8, 8 and 4."""

Result = tuple[dict[int, Tensor], dict[str, Tensor]]


class Recorded(Program):
    """Keeps the gradient's norms of each step; asks for data early, as schedulers of a known length do."""

    def __init__(self, rate: float = 0.05, dropout: float = 0.2) -> None:
        super().__init__(rate)
        self.dropout = nn.Dropout(dropout)
        self.norms: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = torch.stack([torch.as_tensor(p.grad.norm()) for p in self.parameters()])
        self.norms[self.trainer.global_step] = norms

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.rate, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def data(samples: int = SAMPLES, **options: Any) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(list(torch.randn(samples, 8, generator=generator)), batch_size=2, **options)


def fitted(
    rank: int,
    world_size: int,
    folder: Path,
    strategy: Any,
    total: int = TOTAL,
    samples: int = SAMPLES,
    dropout: float = 0.2,
    resumes: str | None = None,
    own_sampler: bool = False,
    **options: Any,
) -> Result:
    """Norms of each step, and the whole weights at the end; saves after each step below `folder`.

    Args:
        strategy: the Trainer's; a number stands for FlatFSDP with as many lanes.
        own_sampler: pass the sampler that the Trainer would make, in one loader of training and validation.
    """
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    at_ends = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    torch.manual_seed(rank)
    module = Recorded(dropout=dropout)
    if isinstance(strategy, int):
        strategy = FlatFSDPStrategy(by_class(nn.Sequential), lanes=strategy)
    run = trainer(
        rank,
        world_size,
        folder,
        strategy,
        accumulate_grad_batches=total // world_size,
        enable_checkpointing=True,
        callbacks=[saves, at_ends],
        **{"max_epochs": 2, "gradient_clip_val": 0.1, **options},
    )
    sampler: Any = DistributedSampler(range(samples), world_size, rank) if own_sampler else None
    loader = data(samples, sampler=sampler)
    run.fit(module, loader, loader, ckpt_path=None if resumes is None else str(folder / resumes))
    return module.norms, module.state_dict()


def assert_same(found: list[Result], expected: Result) -> None:
    for norms, weights in found:
        assert [step for step, value in norms.items() if not torch.equal(value, expected[0][step])] == []
        assert [name for name, value in weights.items() if not torch.equal(value, expected[1][name])] == []


def test_any_number_of_ranks_has_the_same_bits_and_goes_on_with_them(tmp_path: Path) -> None:
    # Twelve lanes: steps of 24, 24 and 12 microbatches.
    run = partial(fitted, total=24, samples=120)
    expected, *_ = run_ranks(1, run, tmp_path / "1", 12)
    assert list(expected[0]) == list(range(6))
    for world_size in (2, 3, 4):
        found = run_ranks(world_size, run, tmp_path / str(world_size), 12)
        assert len(found[0][0]) == 6
        assert_same(found, expected)
    # From within an epoch, and from the end of one.
    within = run_ranks(4, partial(run, resumes="step=4.ckpt"), tmp_path / "2", 12)
    assert list(within[0][0]) == [4, 5]
    assert_same(within, expected)
    at_end = run_ranks(1, partial(run, resumes="epoch=0.ckpt"), tmp_path / "3", 12)
    assert list(at_end[0][0]) == [3, 4, 5]
    assert_same(at_end, expected)


def test_shares_of_losses_are_rounded_once(tmp_path: Path) -> None:
    """1 / 123 is not what 1 / 3, divided by the 41 microbatches of a rank, is rounded to."""
    run = partial(fitted, total=123, samples=246, max_epochs=1)
    expected, *_ = run_ranks(1, run, tmp_path / "1", 3)
    assert_same(run_ranks(3, run, tmp_path / "3", 3), expected)


def test_with_one_microbatch_a_lane_they_are_those_of_ddp_on_one_rank(tmp_path: Path) -> None:
    options = {"total": 12, "samples": 48, "dropout": 0.0, "gradient_clip_val": None}
    expected, *_ = run_ranks(1, partial(fitted, **options), tmp_path / "ddp", "ddp")
    for world_size in (1, 3, 4):
        (_, weights), *_ = run_ranks(world_size, partial(fitted, **options), tmp_path / str(world_size), 12)
        assert [name for name, value in weights.items() if not torch.equal(value, expected[1][name])] == []


class Skips(Program):
    """Has no loss in the last microbatch of a step."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return None if index % TOTAL == TOTAL - 1 else super().training_step(batch, index)


class Stateful(DataLoader[Tensor]):
    """Has a position, as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignores it."""


class EndsEarly(Program):
    """Ends each epoch within a step."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> int | None:
        return -1 if index == 2 else None


class Counts(Program):
    """Changes its learning rate with every second microbatch of a rank."""

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


def fit(
    rank: int,
    world_size: int,
    folder: Path,
    loader: Any,
    module: Any = None,
    lanes: int = 4,
    resumes: Path | None = None,
    **options: Any,
) -> Any:
    options = {"accumulate_grad_batches": TOTAL // world_size, "max_epochs": 1, **options}
    run = trainer(rank, world_size, folder, FlatFSDPStrategy(lanes=lanes), **options)
    run.fit(Program() if module is None else module, loader, ckpt_path=resumes)
    return run


@on_ranks(2)
def test_what_depends_on_the_number_of_ranks_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    def refused(words: str, loader: Any = None, *args: Any, **options: Any) -> None:
        loader = data() if loader is None else loader
        assert_raises(ValueError, words, fit, rank, world_size, tmp_path, loader, *args, **options)

    refused(
        "accumulate_grad_batches=3 on 2 ranks are 6 microbatches a step over 4 lanes",
        accumulate_grad_batches=3,
    )
    refused("36 samples .* an epoch 4 are left, .* drop_last=True", data(36))
    fit(rank, world_size, tmp_path, data(36, drop_last=True))
    for limit in ({"limit_train_batches": 8}, {"overfit_batches": 4}, {"fast_dev_run": 8}):
        refused("[48] of the 10 batches of an epoch: limit_train_batches, .* take max_steps", **limit)
    once = {"accumulate_grad_batches": 1, "lanes": 2}
    schedule = GradientAccumulationScheduler({0: 2})
    refused("has become 2, .* leave out GradientAccumulationScheduler", callbacks=[schedule], **once)
    refused("lanes with manual optimization", None, Program(manual=True), **once)
    sampler = SequentialSampler(range(SAMPLES))
    refused("with its own batches and no sampler", data(sampler=sampler), use_distributed_sampler=False)
    refused("and Stateful would do so once more", Stateful(list(torch.zeros(SAMPLES, 8)), batch_size=2))
    refused("lanes with 2 loaders of training data", [data(), data()])
    refused("scheduler with frequency=2", None, Counts())


class SavesWithin(L.Callback):
    """Saves after three microbatches of a rank."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            trainer.save_checkpoint(self._path)


@on_ranks(2)
def test_a_checkpoint_of_other_steps_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    def refused(error: type[Exception], words: str, **options: Any) -> None:
        assert_raises(error, words, fit, rank, world_size, tmp_path, data(), **options)

    fitted(rank, world_size, tmp_path / "with", 4, max_epochs=1)
    saved = tmp_path / "with" / "step=1.ckpt"
    refused(CheckpointError, "lanes", lanes=2, resumes=saved)
    words = "have 8 microbatches, and accumulate_grad_batches=2 on 2 ranks are 4"
    refused(ValueError, words, accumulate_grad_batches=2, resumes=saved)
    fitted(rank, world_size, tmp_path / "without", FlatFSDPStrategy(), max_epochs=1)
    refused(ValueError, "saved without lanes, .* begin from", resumes=tmp_path / "without" / "step=1.ckpt")
    fit(rank, world_size, tmp_path, data(), callbacks=[SavesWithin(tmp_path / "within.ckpt")])
    words = "after 6 microbatches of an epoch, within a step of 8"
    refused(ValueError, words, resumes=tmp_path / "within.ckpt")


def test_steps_that_are_not_whole_raise(tmp_path: Path) -> None:
    run_ranks(1, incomplete, tmp_path)


def incomplete(rank: int, world_size: int, folder: Path) -> None:
    words = "an optimizer's step 1 backwards before its end"
    assert_raises(RuntimeError, words, fit, rank, world_size, folder, data(), Skips())
    # What such a step has accumulated is dropped, and the next epoch begins with a whole one.
    run = fit(rank, world_size, folder, data(), EndsEarly(), max_epochs=2)
    assert run.global_step == 0


def test_validation_within_an_epoch_changes_nothing(tmp_path: Path) -> None:
    expected, *_ = run_ranks(1, partial(fitted, max_epochs=1), tmp_path / "1", 4)
    options = {"max_epochs": 1, "val_check_interval": 3, "own_sampler": True}
    assert_same(run_ranks(2, partial(fitted, **options), tmp_path / "2", 4), expected)
