"""Plans from a few of many equal layers, against those of all layers; and which layers are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, Prefetch
from flatfsdp.fp8 import CurrentScaling, DelayedScaling
from flatfsdp.models import LlamaConfig
from flatfsdp.plan import Job, Model, Parallelism, Plan, plan
from flatfsdp.plan.trace import layers
from flatfsdp.plan.trace.layers import Run, runs_of

CONFIG = LlamaConfig(12, 128, 256, heads=4, kv_heads=2, vocab=512, seq=256)
BF16 = Precision(compute=torch.bfloat16)
FP8 = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())


@contextmanager
def all_layers() -> Iterator[None]:
    """Context in which plans trace every layer."""
    with mock.patch.object(layers, "runs_of", return_value=[]):
        yield


def test_a_few_layers_say_what_all_do() -> None:
    jobs = [
        Job(CONFIG, Parallelism(dp_shard=4), microbatches=1),
        Job(CONFIG, Parallelism(dp_shard=4), microbatches=4, checkpoint_layers=True),
        Job(CONFIG, Parallelism(dp_shard=4), microbatches=3, reshard_after_forward=False),
        Job(CONFIG, Parallelism(dp_shard=4), microbatches=3, grad_sync="every"),
        Job(CONFIG, Parallelism(dp_shard=4), microbatches=2, prefetch=Prefetch(0, 2)),
        Job(CONFIG, Parallelism(dp_replicate=2, dp_shard=2, tp=2, sequence_parallel=True), microbatches=3),
        Job(CONFIG, Parallelism(pp=2, dp_shard=2), microbatches=4, schedule="gpipe"),
        Job(CONFIG, Parallelism(pp=2, dp_shard=2), microbatches=4, schedule="interleaved", grad_sync="every"),
    ]
    for job in jobs:
        assert_same(plan(job), whole(job), rounding=0)


def test_a_few_fp8_layers_say_what_all_do() -> None:
    """Scales of all layers are in common tensors, whose memory is rounded up to blocks."""
    job = Job(CONFIG, Parallelism(dp_shard=4), 1, 3, FP8, DelayedScaling())
    assert_same(plan(job), whole(job), rounding=8192)


def whole(job: Job) -> Plan:
    with all_layers():
        return plan(job)


def assert_same(few: Plan, everything: Plan, rounding: int) -> None:
    assert few.memory.peak == pytest.approx(everything.memory.peak, abs=rounding)
    assert few.memory.moment == everything.memory.moment
    assert few.sent == everything.sent
    assert few.time.lines == pytest.approx(everything.time.lines, rel=1e-9)
    assert [unit.name for unit in few.units] == [unit.name for unit in everything.units]
    if not rounding:
        assert few.memory == everything.memory
        for one, other in zip(few.units, everything.units, strict=True):
            assert one[1:] == pytest.approx(other[1:], rel=1e-9)


class Both(nn.Module):
    """Two lists of layers, one after the other, with something in front of and behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList([nn.Linear(64, 96), *(nn.Linear(96, 96) for _ in range(11))])
        self.narrow = nn.ModuleList([*(nn.Linear(96, 96, bias=False) for _ in range(9)), nn.Linear(96, 32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.wide, *self.narrow):
            x = layer(x).relu()
        return x.square().mean()


def test_models_may_have_several_lists_with_other_layers_at_the_ends() -> None:
    assert runs_of(Both()) == [Run("wide", 1, 11), Run("narrow", 0, 9, behind=1)]
    job = Job(Model(Both, [torch.zeros(512, 64)] * 3), Parallelism(dp_shard=2))
    assert_same(plan(job), whole(job), rounding=0)


def test_what_layers_do_counts_and_not_only_what_they_are() -> None:
    """A list of strided convolutions: each has half of the work of the one before."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Conv1d(8, 8, 2, stride=2) for _ in range(9)))

    assert runs_of(build()) == [Run("", 0, 9)]
    batch = torch.zeros(1, 8, 2**12)
    job = Job(Model(build, [batch], loss=lambda model, x: model(x).mean()), Parallelism())
    assert plan(job) == whole(job)


class Numbered(nn.Module):
    def __init__(self, number: int, **attributes: Any) -> None:
        super().__init__()
        self.number, self.inner = number, nn.Linear(8, 8)
        vars(self).update(attributes)


def test_layers_that_differ_are_not_alike() -> None:
    def lengths(found: list[nn.Module], **attributes: Any) -> list[int]:
        model = nn.Module()
        vars(model).update(attributes)
        model.layers = nn.ModuleList(found)
        return [run.count for run in runs_of(model)]

    assert lengths([Numbered(at) for at in range(6)]) == [6]
    assert lengths([Numbered(at, window=None if at < 4 else 16) for at in range(6)]) == [4]
    assert lengths([Numbered(at, rate=0.1 * at) for at in range(6)]) == [1]
    frozen = [Numbered(at) for at in range(6)]
    frozen[0].inner.requires_grad_(False)
    assert lengths(frozen) == [5]
    kinds = SimpleNamespace(layer_types=["full", "full", "near", "near", "near", "full"])
    assert lengths([Numbered(at) for at in range(6)], config=kinds) == [3]
    one = Numbered(0)
    assert lengths([one, one, *(Numbered(at) for at in range(2, 5))]) == [3]
    tied = [Numbered(at) for at in range(6)]
    tied[5].inner.weight = tied[4].inner.weight
    assert lengths(tied) == [4]
