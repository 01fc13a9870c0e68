"""The memory report, against the tensors that really exist."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class
from flatfsdp.engine.replay.eager_or_replayed import keep_addresses
from flatfsdp.engine.whole.memory import MemoryReport
from flatfsdp.engine.whole.units import root_of
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import CurrentScaling, autocast
from tests.support.fp8_layers import TOKENS, WIDTH, Block, Stack, seeded


def build(*, in_fp8: bool, compute: torch.dtype = torch.bfloat16) -> FlatFSDP:
    precision = Precision(compute=compute, fp8_weights=CurrentScaling() if in_fp8 else None)
    return auto_wrap(seeded(partial(Stack, blocks=3)), by_class(Block), precision=precision)


def total(report: MemoryReport, buffer: str) -> int:
    return sum(row.total for row in report.rows if row.buffer == buffer)


def test_bytes_of_each_kind_of_buffer() -> None:
    model = build(in_fp8=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with autocast(recipe=CurrentScaling()):
        model(torch.randn(TOKENS, WIDTH)).square().mean().backward()
    report = model.memory_report(optimizer)
    groups = root_of(model.module).groups
    numel = sum(group.master.flat.numel() for group in groups)
    in_fp8 = sum(group.master.flat.numel() for group in groups if group.layout.role is Role.FP8)
    parameters = list(model.parameters())
    # Shards have padding, which is no parameter's.
    shards = sum(parameter.numel() for parameter in parameters)
    assert 0 < in_fp8 < shards <= numel
    assert total(report, "master shard") == 4 * numel
    assert total(report, "compute shard") == in_fp8 + 2 * (numel - in_fp8)
    assert total(report, "transposed weights") == in_fp8
    assert total(report, "main_grad") == total(report, "reduced gradient") == 4 * numel
    assert total(report, "optimizer state") == 0
    optimizer.step()
    report = model.memory_report(optimizer)
    # Two moments, and a step count a parameter.
    assert total(report, "optimizer state") == 8 * shards + 4 * len(parameters)
    assert report.static == sum(
        total(report, buffer) for buffer in ("master shard", "compute shard", "optimizer state")
    )
    assert report.static < report.peak


def test_what_replays_keep_is_there_always() -> None:
    model = build(in_fp8=True)
    before = model.memory_report()
    for is_summed in (False, True):
        keep_addresses(root_of(model.module), of_sums=is_summed)
        report = model.memory_report()
        kept = [row for row in report.rows if row.buffer.endswith(", for replays")]
        assert {row.lives for row in kept} == {"always"}
        sums = total(report, "main_grad, for replays")
        assert sums == (total(before, "main_grad") if is_summed else 0)
        assert total(report, "reduced gradient, for replays") == total(before, "reduced gradient") > 0
        # What is listed moves from one row to another.
        assert sum(row.total for row in report.rows) == sum(row.total for row in before.rows)
        assert report.static == before.static + sum(row.total for row in kept)


class Pool:
    """Stands for the pool of recordings, which only GPUs have."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_the_pool_of_recordings_is_a_row_while_it_is_there() -> None:
    model = build(in_fp8=False)
    before, empty, pool = model.memory_report(), Pool(0), Pool(7)
    root_of(model.module).pools.update((empty, pool))
    report = model.memory_report()
    assert report.rows[:-1] == before.rows
    row = report.rows[-1]
    assert (row.buffer, row.count, row.total) == ("pool of recordings", 1, 7)
    # Reserved, and not allocated: nothing lives there between steps.
    assert report.static == before.static and report.peak == before.peak + 7
    del pool
    assert model.memory_report() == before


def test_a_shard_that_needs_no_cast_has_no_copy() -> None:
    report = build(in_fp8=False, compute=torch.float32).memory_report()
    assert total(report, "compute shard") == total(report, "flat buffer") == 0


def test_sizes_have_a_unit_that_shows_them() -> None:
    report = build(in_fp8=False).memory_report()
    assert f"{report.peak / 2**20:.3f} at most" in str(report) and " MiB between steps" in str(report)
    large = MemoryReport((replace(report.rows[0], total=2**30, at_a_time=2**30),))
    assert str(large).endswith("1.000 GiB between steps, 1.000 at most")


def test_the_table_says_it_all() -> None:
    report = build(in_fp8=True).memory_report()
    lines = str(report).splitlines()
    assert len(lines) == len(report.rows) + 2
    for row, line in zip(report.rows, lines[1:], strict=False):
        assert line.startswith(row.buffer) and line.endswith(row.lives)
