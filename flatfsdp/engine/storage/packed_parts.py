"""`PackedTensors`: tensors that layers read in place of several parameters of one flat group.

In:   the unsharded flat buffer, in which the parts of a pack are neighbours.
Out:  one tensor a pack, in the same memory; its gradient is passed on to the parts.
Next: `contract/packed.py` gives these tensors to layers.

    flat buffer    | q_proj.weight | k_proj.weight | v_proj.weight |
    packed tensor   |<---------------- qkv_weight ----------------->|    no copy
    backward       the pack's gradient is split into views, one a part, which land like any other gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatfsdp.contract.operand import FP8_OPERAND
from flatfsdp.contract.packed import PACKED_PARTS
from flatfsdp.engine.storage.fp8_weights import FP8Weights
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.torch_private import once_differentiable, run_as_soon_as_ready


class PackedTensors:
    """The packs of one flat group: one tensor each while it trains, and one while it is frozen.

    Args:
        unsharded: flat buffer, 1-D, padded; its memory must exist now, and may come and go later.
        fp8: FP8 form of the parameters, of which layers read a pack's operand; None for others.
    """

    def __init__(self, layout: FlatLayout, unsharded: Tensor, fp8: FP8Weights | None) -> None:
        self._packs = layout.packs
        self._frozen = layout.pack_views(unsharded.detach())
        self._trained: list[Tensor] = []
        self._fp8 = fp8
        self._leave_operands(self._frozen)
        nan = torch.full((), torch.nan, dtype=unsharded.dtype, device=unsharded.device)
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
                self._trained.append(tensor)
        self._leave_operands(self._trained)
        main_grad.expose_packs(self._trained)

    def _leave_operands(self, packs: Sequence[Tensor]) -> None:
        if self._fp8 is not None:
            for index, pack in enumerate(packs):
                FP8_OPERAND.leave(pack, partial(self._fp8.pack_operand, index))

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
