"""Memory of a model: every buffer of the engine, its owner and its lifetime.

In:   the units of one model.
Out:  a `MemoryReport`, whose rows add up; `print` shows it as a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.text_table import plain_table
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.step.reduce import MAX_IN_FLIGHT
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.main_grad import dtype_of_buffer
from flatfsdp.options import Prefetch

GIB, MIB = 2**30, 2**20
ALWAYS = "always"


class Size(NamedTuple):
    """Length and dtype of one buffer.

    Attributes:
        placement: whether tensor-parallel ranks split it or each have all of it; None without them.
        stays: whether recorded microbatches keep it, although it would live for a part of a step only.
    """

    numel: int
    dtype: torch.dtype
    placement: Placement | None = None
    stays: bool = False

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

    def cells(self, unit: int) -> list[str]:
        """The row in a table, with sizes in units of so many bytes."""
        label = self.buffer if self.placement is None else f"{self.buffer}, {self.placement.value}"
        dtype, sizes = str(self.dtype).removeprefix("torch."), (self.total, self.at_a_time)
        shown = [f"{nbytes / unit:.3f}" for nbytes in sizes]
        return [label, self.owner, dtype, str(self.count), *shown, self.lives]


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
        name, unit = ("GiB", GIB) if self.peak >= GIB else ("MiB", MIB)
        heads = ("buffer", "owner", "dtype", "count", name, "at a time", "lives")
        table = plain_table([heads, *(row.cells(unit) for row in self.rows)], right=(3, 4, 5))
        return f"{table}\n{self.static / unit:.3f} {name} between steps, {self.peak / unit:.3f} at most"


GroupSizes = Mapping[str, Size]
"""Sizes of one flat group's buffers on this rank's device, by buffer, as far as the group has them."""

_BUFFERS = (
    ("master shard", "MasterShard", ALWAYS),
    ("compute shard", "ComputeShard", ALWAYS),
    ("optimizer state", "the optimizer", ALWAYS),
    ("flat buffer", "FlatGroup", "unshard to reshard"),
    ("transposed weights", "FP8Weights", "unshard for backward to reshard"),
    ("main_grad", "MainGrad", "first gradient to reduction"),
    ("rows of lanes", "LaneSum", "reduction"),
    ("partial gradient", "FlatGroup", "first reduction to last"),
    ("sum of a block", "FlatGroup", "its first lane to its last"),
    ("reduced gradient", "MasterShard", "first reduction to zero_grad"),
)
"""All buffers, in the order of the report: name, owner and lifetime."""

_GATHERED = ("flat buffer", "transposed weights")
"""Those of them that only the root, the running unit and those gathered ahead have at one time."""


def memory_report(root: Root, optimizer: torch.optim.Optimizer | None) -> MemoryReport:
    """See `FlatFSDP.memory_report`."""
    state = [] if optimizer is None else _state_of(root.groups, optimizer)
    report = report_of(root.units, state, reduces_every=root.shared.reduces_every)
    pools = [pool.nbytes for pool in root.pools if pool.nbytes]
    if not pools:
        return report
    # Activations, and buffers that live only within a recording: bytes without a dtype of their own.
    kind, total = ("pool of recordings", "flatfsdp.replayed", torch.uint8), sum(pools)
    row = MemoryRow(*kind, len(pools), total, total, "reserved, with the recordings")
    return MemoryReport((*report.rows, row))


def units_ahead(prefetch: Prefetch) -> int:
    """Largest number of units gathered ahead of the running one."""
    return max(prefetch.forward, prefetch.backward)


def report_of(units: Sequence[Unit], state: Iterable[Size], *, reduces_every: bool) -> MemoryReport:
    """Makes a report of a model's buffers.

    Args:
        units: the units, the root's own first.
        state: sizes of the optimizer's state.
        reduces_every: whether each microbatch reduces its gradients, so that a few units have any.
    """
    of_units: list[list[GroupSizes]] = [*sizes_of(units), [{"optimizer state": size} for size in state]]
    # Otherwise all stay gathered until the last microbatch.
    frees = any(unit.policy.reshard_after_forward for unit in units if unit.groups)
    rows = []
    for buffer, owner, lives in _BUFFERS:
        found = [[sizes[buffer] for sizes in unit if buffer in sizes] for unit in of_units]
        for kind in dict.fromkeys(size[1:] for unit in found for size in unit):
            dtype, placement, stays = kind
            of_kind = [[size.nbytes for size in unit if size[1:] == kind] for unit in found]
            each, count = list(map(sum, of_kind)), sum(map(len, of_kind))
            at_a_time = sum(each)
            if frees and buffer in _GATHERED and not stays:
                # The root's own stay from its forward to its backward.
                at_a_time = each[0] + largest_window(each[1:], units_ahead(units[0].policy.prefetch))
            if buffer == "main_grad" and reduces_every and not stays:
                # Those under way, and those of the unit whose backward runs.
                at_a_time = largest_window(each, MAX_IN_FLIGHT)
            if buffer == "rows of lanes":
                at_a_time = largest_window(each, MAX_IN_FLIGHT - 1)
            name, life = (f"{buffer}, for replays", ALWAYS) if stays else (buffer, lives)
            rows.append(MemoryRow(name, owner, dtype, count, sum(each), at_a_time, life, placement))
    return MemoryReport(tuple(rows))


def sizes_of(units: Sequence[Unit]) -> list[list[GroupSizes]]:
    """Sizes of the buffers of each unit's groups, the root's own first."""
    return [[_sizes_of(group) for group in unit.groups] for unit in units]


def _sizes_of(group: FlatGroup) -> GroupSizes:
    """Sizes of a group's permanent buffers, and of those that appear in a step."""
    layout, master, shard, main_grad = group.layout, group.master, group.compute_shard, group.main_grad
    placement = None if group.grid.tensor.size == 1 else layout.placement
    sizes: dict[str, Size] = {}
    if not master.is_offloaded:
        sizes["master shard"] = Size(master.flat.numel(), master.flat.dtype, placement)
    if shard.has_own_memory:
        sizes["compute shard"] = Size(shard.tensor.numel(), shard.tensor.dtype, placement)
    for name, flat in (("flat buffer", group.buffer), ("transposed weights", group.operands.columnwise)):
        if flat is not None:
            sizes[name] = Size(flat.tensor.numel(), flat.tensor.dtype, placement, flat.stays)
    if group.trains:
        # Not by its tensor, which comes and goes within a step: a report is the same at any time.
        padded, dtype = layout.padded_numel(group.grid.shard.size), group.unit.policy.precision.accumulate
        stays = main_grad is not None and main_grad.stays
        sizes["main_grad"] = Size(padded, dtype_of_buffer(group.unit), placement, stays)
        if group.unit.policy.lanes is not None and group.grid.shard.size > 1:
            others = padded - master.flat.numel()
            sizes["rows of lanes"] = Size(others, group.unit.policy.precision.reduce, placement)
        names = ("partial gradient", "sum of a block")
        for name, length, each in zip(names, group.lengths_of_sums, group.sums, strict=True):
            if length:
                sizes[name] = Size(length, dtype, placement, each.memory is not None)
        if not master.is_offloaded:
            kept, numel = group.kept_grad is not None, master.flat.numel()
            sizes["reduced gradient"] = Size(numel, master.grad_dtype, placement, kept)
    return sizes


def buffers_of(group: FlatGroup) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a group has now, with their names in the report."""
    yield "master shard", group.master.flat
    yield "compute shard", group.compute_shard.tensor
    for name, flat in (("flat buffer", group.buffer), ("transposed weights", group.operands.columnwise)):
        if flat is not None:
            yield name, flat.tensor
    if group.main_grad is not None and group.main_grad.tensor is not None:
        yield "main_grad", group.main_grad.tensor
    for grad in group.master.grads:
        yield "reduced gradient", grad


def _state_of(groups: Iterable[FlatGroup], optimizer: torch.optim.Optimizer) -> Iterator[Size]:
    """Sizes of the optimizer's state for these groups; it may also update others, such as other stages'."""
    for master in (group.master for group in groups):
        for parameter in master.parameters:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.device == master.device:
                    yield Size(value.numel(), value.dtype)


def largest_window(sizes: Sequence[int], ahead: int) -> int:
    """Largest sum of `ahead` + 1 consecutive sizes."""
    return max((sum(sizes[start : start + 1 + ahead]) for start in range(len(sizes))), default=0)
