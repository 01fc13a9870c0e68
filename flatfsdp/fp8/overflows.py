"""`count_overflows`: how often FP8 casts saturated or met infinity or NaN, by layer and tensor.

In:   a model; arenas before their updates (delayed scaling), matrices before their casts (other recipes).
Out:  counts on the device, which `Overflows` reads on request.

Histories could not tell it afterwards: they keep no scales of earlier casts, and other recipes have none.
Without an active count, layers use their ordinary quantizers, and arenas have no observers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.fp8.casts import Casts
from flatfsdp.fp8.delayed_scaling import Arena, Direction, Scaling, is_captured
from flatfsdp.fp8.quantizers import Quantized, Quantizer
from flatfsdp.fp8.recompute import current_tape
from flatfsdp.kernels.cast.cast import max_abs
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
        # Arenas that were merged or replaced meanwhile are no longer those of the layers.
        arenas = overflows.arenas()
        for layer in layers:
            layer.overflow_counters = tuple(c for c in layer.overflow_counters if c is not overflows)
            arenas += [scaling.arena for scaling in layer._scalings.values()]
        for arena in arenas:
            arena.observers.pop(overflows, None)


class Label(NamedTuple):
    """A tensor of a layer: "input", "weight" or "grad_output", with its map's name as a prefix."""

    layer: str
    tensor: str


Labels = Sequence[Label | None]
"""Labels of n tensors, whose counts are int64 [4, n], the rows of `COUNTS`; None for what is not counted."""
Key = Arena | tuple[Label, torch.device]
"""An arena; with other recipes, the label and device of a cast."""


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
        kinds = ("input", "weight", "grad_output")
        self._labels = [each for layer, name in layers.items() for each in _labels(layer, name, kinds)]
        self._tallies: dict[Key, tuple[Labels, Tensor]] = {}

    # ---- reading ----------------------------------------------------------------------------------------

    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts by layer and tensor, for all tensors with an amax; waits for the device.

        {"blocks.0.up": {"input": {"amaxes": 8, "saturated": 1, "infinite": 0, "nan": 0}, ...}, ...}
        """
        table: dict[str, dict[str, dict[str, int]]] = {}
        for (layer, tensor), counts in self._read().items():
            if counts["amaxes"]:
                table.setdefault(layer, {})[tensor] = dict(counts)
        return table

    def totals(self) -> dict[str, int]:
        """Counts summed over all tensors; waits for the device."""
        return dict(_sum(self._read().values()))

    def __str__(self) -> str:
        """A table of the tensors that overflowed, below the totals; waits for the device."""
        read = self._read()
        amaxes, saturated, infinite, nan = _sum(read.values()).values()
        lines = [f"FP8 overflows: of {amaxes} amaxes {saturated} saturated, {infinite} infinite, {nan} NaN"]
        rows = [
            (*label, *map(str, counts.values()))
            for label, counts in read.items()
            if counts["saturated"] or counts["nan"]
        ]
        if rows:
            rows.insert(0, ("layer", "tensor", *COUNTS))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for row in rows:
                left = (text.ljust(width) for text, width in zip(row[:2], widths, strict=False))
                right = (text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True))
                lines.append("  ".join((*left, *right)))
        return "\n".join(lines)

    def _read(self) -> dict[Label, Counter[str]]:
        read = {label: _sum(()) for label in self._labels}
        for labels, counts in self._tallies.values():
            for label, column in zip(labels, counts.t().tolist(), strict=True):
                if label is not None:
                    read[label].update(dict(zip(COUNTS, column, strict=True)))
        return read

    # ---- counting ---------------------------------------------------------------------------------------

    def before_update(self, arena: Arena) -> None:
        """Adds the amaxes that casts have recorded in an arena since its last update."""
        amax = arena.history[0]
        # A scale computed from the same amax, or from a larger one, is never too large: both are the same
        # division, rounded alike.
        saturated = arena.scale > arena.fp8_max / amax
        for scaling in arena.members:
            if not scaling.has_scales:
                # These were cast with scales of their own, which fit every finite amax.
                saturated[scaling.columns] = amax[scaling.columns] == math.inf
        self._add(arena, lambda: self._columns(arena), amax, saturated)

    def before_cast(self, layer: Countable, tensor: str, amax: Tensor) -> None:
        """Adds the amax of one cast, FP32 [1], whose scale fits every finite amax."""
        label = Label(self._names[layer], tensor)
        self._add((label, amax.device), lambda: [label], amax, amax == math.inf)

    def _add(self, key: Key, labels: Callable[[], Labels], amax: Tensor, saturated: Tensor) -> None:
        """Counts amaxes, FP32 [n], of which these have saturated, bool [n]; does not wait for the device."""
        if key not in self._tallies:
            with torch.inference_mode(False):
                zeros = torch.zeros(len(COUNTS), amax.numel(), dtype=torch.int64, device=amax.device)
            self._tallies[key] = labels(), zeros
        self._tallies[key][1].add_(torch.stack([amax != 0, saturated, amax == math.inf, amax.isnan()]))

    def arenas(self) -> list[Arena]:
        """The arenas seen so far."""
        return [key for key in self._tallies if isinstance(key, Arena)]

    def _columns(self, arena: Arena) -> Labels:
        """The label of each column of an arena."""
        labels: list[Label | None] = [None] * arena.scale.numel()
        for scaling in arena.members:
            name = self._names.get(scaling.owner)
            if name is not None:
                kinds = ("input", "weight") if scaling.direction == "forward" else ("grad_output",)
                labels[scaling.columns] = _labels(scaling.owner, name, kinds)
        return labels


def counted(layer: Countable, casts: list[Casts]) -> list[Casts]:
    """Wraps casts with current or block scales so that the active counts of `layer` see their matrices."""
    tape = current_tape()
    is_repeated = in_backward() if tape is None else tape.is_replay
    # Only one of the runs gets a gradient.
    return [
        _looked_at(layer, prefix, of_map, grad_only=is_repeated)
        for prefix, of_map in zip(_prefixes(layer), casts, strict=True)
    ]


def _looked_at(layer: Countable, prefix: str, casts: Casts, *, grad_only: bool) -> Casts:
    def look(inner: Quantizer, kind: str) -> Any:
        return Counted(inner, layer, prefix + kind)

    counted = replace(casts, grad=lambda: look(casts.grad(), "grad_output"))
    if grad_only:
        return counted
    return replace(counted, x=look(casts.x, "input"), weight=look(casts.weight, "weight"))


@dataclass
class Counted:
    """A quantizer that shows each matrix to the counts of a layer before it is cast.

    Attributes:
        inner: the quantizer, which does everything else.  Its `silent` one counts nothing, nor does
            `of_rows`: each rank has counted its own rows.
        layer: the layer.
        tensor: name of the matrix.
    """

    inner: Quantizer
    layer: Countable
    tensor: str

    def __getattr__(self, name: str) -> Any:
        """What else the inner quantizer has."""
        return getattr(self.inner, name)

    def cast(self, x: Tensor, **options: Any) -> Quantized:
        """Counts the matrix if a count is still active, and casts it with the inner quantizer."""
        if self.layer.overflow_counters:
            if is_captured(x.device):
                raise RuntimeError(
                    "a CUDA graph is captured inside count_overflows, and its replays would count on after "
                    "the end; capture it outside, where replays are not counted"
                )
            # Taken once, however many counts are active.
            amax = max_abs(x)
            for counter in self.layer.overflow_counters:
                counter.before_cast(self.layer, self.tensor, amax)
        return self.inner.cast(x, **options)

    def for_rows(self, ranks: Ranks) -> Counted:
        """The same for this rank's rows; each rank counts its own."""
        return replace(self, inner=self.inner.for_rows(ranks))


def _labels(layer: nn.Module, name: str, kinds: Sequence[str]) -> list[Label]:
    return [Label(name, prefix + kind) for prefix in _prefixes(layer) for kind in kinds]


def _prefixes(layer: Any) -> list[str]:
    """The prefix of the names of each linear map's tensors: "", or for example "fc1_"."""
    return [name.removesuffix("weight") for name in layer.linear_maps]


def _sum(counts: Iterable[Counter[str]]) -> Counter[str]:
    total = Counter(dict.fromkeys(COUNTS, 0))
    for each in counts:
        # Unlike `+`, it keeps counts of 0.
        total.update(each)
    return total
