"""Lightning's Trainer with lanes: a fit has the same bits on any number of ranks, also one that changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

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


class WithDropout(Program):
    """Keeps the gradient's norm of each step."""

    def __init__(self, rate: float = 0.05, dropout: float = 0.2) -> None:
        super().__init__(rate)
        self.dropout = nn.Dropout(dropout)
        self.norms: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = torch.stack([torch.as_tensor(p.grad.norm()) for p in self.parameters()])
        self.norms[self.trainer.global_step] = norms


def data(samples: int = SAMPLES, **options: Any) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(list(torch.randn(samples, 8, generator=generator)), batch_size=2, **options)


def fitted(
    rank: int,
    world_size: int,
    folder: Path,
    strategy: Any,
    total: int = TOTAL,
    dropout: float = 0.2,
    resumes: str | None = None,
    **options: Any,
) -> Result:
    """Norms of each step, and the whole weights at the end; saves after each step below `folder`.

    Args:
        strategy: the Trainer's; a number stands for FlatFSDP with as many lanes.
    """
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    at_ends = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    torch.manual_seed(rank)
    module = WithDropout(dropout=dropout)
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
    run.fit(module, data(), data(), ckpt_path=None if resumes is None else str(folder / resumes))
    return module.norms, module.state_dict()


def assert_same(found: list[Result], expected: Result) -> None:
    for norms, weights in found:
        assert [step for step, value in norms.items() if not torch.equal(value, expected[0][step])] == []
        assert [name for name, value in weights.items() if not torch.equal(value, expected[1][name])] == []


def test_any_number_of_ranks_has_the_same_bits_and_goes_on_with_them(tmp_path: Path) -> None:
    expected, *_ = run_ranks(1, fitted, tmp_path / "1", 4)
    assert list(expected[0]) == list(range(6))
    for world_size in (2, 4):
        found = run_ranks(world_size, fitted, tmp_path / str(world_size), 4)
        assert len(found[0][0]) == 6
        assert_same(found, expected)
    # From within an epoch, and from the end of one.
    within = run_ranks(4, partial(fitted, resumes="step=4.ckpt"), tmp_path / "2", 4)
    assert list(within[0][0]) == [4, 5]
    assert_same(within, expected)
    at_end = run_ranks(1, partial(fitted, resumes="epoch=0.ckpt"), tmp_path / "4", 4)
    assert list(at_end[0][0]) == [3, 4, 5]
    assert_same(at_end, expected)


def test_with_one_microbatch_a_lane_they_are_those_of_ddp_on_one_rank(tmp_path: Path) -> None:
    options = {"total": 4, "dropout": 0.0, "gradient_clip_val": None}
    expected, *_ = run_ranks(1, partial(fitted, **options), tmp_path / "ddp", "ddp")
    for world_size in (1, 4):
        (_, weights), *_ = run_ranks(world_size, partial(fitted, **options), tmp_path / str(world_size), 4)
        assert [name for name, value in weights.items() if not torch.equal(value, expected[1][name])] == []


@on_ranks(2)
def test_what_depends_on_the_number_of_ranks_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    def fit(
        loader: DataLoader[Tensor],
        lanes: int = 4,
        manual: bool = False,
        resumes: Path | None = None,
        **options: Any,
    ) -> None:
        options = {"accumulate_grad_batches": 4, "max_epochs": 1, **options}
        run = trainer(rank, world_size, tmp_path, FlatFSDPStrategy(lanes=lanes), **options)
        run.fit(Program(manual=manual), loader, ckpt_path=resumes)

    words = "accumulate_grad_batches=3 on 2 ranks are 6 microbatches a step over 4 lanes"
    assert_raises(ValueError, words, fit, data(), accumulate_grad_batches=3)
    assert_raises(ValueError, "36 samples .* an epoch 4 are left, .* drop_last=True", fit, data(36))
    fit(data(36, drop_last=True))
    words = "ends an epoch after 2 of the 4 microbatches of a step; .* multiple of accumulate_grad_batches=4"
    assert_raises(ValueError, words, fit, data(), limit_train_batches=6)
    schedule = GradientAccumulationScheduler({0: 2})
    words = "has become 2, .* leave out GradientAccumulationScheduler"
    once = {"accumulate_grad_batches": 1, "lanes": 2}
    assert_raises(ValueError, words, fit, data(), callbacks=[schedule], **once)
    assert_raises(ValueError, "lanes with manual optimization", fit, data(), manual=True, **once)
    loader = data(sampler=SequentialSampler(range(SAMPLES)))
    assert_raises(
        ValueError, "with its own batches and no sampler", fit, loader, use_distributed_sampler=False
    )
    fitted(rank, world_size, tmp_path / "saved", 4, max_epochs=1)
    saved = tmp_path / "saved" / "step=1.ckpt"
    assert_raises(CheckpointError, "lanes", fit, data(), lanes=2, resumes=saved)
    fitted(rank, world_size, tmp_path / "without", FlatFSDPStrategy(), max_epochs=1)
    without = tmp_path / "without" / "step=1.ckpt"
    assert_raises(ValueError, "saved without lanes, .* begin from its weights", fit, data(), resumes=without)
    words = "have 8 microbatches, and accumulate_grad_batches=2 on 2 ranks are 4"
    assert_raises(ValueError, words, fit, data(), accumulate_grad_batches=2, resumes=saved)


@on_ranks(3)
def test_three_ranks_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    run = trainer(rank, world_size, tmp_path, FlatFSDPStrategy(lanes=3))
    assert_raises(ValueError, "lanes on 3 ranks: .* take 1, 2, 4, 8", run.fit, Program(), data())
