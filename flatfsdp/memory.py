"""Where a model's memory is: every buffer of the engine, who owns it, when it lives.

In:   the units of one model.
Out:  a `MemoryReport`, whose rows add up; `print` shows it as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.buffers import FlatBuffer
from flatfsdp.placement import Placement
from flatfsdp.policy import Prefetch
from flatfsdp.unit import Unit
from flatfsdp.unshard import FlatGroup

GIB = 2**30
ALWAYS = "always"


class Size(NamedTuple):
    """Of one buffer.

    Attributes:
        placement: on tensor-parallel ranks; None without them.
    """

    numel: int
    dtype: torch.dtype
    placement: Placement | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Row:
    """Buffers of one kind, dtype and placement on this rank.

    Attributes:
        placement: on tensor-parallel ranks, of what the buffers are for; None without them.
        count: of buffers.
        total: bytes of all of them.
        at_a_time: bytes of those that are there together, at most.
        lives: from when to when.
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
        return self.buffer if self.placement is None else f"{self.buffer}, {self.placement.value}"


@dataclass(frozen=True)
class MemoryReport:
    """Memory that one model takes on this rank's device, in bytes.

    Attributes:
        static: what is there between two steps, without gradients.
        peak: the sum of `at_a_time`.  Activations come on top.
    """

    rows: tuple[Row, ...]

    @property
    def static(self) -> int:
        return sum(row.total for row in self.rows if row.lives == ALWAYS)

    @property
    def peak(self) -> int:
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
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        table = [_line(cells, widths) for cells in (heads, *lines)]
        return "\n".join(
            [*table, f"{self.static / GIB:.3f} GiB between steps, {self.peak / GIB:.3f} at most"]
        )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.rjust(width) if index in (3, 4, 5) else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(aligned).rstrip()


def memory_report(
    units: Sequence[Unit], prefetch: Prefetch, optimizer: torch.optim.Optimizer | None
) -> MemoryReport:
    """See `FlatFSDP.memory_report`."""
    groups = [group for unit in units for group in unit.groups]
    trained = [group for group in groups if group.main_grad is not None]
    state = [] if optimizer is None else list(_state_on(groups[0].master.device, optimizer))
    device_masters = [group for group in groups if not group.master.is_offloaded]
    ahead = max(prefetch.forward, prefetch.backward)
    rows = [
        *_rows("master shard", "MasterShard", ALWAYS, [_size(g.master.flat, g) for g in device_masters]),
        *_rows("compute shard", "FlatGroup", ALWAYS, [_size(g.compute_shard, g) for g in groups if g.casts]),
        *_rows("optimizer state", "the optimizer", ALWAYS, state),
        *_unsharded("flat buffer", "FlatGroup", "unshard to reshard", units, ahead, _gathered),
        *_unsharded(
            "transposed weights", "FP8Weights", "unshard for backward to reshard", units, ahead, _transposed
        ),
        *_rows("main_grad", "MainGrad", "first gradient to reduction", [_main_grad(g) for g in trained]),
        *_rows(
            "reduced gradient",
            "the optimizer",
            "reduction to zero_grad",
            [
                Size(g.master.flat.numel(), g.master.grad_dtype, _placement(g))
                for g in trained
                if not g.master.is_offloaded
            ],
        ),
    ]
    return MemoryReport(tuple(rows))


def _size(tensor: Tensor, group: FlatGroup | None = None) -> Size:
    """
    Args:
        group: for whose parameters it is.
    """
    return Size(tensor.numel(), tensor.dtype, None if group is None else _placement(group))


def _placement(group: FlatGroup) -> Placement | None:
    return None if group.grid.tensor.size == 1 else group.layout.placement


def _state_on(device: torch.device, optimizer: torch.optim.Optimizer) -> Iterator[Size]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.device == device:
                yield _size(value)


def _rows(buffer: str, owner: str, lives: str, sizes: Iterable[Size]) -> Iterator[Row]:
    """One a dtype and placement, of buffers that all live at the same time."""
    by_kind: dict[tuple[torch.dtype, Placement | None], list[int]] = {}
    for size in sizes:
        by_kind.setdefault(size[1:], []).append(size.nbytes)
    for (dtype, placement), found in by_kind.items():
        yield Row(buffer, owner, dtype, len(found), sum(found), sum(found), lives, placement)


def _main_grad(group: FlatGroup) -> Size:
    numel = group.layout.padded_numel(group.grid.shard.size)
    return Size(numel, group.policy.precision.accumulate, _placement(group))


def _gathered(group: FlatGroup) -> FlatBuffer | None:
    return group.buffer


def _transposed(group: FlatGroup) -> FlatBuffer | None:
    return None if group.fp8 is None else group.fp8.columnwise


def _unsharded(
    buffer: str,
    owner: str,
    lives: str,
    units: Sequence[Unit],
    ahead: int,
    buffer_of: Callable[[FlatGroup], FlatBuffer | None],
) -> Iterator[Row]:
    """Of the root all the time, and of a unit and those gathered ahead of it; of all units if they stay until
    the last microbatch."""
    sizes = [
        [_size(found.tensor, group) for group in unit.groups if (found := buffer_of(group)) is not None]
        for unit in units
    ]
    for row in _rows(buffer, owner, lives, [size for of_unit in sizes for size in of_unit]):
        kind = (row.dtype, row.placement)
        each = [sum(size.nbytes for size in of_unit if size[1:] == kind) for of_unit in sizes]
        at_a_time = sum(each)
        if any(group.policy.reshard_after_forward for unit in units for group in unit.groups):
            inner = each[1:]
            windows = [sum(inner[start : start + 1 + ahead]) for start in range(len(inner))]
            at_a_time = each[0] + max(windows, default=0)
        yield replace(row, at_a_time=at_a_time)
