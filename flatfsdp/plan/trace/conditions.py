"""Values of conditions in a plan, whose tensors have none.

Models ask whether a mask hides anything, or whether positions are packed, and take a shorter way where they
do not: `mask.all()`, `(sequence == 0).all()`, `x.isnan().any()`.  A plan takes the way of a plain batch:
`all` is True, and `any` is False.  Every other value is unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

_aten = torch.ops.aten
READS = (_aten._local_scalar_dense, _aten.item)
"""Operators that give Python a tensor's value."""

UNKNOWN_SHAPES = (_aten.nonzero, _aten.masked_select, _aten.unique_dim, _aten._unique2, _aten.bincount)
"""Operators whose result has a length that values decide."""


class Conditions:
    """Knows which tensors are results of `all` and `any`, and the values that a plan takes for them."""

    def __init__(self) -> None:
        self._answers: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, operator: OpOverload[Any, Any], out: Any) -> None:
        """Remembers what an operator has returned."""
        if operator.overloadpacket in (_aten.all, _aten.any) and isinstance(out, Tensor):
            self._answers[out] = operator.overloadpacket is _aten.all

    def answer(self, operator: OpOverload[Any, Any], args: Any) -> bool | None:
        """The constant to return for an operator that reads a meta tensor's value; None to run it as it is.

        Only results of `all()` and `any()` have known values.

        Raises:
            NotImplementedError: if the value is unknown.
        """
        packet = operator.overloadpacket
        if packet not in (*READS, *UNKNOWN_SHAPES) or not args[0].is_meta:
            return None
        if packet in READS and args[0] in self._answers:
            known: bool = self._answers[args[0]]
            return known
        raise NotImplementedError(
            f"the model reads values while it runs ({operator}), and a plan has none: its tensors are on the "
            "meta device. Leave out of the batch what is not needed (an attention_mask without padding), "
            "or choose an implementation of the layer that does not look (for experts of Hugging Face: "
            'experts_implementation="grouped_mm")'
        )
