"""`count_overflows`: how often FP8 casts saturated or met infinity or NaN, by layer and tensor.

In:   a model; arenas before their updates (delayed scaling), matrices before their casts (other recipes).
Out:  counts on the device, which `Overflows` reads on request.
Next: `kernels/cast/overflows.py` adds to the counts of a whole arena in one launch.

Without an active count, layers use their ordinary quantizers, and arenas have no observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import Operand
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.fp8.casts import Casts
from flatfsdp.fp8.delayed_scaling import Arena, Direction, Scaling, is_captured
from flatfsdp.fp8.quantizers import Quantized, Quantizer
from flatfsdp.fp8.recompute import current_tape
from flatfsdp.kernels.cast.cast import max_abs
from flatfsdp.kernels.cast.overflows import ROWS
from flatfsdp.kernels.cast.overflows import count_overflows as add_overflows
from flatfsdp.torch_private import in_backward

COUNTS = ("amaxes", "saturated", "infinite", "nan")
"""Names of the counts of a tensor, in the order of a `Tally`'s rows."""


class Countable(nn.Module):
    """A layer whose casts can be counted.

    Attributes:
        linear_maps: names of its weights; inputs and gradients are named after them.
        overflow_counters: the active counts.
    """

    linear_maps: ClassVar[tuple[str, ...]]
    overflow_counters: tuple[Overflows, ...] = ()
    _scalings: dict[Direction, Scaling]


@contextmanager
def count_overflows(model: nn.Module) -> Iterator[Overflows]:
    """Counts overflowing amaxes, for each FP8 layer of `model` and each of its tensors.

        with count_overflows(model) as overflows:
            train_step(model)
        print(overflows)

    An FP8 cast saturates: an infinite input gives a finite result, which no check for NaN sees.  With delayed
    scaling, so does a number larger than the scale of the last steps allows.  Counts are kept on the device,
    without synchronisation with the host:

    - `DelayedScaling`: amaxes as they enter the history, one for each tensor cast since the last update, and
      the scale of these casts; before the first update it is the tensor's own, as with `CurrentScaling`.  If
      ranks share scales, amaxes are reduced over them first, and each of them has the same counts.
    - `CurrentScaling`, `BlockScaling`: each cast of a matrix, by its own amax, which costs one more read of
      it.  Scales fit every finite amax, so only infinity saturates.  Counts are this rank's, even if
      tensor-parallel ranks share a matrix by rows.

    An amax of 0 is not counted; a NaN hides all other values of its tensor.  Recomputed casts are not counted
    again, and neither are weights that a call does not cast: those kept from an earlier microbatch, and those
    that FlatFSDP stores in FP8.  With delayed scaling a forward without gradients records nothing, so nothing
    is counted.  Both forward and backward have to run inside.

    Layers have the names of `model.named_modules()` before it was wrapped.  Copies of the model and replays
    of CUDA graphs are not counted.  Several counts may be active at once, each with its own numbers.

    Args:
        model: the model, wrapped or not.

    Yields:
        The counts.

    Raises:
        RuntimeError: in a cast captured by a CUDA graph: its replays would continue to count after the end.
    """
    layers: dict[Countable, str] = {}
    for prefix, module in prefixed_modules(model):
        if isinstance(module, Countable):
            # A layer under several names has the first one.
            layers.setdefault(module, prefix.removesuffix("."))
    overflows = Overflows(layers)
    for layer in layers:
        layer.overflow_counters = (*layer.overflow_counters, overflows)
        for scaling in layer._scalings.values():
            scaling.arena.observe((overflows,))
    try:
        yield overflows
    finally:
        for layer in layers:
            layer.overflow_counters = tuple(c for c in layer.overflow_counters if c is not overflows)
            for scaling in layer._scalings.values():
                scaling.arena.observers.pop(overflows, None)
        # Arenas that were merged or replaced meanwhile are no longer those of the layers.
        overflows.leave_arenas()


class Label(NamedTuple):
    """A tensor of a layer: "input", "weight" or "grad_output", with its map's name as a prefix."""

    layer: str
    tensor: str


class Tally(NamedTuple):
    """Counts of several tensors.

    Attributes:
        labels: of n tensors; None for tensors of layers that are not counted.
        counts: int64 [4, n], the rows of `COUNTS`.
    """

    labels: list[Label | None]
    counts: Tensor

    @staticmethod
    def of(labels: list[Label | None], device: torch.device) -> Tally:
        """A tally with zero counts."""
        with torch.inference_mode(False):
            return Tally(labels, torch.zeros(ROWS, len(labels), dtype=torch.int64, device=device))


class Overflows:
    """Counts of a model, by layer and tensor.  Reading them waits for the device; counting does not.

    Counts of a tensor:

        amaxes      amaxes that were not 0: updates with delayed scaling, else casts
        saturated   of these, larger than the scale of their cast allowed, including infinite ones
        infinite    of these, infinite: the cast turned them into the largest FP8 number
        nan         of these, NaN, which the cast keeps

    Tensors are `input`, `weight` and `grad_output`, with a prefix such as `fc1_` in a layer with several
    maps.

    Args:
        layers: the layers to count, with their names.
    """

    def __init__(self, layers: Mapping[Countable, str]) -> None:
        self._names = WeakKeyDictionary[nn.Module, str](layers.items())
        self._labels = [
            Label(name, prefix + kind)
            for layer, name in layers.items()
            for prefix in _prefixes(layer)
            for kind in ("input", "weight", "grad_output")
        ]
        self._of_arenas: dict[Arena, Tally] = {}
        self._of_casts: dict[tuple[Label, torch.device], Tally] = {}

    # ---- reading ----------------------------------------------------------------------------------------

    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts by layer and tensor, for all tensors with an amax; waits for the device.

        {"blocks.0.up": {"input": {"amaxes": 8, "saturated": 1, "infinite": 0, "nan": 0}, ...}, ...}
        """
        table: dict[str, dict[str, dict[str, int]]] = {}
        for label, counts in self._read().items():
            if counts[0]:
                table.setdefault(label.layer, {})[label.tensor] = _by_name(counts)
        return table

    def totals(self) -> dict[str, int]:
        """Counts summed over all tensors; waits for the device."""
        return _by_name([sum(row) for row in zip([0] * len(COUNTS), *self._read().values(), strict=True)])

    def __str__(self) -> str:
        """A table of the tensors that overflowed, below the totals; waits for the device."""
        read = self._read()
        amaxes, saturated, infinite, nan = self.totals().values()
        lines = [f"FP8 overflows: of {amaxes} amaxes {saturated} saturated, {infinite} infinite, {nan} NaN"]
        rows = [(*label, *map(str, counts)) for label, counts in read.items() if any(counts[1:])]
        if rows:
            rows.insert(0, ("layer", "tensor", *COUNTS))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                left = (text.ljust(width) for text, width in zip(row[:2], widths, strict=False))
                right = (text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True))
                lines.append("  ".join((*left, *right)))
        return "\n".join(lines)

    def _read(self) -> dict[Label, list[int]]:
        read = {label: [0] * len(COUNTS) for label in self._labels}
        for labels, counts in (*self._of_arenas.values(), *self._of_casts.values()):
            for label, column in zip(labels, counts.t().tolist(), strict=True):
                if label is not None:
                    read[label] = [a + b for a, b in zip(read[label], column, strict=True)]
        return read

    # ---- counting ---------------------------------------------------------------------------------------

    def before_update(self, arena: Arena) -> None:
        """Adds the amaxes that casts have recorded in an arena since its last update."""
        tally = self._of_arenas.get(arena)
        if tally is None:
            tally = self._of_arenas[arena] = Tally.of(self._columns(arena), arena.scale.device)
        scale = arena.scale
        first = [scaling.columns for scaling in arena.members if not scaling.has_scales]
        if first:
            # These were cast with scales of their own, which fit every finite amax.
            scale = scale.clone()
            for columns in first:
                scale[columns] = torch.finfo(scale.dtype).tiny
        add_overflows(arena.history[0], scale, arena.fp8_max, tally.counts)

    def before_cast(self, layer: Countable, tensor: str, amax: Tensor) -> None:
        """Adds the amax of one cast, FP32 [1], before its scale is computed."""
        label, device = Label(self._names[layer], tensor), amax.device
        tally = self._of_casts.get((label, device))
        if tally is None:
            tally = self._of_casts[label, device] = Tally.of([label], device)
        add_overflows(amax, *_fits_all_finite(device), tally.counts)

    def leave_arenas(self) -> None:
        """Stops counting in every arena seen so far."""
        for arena in self._of_arenas:
            arena.observers.pop(self, None)

    def _columns(self, arena: Arena) -> list[Label | None]:
        """The label of each column of an arena."""
        labels: list[Label | None] = [None] * arena.scale.numel()
        for scaling in arena.members:
            name = self._names.get(scaling.owner)
            if name is not None:
                kinds = ("input", "weight") if scaling.direction == "forward" else ("grad_output",)
                tensors = [prefix + kind for prefix in _prefixes(scaling.owner) for kind in kinds]
                labels[scaling.columns] = [Label(name, tensor) for tensor in tensors]
        return labels


def counted(layer: Countable, casts: list[Casts]) -> list[Casts]:
    """Wraps casts with current or block scales so that the active counts of `layer` see their matrices."""
    tape = current_tape()
    is_repeated = in_backward() if tape is None else tape.is_replay
    return [
        _counted_map(layer, prefix, of_map, is_repeated)
        for prefix, of_map in zip(_prefixes(layer), casts, strict=True)
    ]


def _counted_map(layer: Countable, prefix: str, casts: Casts, is_repeated: bool) -> Casts:
    def look(inner: Quantizer, kind: str) -> Quantizer:
        return Counted(inner, partial(_count, layer, prefix + kind))

    counted = replace(casts, grad=lambda: look(casts.grad(), "grad_output"))
    # Only one of the runs gets a gradient.
    if is_repeated:
        return counted
    return replace(counted, x=look(casts.x, "input"), weight=look(casts.weight, "weight"))


def _count(layer: Countable, tensor: str, x: Tensor) -> None:
    """Adds the amax of a matrix that is about to be cast, if a count is still active in `layer`."""
    if not layer.overflow_counters:
        return
    if is_captured(x.device):
        raise RuntimeError(
            "a CUDA graph is captured inside count_overflows, and its replays would count on after the end; "
            "capture it outside, where replays are not counted"
        )
    # Taken once, however many counts are active.
    amax = max_abs(x)
    for counter in layer.overflow_counters:
        counter.before_cast(layer, tensor, amax)


@dataclass(slots=True)
class Counted:
    """A quantizer that shows each matrix to a count before it is cast.

    Attributes:
        inner: the quantizer.
        count: called with the matrix.
    """

    inner: Quantizer
    count: Callable[[Tensor], None]

    @property
    def fused(self) -> dict[str, Any] | None:
        """The inner quantizer's arguments for a kernel that casts."""
        return self.inner.fused

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        """The inner quantizer's operand."""
        return self.inner.operand(rowwise, columnwise)

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Counts the matrix, and casts it with the inner quantizer."""
        self.count(x)
        return self.inner.cast(x, rowwise=rowwise, columnwise=columnwise, column_sum=column_sum)

    def silent(self) -> Quantizer:
        """The inner quantizer without recording, and without counting."""
        return self.inner.silent()

    def for_rows(self, ranks: Ranks) -> Quantizer:
        """The same for this rank's rows; each rank counts its own."""
        return replace(self, inner=self.inner.for_rows(ranks))

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        """The inner quantizer's operand of all gathered rows, which is not counted."""
        # Each rank has already counted its own rows.
        return self.inner.of_rows(gathered, rowwise=rowwise, columnwise=columnwise)


def _prefixes(layer: Any) -> list[str]:
    """The prefix of the names of each linear map's tensors: "", or for example "fc1_"."""
    return [name.removesuffix("weight") for name in layer.linear_maps]


def _by_name(counts: list[int]) -> dict[str, int]:
    return dict(zip(COUNTS, counts, strict=True))


@cache
def _fits_all_finite(device: torch.device) -> tuple[Tensor, Tensor]:
    """A scale and a largest number, FP32 [1], that only infinity exceeds; never written."""
    with torch.inference_mode(False):
        one = torch.ones(1, device=device, dtype=torch.float32)
        return one, torch.full_like(one, torch.finfo(torch.float32).max)
