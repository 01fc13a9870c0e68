"""`Operands`: what GEMMs read of one group's gathered parameters, one by one and packed.

In:   the unsharded flat buffer, in which the parts of a pack are neighbours.
Out:  one tensor a pack, in the same memory, whose gradient is passed on to the parts; where weights are in
      FP8, an `Operand` on each tensor (`fp8_storage.py`).
Next: `backward_concat.py` shows them to modules; layers ask for them by `contract/packed.py` and
      `contract/operand.py`.

    flat buffer    | q_proj.weight | k_proj.weight | v_proj.weight |
    packed tensor   |<---------------- qkv_weight ----------------->|    no copy
    backward       the pack's gradient is split into views, one a part, which land like any other gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfsdp.contract.packed import PACKED_PARTS
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.torch_private import once_differentiable, run_as_soon_as_ready


class Operands:
    """Operands in the dtype that the model computes in: the parameters and the packs themselves.

    Whoever has it asks for everything that FP8 weights need as well, which here is nothing.

    Attributes:
        shown: what modules have views of, 1-D and padded; its memory may come and go.
        columnwise: transposes of the weights, which a backward reads; None if it reads the weights.
    """

    columnwise: FlatBuffer | None = None

    def __init__(self, shown: Tensor) -> None:
        self.shown = shown

    def leave_on(self, tensor: Tensor, slots: range) -> None:
        """Leaves on the tensor over these slots what GEMMs read in place of it."""

    def allocate_columnwise(self) -> bool:
        """Allocates memory for the transposes; False if there is nothing to transpose."""
        return False

    def transpose(self) -> None:
        """Fills the transposes from what was gathered."""

    def free(self) -> None:
        """Frees the transposes."""


class PackedTensors:
    """The packs of one flat group: one tensor each while it trains, and one while it is frozen.

    It is apart from `Operands` because it has graphs, which keep parameters: these have methods of an
    `Operands` left on them, and no garbage collection sees a circle through graphs in C++.
    """

    def __init__(self, layout: FlatLayout, operands: Operands) -> None:
        self._packs = layout.packs
        self._operands = operands
        # Made now, because views cannot be made of memory that is gone.
        self._frozen = layout.pack_views(operands.shown.detach())
        self._trained: list[Tensor] = []
        for pack, view in zip(self._packs, self._frozen, strict=True):
            operands.leave_on(view, pack.slots)
        nan = operands.shown.new_full((), torch.nan)
        self._absent = [nan.expand(pack.shape) for pack in self._packs]

    def train(self, parts: Sequence[Tensor], main_grad: MainGrad) -> None:
        """Makes the tensors whose gradients go to `parts`, one a slot, or right into `main_grad`.

        One autograd node a pack serves all forwards, as it saves nothing.
        """
        # First, so that the nodes that accumulate into the parts are new, too.
        self._trained.clear()
        with torch.inference_mode(False), torch.enable_grad():
            for pack, view in zip(self._packs, self._frozen, strict=True):
                members = [parts[slot] for slot in pack.slots]
                tensor = _PackedParts.apply(view, *members)
                PACKED_PARTS.leave(tensor, tuple(members))
                # Autograd would run it last in the backward, because it is older than any forward.
                run_as_soon_as_ready(tensor, depth=1)
                self._operands.leave_on(tensor, pack.slots)
                self._trained.append(tensor)
        main_grad.expose_packs(self._trained)

    def get(self, index: int, *, is_there: bool, trained: Sequence[bool]) -> Tensor | None:
        """Tensor that layers read now: NaN, in memory that is safe to read, if nothing is gathered.

        Args:
            index: number of the pack.
            is_there: whether the parameters are gathered.
            trained: whether each slot is trained; None is returned for a pack of which only some parts are.
        """
        flags = {trained[slot] for slot in self._packs[index].slots}
        if len(flags) > 1:
            return None
        if not is_there:
            return self._absent[index]
        return (self._trained if True in flags else self._frozen)[index]


class _PackedParts(torch.autograd.Function):
    """Maps (pack, *parts) to a tensor in the pack's memory; the parts get the gradients of their rows."""

    @staticmethod
    def forward(ctx: Any, pack: Tensor, *parts: Tensor) -> Tensor:
        # No gradient then: the layer wrote it into main_grad itself.
        ctx.set_materialize_grads(False)
        ctx.rows = [part.shape[0] for part in parts]
        return pack.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *([None] * len(ctx.rows) if grad is None else grad.split(ctx.rows))
