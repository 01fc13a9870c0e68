"""Memory of a model: every buffer of the engine, its owner and its lifetime.

In:   the units of one model.
Out:  a `MemoryReport`, whose rows add up; `print` shows it as a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.text_table import plain_table
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.policy import Prefetch

GIB = 2**30
ALWAYS = "always"
_OPTIMIZER = "the optimizer"
RESERVED = "reserved, with the recordings"


class Size(NamedTuple):
    """Length and dtype of one buffer.

    Attributes:
        placement: whether tensor-parallel ranks split it or each have all of it; None without them.
    """

    numel: int
    dtype: torch.dtype
    placement: Placement | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class MemoryRow:
    """Buffers of one kind, dtype and placement on this rank.

    Attributes:
        placement: whether tensor-parallel ranks split the parameters of these buffers; None without them.
        count: number of buffers.
        total: bytes of all these buffers.
        at_a_time: largest number of bytes that exist at one time.
        lives: lifetime, in words.
    """

    buffer: str
    owner: str
    dtype: torch.dtype
    count: int
    total: int
    at_a_time: int
    lives: str
    placement: Placement | None = None

    @property
    def label(self) -> str:
        """The buffer's name, with its placement."""
        return self.buffer if self.placement is None else f"{self.buffer}, {self.placement.value}"


@dataclass(frozen=True)
class MemoryReport:
    """Memory that one model takes on this rank's device, in bytes.

    Attributes:
        static: bytes that stay allocated between two steps, without gradients other than those that replays
            keep.
        peak: the sum of `at_a_time`.  Activations come on top; those of recorded microbatches are in the row
            of their memory pool, beside buffers of other rows that live only within a recording.
    """

    rows: tuple[MemoryRow, ...]

    @property
    def static(self) -> int:
        """Bytes that are always there."""
        return sum(row.total for row in self.rows if row.lives == ALWAYS)

    @property
    def peak(self) -> int:
        """Bytes of all buffers that can be there at a time."""
        return sum(row.at_a_time for row in self.rows)

    def __str__(self) -> str:
        heads = ("buffer", "owner", "dtype", "count", "GiB", "at a time", "lives")
        lines = [
            (
                *(row.label, row.owner, str(row.dtype).removeprefix("torch."), str(row.count)),
                *(f"{nbytes / GIB:.3f}" for nbytes in (row.total, row.at_a_time)),
                row.lives,
            )
            for row in self.rows
        ]
        table = plain_table([heads, *lines], right=(3, 4, 5))
        return f"{table}\n{self.static / GIB:.3f} GiB between steps, {self.peak / GIB:.3f} at most"


_PASSING = (
    ("flat_buffer", "flat buffer", "FlatGroup", "unshard to reshard"),
    ("transposed", "transposed weights", "FP8Weights", "unshard for backward to reshard"),
    ("main_grad", "main_grad", "MainGrad", "first gradient to reduction"),
    ("reduced_grad", "reduced gradient", _OPTIMIZER, "reduction to zero_grad"),
)
"""Buffers that live for a part of a step, unless recorded microbatches keep them at one address.

Name in `GroupSizes`, buffer, owner and lifetime.
"""

_GATHERED = ("flat_buffer", "transposed")
"""Those of them that a few units have at one time; each unit may have the others."""


class GroupSizes(NamedTuple):
    """Sizes of one flat group's buffers on this rank's device; None: no such buffer, or in CPU memory.

    Attributes:
        flat_buffer: gathered parameters.
        transposed: transposes of FP8 weights.
        main_grad: unsharded gradients, summed over microbatches.
        stay: names of the buffers, of the last four fields, that recorded microbatches keep for good.
    """

    master: Size | None
    compute_shard: Size | None
    flat_buffer: Size | None
    transposed: Size | None
    main_grad: Size | None
    reduced_grad: Size | None
    stay: frozenset[str] = frozenset()


def memory_report(root: Root, prefetch: Prefetch, optimizer: torch.optim.Optimizer | None) -> MemoryReport:
    """See `FlatFSDP.memory_report`."""
    state = [] if optimizer is None else _state_of(root.groups, optimizer)
    frees = any(group.unit.policy.reshard_after_forward for group in root.groups)
    report = report_of(sizes_of(root), state, units_ahead(prefetch) if frees else None)
    pools = [pool.nbytes for pool in root.pools if pool.nbytes]
    if not pools:
        return report
    # Activations, and buffers that live only within a recording: bytes without a dtype of their own.
    kind, total = ("pool of recordings", "flatfsdp.replayed", torch.uint8), sum(pools)
    return MemoryReport((*report.rows, MemoryRow(*kind, len(pools), total, total, RESERVED)))


def units_ahead(prefetch: Prefetch) -> int:
    """Largest number of units gathered ahead of the running one."""
    return max(prefetch.forward, prefetch.backward)


def report_of(
    units: Sequence[Sequence[GroupSizes]], state: Iterable[Size], ahead: int | None
) -> MemoryReport:
    """Makes a report of buffers of these sizes.

    Args:
        units: sizes of each unit's groups, the root's own first.
        state: sizes of the optimizer's state.
        ahead: number of units gathered beside the running one; None: all units stay gathered until the last
            microbatch.
    """

    def of(name: str, *, stays: bool = False) -> list[list[Size]]:
        return [[s for g in unit if (s := getattr(g, name)) and (name in g.stay) is stays] for unit in units]

    rows = [
        *_rows("master shard", "MasterShard", ALWAYS, of("master")),
        *_rows("compute shard", "ComputeShard", ALWAYS, of("compute_shard")),
        *_rows("optimizer state", _OPTIMIZER, ALWAYS, [list(state)]),
    ]
    for name, buffer, owner, _ in _PASSING:
        # The optimizer zeroes what it is given, and the group has its memory for the next step.
        keeper = "FlatGroup" if owner == _OPTIMIZER else owner
        rows += _rows(f"{buffer}, for replays", keeper, ALWAYS, of(name, stays=True))
    for name, buffer, owner, lives in _PASSING:
        rows += _rows(buffer, owner, lives, of(name), ahead if name in _GATHERED else None)
    return MemoryReport(tuple(rows))


def sizes_of(root: Root) -> list[list[GroupSizes]]:
    """Sizes of the buffers of each unit's groups, the root's own first."""
    return [[_sizes_of(group) for group in unit.groups] for unit in root.units]


def _sizes_of(group: FlatGroup) -> GroupSizes:
    """Sizes of a group's permanent buffers, and of those that appear in a step."""
    placement = None if group.grid.tensor.size == 1 else group.layout.placement
    master, shard, precision = group.master, group.compute_shard, group.unit.policy.precision
    columnwise = None if group.fp8 is None else group.fp8.columnwise
    keeping = {"flat_buffer": group.buffer, "transposed": columnwise, "main_grad": group.main_grad}
    stay = {name for name, buffer in keeping.items() if buffer is not None and buffer.stays}

    def size(numel: int, dtype: torch.dtype, *, exists: bool = True) -> Size | None:
        return Size(numel, dtype, placement) if exists else None

    def size_of(tensor: Tensor, *, exists: bool = True) -> Size | None:
        return size(tensor.numel(), tensor.dtype, exists=exists)

    padded, on_device = group.layout.padded_numel(group.grid.shard.size), not master.is_offloaded
    return GroupSizes(
        master=size_of(master.flat, exists=on_device),
        compute_shard=size_of(shard.tensor, exists=shard.has_own_memory),
        flat_buffer=None if group.buffer is None else size_of(group.buffer.tensor),
        transposed=None if columnwise is None else size_of(columnwise.tensor),
        # Not by their tensors, which come and go within a step: a report is the same at any time.
        main_grad=size(padded, precision.accumulate, exists=group.trains),
        reduced_grad=size(master.flat.numel(), master.grad_dtype, exists=group.trains and on_device),
        stay=frozenset(stay if group.kept_grad is None else {*stay, "reduced_grad"}),
    )


def buffers_of(group: FlatGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a group has now, with their names in the report."""
    yield "master shard", group.master.flat
    yield "compute shard", group.compute_shard.tensor
    if group.buffer is not None:
        yield "flat buffer", group.buffer.tensor
    if group.fp8 is not None:
        yield "transposed weights", group.fp8.columnwise.tensor
    if group.main_grad is not None and group.main_grad.tensor is not None:
        yield "main_grad", group.main_grad.tensor
    for grad in group.master.grads:
        yield "reduced gradient", grad


def _state_of(groups: Iterable[FlatGroup], optimizer: torch.optim.Optimizer) -> Iterator[Size]:
    """Sizes of the optimizer's state for these groups; it may also update others, such as other stages'."""
    for master in (group.master for group in groups):
        for portion in master.portions:
            for value in optimizer.state.get(portion.parameter, {}).values():
                if isinstance(value, Tensor) and value.device == master.device:
                    yield Size(value.numel(), value.dtype)


def _rows(
    buffer: str, owner: str, lives: str, units: Sequence[Sequence[Size]], ahead: int | None = None
) -> Iterator[MemoryRow]:
    """One row a dtype and placement, for the buffers of this name in each unit.

    Args:
        ahead: the root, the running unit and as many ahead have their buffers at one time; None: all units.
    """
    for kind in dict.fromkeys(size[1:] for unit in units for size in unit):
        of_kind = [[size.nbytes for size in unit if size[1:] == kind] for unit in units]
        each, count = list(map(sum, of_kind)), sum(map(len, of_kind))
        at_a_time = sum(each) if ahead is None else each[0] + largest_window(each[1:], ahead)
        dtype, placement = kind
        yield MemoryRow(buffer, owner, dtype, count, sum(each), at_a_time, lives, placement)


def largest_window(sizes: Sequence[int], ahead: int) -> int:
    """Largest sum of `ahead` + 1 consecutive sizes."""
    return max((sum(sizes[start : start + 1 + ahead]) for start in range(len(sizes))), default=0)
