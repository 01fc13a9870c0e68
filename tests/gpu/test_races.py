"""Results are bit-equal however long each stream takes: many trainings with delays on each stream.

A stream that does not wait for another one, or memory shared by two of them, shows as a difference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from flatfsdp import Precision
from flatfsdp.comm.streams import SideStream
from tests.support.gpu.marks import NEEDS_GPU
from tests.support.gpu.models import BF16, SMALL, build, tokens, train
from tests.support.models import Trace, repeatable, same_trace
from tests.support.ranks import run_ranks

pytestmark = NEEDS_GPU
REPETITIONS = 10
CYCLES = 2_000_000
"""The longest delay: a millisecond, several times the duration of a unit of the small model."""


@contextmanager
def delays(rank: int) -> Iterator[None]:
    """Sleeps around the work of a side stream, and before it on the compute stream, in one of three cases."""
    chance = random.Random(rank)

    def sleep() -> None:
        if chance.random() < 1 / 3:
            torch.cuda._sleep(chance.randrange(CYCLES))

    after_compute = SideStream.after_compute

    @contextmanager
    def delayed(stream: SideStream) -> Iterator[None]:
        sleep()
        with after_compute(stream):
            sleep()
            yield
            sleep()

    with mock.patch.object(SideStream, "after_compute", delayed):
        yield


@repeatable()
def differences(
    rank: int, world_size: int, is_hybrid: bool, options: dict[str, Any], repetitions: int
) -> list[str]:
    """The differences of delayed trainings from the first one, with the flag off and on."""
    mesh = dist.init_device_mesh("cuda", (2, 2)) if is_hybrid else None
    batches, found = tokens(SMALL, rank, 3), []
    expected: Trace | None = None
    for repetition in range(repetitions):
        for flag in (False, True):
            with ExitStack() as stack:
                if expected is not None:
                    stack.enter_context(delays(1000 * repetition + rank))
                trace = train(build(mesh=mesh, optimize_backward_concat=flag, **options), batches)
            expected = expected or trace
            equal = same_trace(expected, trace)
            found += [f"{repetition}, flag {flag}: {what}" for what, is_same in equal.items() if not is_same]
    return found


@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("is_hybrid", [True, False], ids=["hybrid", "sharded"])
def test_delays_change_no_bit(is_hybrid: bool, precision: Precision, reshard: bool, sync: str) -> None:
    options = {"precision": precision, "reshard_after_forward": reshard, "grad_sync": sync}
    arguments = (is_hybrid, options, REPETITIONS if precision == Precision() else 3)
    for found in run_ranks(4, differences, *arguments, backend="nccl", timeout=280):
        assert found == []


def differences_without_waiting(rank: int, world_size: int) -> bool:
    """The compute stream does not wait for reductions: an intentional race."""
    with mock.patch("flatfsdp.engine.step.reduce.compute_waits_for"):
        try:
            return bool(differences(rank, world_size, True, {}, 4))
        except AssertionError:
            # The loss is not even finite.
            return True


def test_a_missing_wait_is_seen() -> None:
    assert any(run_ranks(4, differences_without_waiting, backend="nccl"))
