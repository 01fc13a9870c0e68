"""`FusedHalf`: the base of a layer's two halves, attention and MLP.

In:   the modules of one half: first maps that form one operand, a second map, and the norm before them.
Out:  whether our kernels can compute it now; checked once for each state of the modules.
Next: `attention.py` and `mlp.py` compute.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import nn

from flatfsdp.compat.transformers.fused import lora
from flatfsdp.compat.transformers.fused.fused_part import FusedPart, name_of
from flatfsdp.compat.transformers.fused.operands import require_readable, stored_in_fp8
from flatfsdp.compat.transformers.fused.why_not import Checked, facts_of, no_dropout, skipping
from flatfsdp.contract.packed import Pack
from flatfsdp.layers.base import MatmulLayer


class FusedHalf(FusedPart, MatmulLayer):
    """Half of a layer of transformers; a direct call runs transformers' own forward.

    Attributes:
        dropout_index: index of its dropout in the family's `dropouts`.
    """

    dropout_index: ClassVar[int]
    _checked: Checked | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs transformers' own forward.

        Raises:
            RuntimeError: if an engine stores a weight in FP8, which transformers cannot read.
        """
        require_readable(name_of(self), map(lora.base_of, (*self._first(), self._second())))
        return super().forward(*args, **kwargs)

    @abstractmethod
    def packed_parameters(self) -> tuple[Pack, ...]:
        """The packs of the first maps' weights and biases, and of the second map's weight."""

    def fp8_weights(self) -> tuple[str, ...]:
        """Names of weights that only FP8 GEMMs of this layer read."""
        if not self.allows_fp8 or self._family.transposed:
            return ()
        return stored_in_fp8(pack for pack in self.packed_parameters() if pack.name.endswith("weight"))

    def _check(self, norm: nn.Module) -> Checked:
        """Determines what our kernels can compute of it after this norm."""
        modules = [self, norm, self._second(), *self._first(), *self._dropouts(), *self._others()]
        facts, checked = facts_of(modules), self._checked
        if checked is None or checked.facts != facts:
            reason = self._reason() or skipping("its norm", norm)
            packs = () if reason is not None else self._first_packs()
            checked = Checked(facts, reason, packs, self._second_reason() is None)
            vars(self)["_checked"] = checked
        return checked

    @abstractmethod
    def _first(self) -> list[Any]:
        """The maps that form one operand."""

    @abstractmethod
    def _second(self) -> Any:
        """The map after them."""

    @abstractmethod
    def _first_packs(self) -> tuple[Pack, ...]: ...

    @abstractmethod
    def _reason(self) -> str | None:
        """The reason why it is left to transformers, whatever the norm; None if it is fused."""

    def _second_reason(self) -> str | None:
        """The reason why the second map is called as a module; None if it is fused."""
        return None

    def _others(self) -> list[nn.Module]:
        """Further modules that decide whether it can be fused."""
        return []

    def _dropouts(self) -> list[nn.Module]:
        """The dropout of its result; none in most families."""
        names = self._family.dropouts
        return [] if names is None else [getattr(self, names[self.dropout_index])]

    def _dropout_reason(self) -> str | None:
        return next(filter(None, (no_dropout("the dropout", each) for each in self._dropouts())), None)
