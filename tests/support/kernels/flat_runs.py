"""Runs for the optimizers' kernels: slices of flat tensors, with gaps that nobody may touch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatfsdp.kernels.optim.runs import Columns, Run


@dataclass
class FlatRuns:
    """Run i is [starts[i], stops[i]) of each flat tensor; runs have a copy and an amax, a copy, or neither.

    Attributes:
        flats: param, grad, the states, and compute; NaN in the gaps, and in all of compute.
        amaxes: one for each run; -1 where the run has none.
        on_device: of each run, FP32.
    """

    starts: list[int]
    stops: list[int]
    flats: list[Tensor]
    amaxes: Tensor
    numbers: list[Sequence[float]]
    dtype: torch.dtype
    on_device: list[Tensor]

    @staticmethod
    def random(
        numels: Sequence[int],
        numbers: Callable[[int], Sequence[float]],
        dtypes: Sequence[torch.dtype],
        device: str,
        *,
        on_device: Callable[[int], Sequence[float]] = lambda _: (),
        copy: torch.dtype = torch.bfloat16,
        gap: int = 16,
    ) -> FlatRuns:
        """`dtypes` are of param, grad and the states, of which the second one is positive."""
        starts, end = [], 0
        for numel in numels:
            starts.append(end)
            end += -(-numel // gap) * gap + gap
        flats = [torch.randn(end).to(device, dtype) for dtype in dtypes]
        flats[3:] = [flat.square_() for flat in flats[3:]]
        stops = [start + numel for start, numel in zip(starts, numels, strict=True)]
        outside = torch.ones(end, dtype=torch.bool)
        for start, stop in zip(starts, stops, strict=True):
            outside[start:stop] = False
        for flat in flats:
            flat[outside.to(device)] = torch.nan
        flats.append(torch.full((end,), torch.nan, dtype=copy, device=device))
        amaxes = torch.tensor([0.0, -1.0, -1.0]).repeat(len(numels))[: len(numels)].to(device)
        count = range(len(numels))
        given = [torch.tensor(on_device(i), dtype=torch.float32, device=device) for i in count]
        return FlatRuns(starts, stops, flats, amaxes, [numbers(i) for i in count], copy, given)

    def clone(self) -> FlatRuns:
        flats = [flat.clone() for flat in self.flats]
        return replace(self, flats=flats, amaxes=self.amaxes.clone())

    @property
    def runs(self) -> list[Run]:
        found = []
        for index, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            param, grad, *states, compute = (flat[start:stop] for flat in self.flats)
            amax = self.amaxes[index : index + 1] if index % 3 == 0 else None
            copy = None if index % 3 == 2 else compute
            found.append(Run(param, grad, states, self.numbers[index], self.on_device[index], copy, amax))
        return found

    def call(
        self,
        function: Callable[..., None],
        grad_scale: Tensor | None,
        *options: Any,
        taken: Tensor | None = None,
    ) -> None:
        """A kernel's `reference` or `launch`."""
        columns = Columns.of(self.runs)
        tensors = [columns.params, columns.grads, *columns.states]
        rounded = [columns.computes, columns.amaxes, grad_scale, taken, *options, self.dtype]
        function(columns.params[0], *tensors, columns.numbers, columns.on_device, *rounded)

    def bits(self) -> list[Tensor]:
        """Bits of everything, gaps included, for comparisons in which NaN equals itself."""
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        return [tensor.view(integers[tensor.element_size()]) for tensor in (*self.flats, self.amaxes)]


def same(ours: FlatRuns, theirs: FlatRuns) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.bits(), theirs.bits(), strict=True))
