"""Memory of a model: every buffer of the engine, its owner and its lifetime.

In:   the units of one model.
Out:  a `MemoryReport`, whose rows add up; `print` shows it as a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


_OF_REPLAYS = (
    ("flat_buffer", "flat buffer", "FlatGroup"),
    ("transposed", "transposed weights", "FP8Weights"),
    ("main_grad", "main_grad", "MainGrad"),
    ("reduced_grad", "reduced gradient", "FlatGroup"),
)
"""Buffers that recorded microbatches may keep at one address: name in `GroupSizes`, buffer and owner."""


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

    def passing(self, name: str) -> Size | None:
        """Size of the buffer of this name if it is freed in between; None otherwise."""
        return None if name in self.stay else getattr(self, name)

    def staying(self, name: str) -> Size | None:
        """Size of the buffer of this name if it stays for good; None otherwise."""
        return getattr(self, name) if name in self.stay else None


def memory_report(root: Root, prefetch: Prefetch, optimizer: torch.optim.Optimizer | None) -> MemoryReport:
    """See `FlatFSDP.memory_report`."""
    groups = root.groups
    state = [] if optimizer is None else list(_state_of(groups, optimizer))
    frees = any(group.unit.policy.reshard_after_forward for group in groups)
    report = report_of(sizes_of(root), state, units_ahead(prefetch) if frees else None)
    pools = [pool.nbytes for pool in root.pools]
    return MemoryReport((*report.rows, *_rows_of_pools([nbytes for nbytes in pools if nbytes])))


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
    groups = [group for unit in units for group in unit]
    rows = [
        *_rows("master shard", "MasterShard", ALWAYS, (g.master for g in groups)),
        *_rows("compute shard", "ComputeShard", ALWAYS, (g.compute_shard for g in groups)),
        *_rows("optimizer state", "the optimizer", ALWAYS, state),
    ]
    for name, buffer, owner in _OF_REPLAYS:
        rows += _rows(f"{buffer}, for replays", owner, ALWAYS, (g.staying(name) for g in groups))
    rows += [
        *_unsharded(
            "flat buffer",
            "FlatGroup",
            "unshard to reshard",
            [[g.passing("flat_buffer") for g in u] for u in units],
            ahead,
        ),
        *_unsharded(
            "transposed weights",
            "FP8Weights",
            "unshard for backward to reshard",
            [[g.passing("transposed") for g in u] for u in units],
            ahead,
        ),
        *_rows(
            "main_grad", "MainGrad", "first gradient to reduction", (g.passing("main_grad") for g in groups)
        ),
        *_rows(
            "reduced gradient",
            "the optimizer",
            "reduction to zero_grad",
            (g.passing("reduced_grad") for g in groups),
        ),
    ]
    return MemoryReport(tuple(rows))


def _sizes_of(group: FlatGroup) -> GroupSizes:
    """Sizes of a group's permanent buffers, and of those that appear in a step."""
    placement = None if group.grid.tensor.size == 1 else group.layout.placement
    shard, master, columnwise = group.compute_shard, group.master, group.operands.columnwise

    def size(tensor: Tensor) -> Size:
        return Size(tensor.numel(), tensor.dtype, placement)

    padded, on_device = group.layout.padded_numel(group.grid.shard.size), not master.is_offloaded
    trained = group.trains
    return GroupSizes(
        master=size(master.flat) if on_device else None,
        compute_shard=size(shard.tensor) if shard.has_own_memory else None,
        flat_buffer=None if group.buffer is None else size(group.buffer.tensor),
        transposed=None if columnwise is None else size(columnwise.tensor),
        main_grad=Size(padded, group.unit.policy.precision.accumulate, placement) if trained else None,
        reduced_grad=(
            Size(master.flat.numel(), master.grad_dtype, placement) if trained and on_device else None
        ),
        stay=frozenset(_staying(group)),
    )


def buffers_of(group: FlatGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a group has now, with their names in the report."""
    yield "master shard", group.master.flat
    yield "compute shard", group.compute_shard.tensor
    if group.buffer is not None:
        yield "flat buffer", group.buffer.tensor
    if group.operands.columnwise is not None:
        yield "transposed weights", group.operands.columnwise.tensor
    if group.main_grad is not None and group.main_grad.tensor is not None:
        yield "main_grad", group.main_grad.tensor
    for grad in group.master.grads:
        yield "reduced gradient", grad


def sizes_of(root: Root) -> list[list[GroupSizes]]:
    """Sizes of the buffers of each unit's groups, the root's own first."""
    return [[_sizes_of(group) for group in unit.groups] for unit in root.units]


def _staying(group: FlatGroup) -> Iterator[str]:
    """Names of the buffers that replays keep."""
    if group.buffer is not None and group.buffer.stays:
        yield "flat_buffer"
    if group.operands.columnwise is not None and group.operands.columnwise.stays:
        yield "transposed"
    if group.main_grad is not None and group.main_grad.stays:
        yield "main_grad"
    if group.kept_grad is not None:
        yield "reduced_grad"


def _state_of(groups: Iterable[FlatGroup], optimizer: torch.optim.Optimizer) -> Iterator[Size]:
    """Sizes of the optimizer's state for these groups; it may also update others, such as other stages'."""
    for master in (group.master for group in groups):
        for portion in master.portions:
            for value in optimizer.state.get(portion.parameter, {}).values():
                if isinstance(value, Tensor) and value.device == master.device:
                    yield Size(value.numel(), value.dtype)


def _rows_of_pools(pools: Sequence[int]) -> Iterator[MemoryRow]:
    """Rows of the recordings' memory pools: activations, and buffers that live only within a recording."""
    if pools:
        total = sum(pools)
        yield MemoryRow(
            "pool of recordings", "flatfsdp.replayed", torch.uint8, len(pools), total, total, RESERVED
        )


def _rows(buffer: str, owner: str, lives: str, sizes: Iterable[Size | None]) -> Iterator[MemoryRow]:
    """One row a dtype and placement, for buffers that all live at the same time."""
    by_kind: dict[tuple[torch.dtype, Placement | None], list[int]] = {}
    for size in sizes:
        if size is not None:
            by_kind.setdefault(size[1:], []).append(size.nbytes)
    for (dtype, placement), found in by_kind.items():
        yield MemoryRow(buffer, owner, dtype, len(found), sum(found), sum(found), lives, placement)


def _unsharded(
    buffer: str, owner: str, lives: str, units: Sequence[Sequence[Size | None]], ahead: int | None
) -> Iterator[MemoryRow]:
    """Rows of buffers that the root, the running unit and those gathered ahead have at one time.

    They are rows of all units if parameters stay until the last microbatch.
    """
    for row in _rows(buffer, owner, lives, (size for unit in units for size in unit)):
        kind = (row.dtype, row.placement)
        each = [sum(size.nbytes for size in unit if size and size[1:] == kind) for unit in units]
        at_a_time = sum(each) if ahead is None else each[0] + largest_window(each[1:], ahead)
        yield replace(row, at_a_time=at_a_time)


def largest_window(sizes: Sequence[int], ahead: int) -> int:
    """Largest sum of `ahead` + 1 consecutive sizes."""
    return max((sum(sizes[start : start + 1 + ahead]) for start in range(len(sizes))), default=0)
