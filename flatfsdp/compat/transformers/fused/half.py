"""`FusedHalf`: what attention and the perceptron of a layer have in common.

In:   the modules of one half: maps that are one operand, then one more, and a norm before them.
Out:  whether our kernels can compute it as they are now, looked into once for each state that they are in.
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
from flatfsdp.contract.joint import Joint
from flatfsdp.layers.base import MatmulLayer


class FusedHalf(FusedPart, MatmulLayer):
    """Half of a layer of transformers; called by itself it is transformers' own.

    Attributes:
        dropout_index: of its dropout among those of the family.
    """

    dropout_index: ClassVar[int]
    _checked: Checked | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of transformers.

        Raises:
            RuntimeError: see `require_readable`.
        """
        require_readable(name_of(self), map(lora.base_of, (*self._first(), self._second())))
        return super().forward(*args, **kwargs)

    @abstractmethod
    def declared_joints(self) -> tuple[Joint, ...]:
        """The weights that are one operand each, and the biases of the first maps where they have any."""

    def fp8_weights(self) -> tuple[str, ...]:
        """Weights that only FP8 GEMMs of this layer read."""
        if not self.allows_fp8 or self._family.transposed:
            return ()
        return stored_in_fp8(joint for joint in self.declared_joints() if joint.name.endswith("weight"))

    def _check(self, norm: nn.Module) -> Checked:
        """What our kernels can compute of it, behind this norm."""
        modules = [self, norm, self._second(), *self._first(), *self._dropouts(), *self._others()]
        facts, checked = facts_of(modules), self._checked
        if checked is None or checked.facts != facts:
            reason = self._reason() or skipping("its norm", norm)
            joints = () if reason is not None else self._first_joints()
            checked = Checked(facts, reason, joints, self._second_reason() is None)
            vars(self)["_checked"] = checked
        return checked

    @abstractmethod
    def _first(self) -> list[Any]:
        """The maps that are one operand."""

    @abstractmethod
    def _second(self) -> Any:
        """The map behind them."""

    @abstractmethod
    def _first_joints(self) -> tuple[Joint, ...]: ...

    @abstractmethod
    def _reason(self) -> str | None:
        """Why it is left to transformers, whatever the norm; None if it is not."""

    def _second_reason(self) -> str | None:
        """Why the second map is called as a module; None if it is not."""
        return None

    def _others(self) -> list[nn.Module]:
        """Further modules on which that depends."""
        return []

    def _dropouts(self) -> list[nn.Module]:
        """Of its result; none in most families."""
        names = self._family.dropouts
        return [] if names is None else [getattr(self, names[self.dropout_index])]

    def _dropout_reason(self) -> str | None:
        return next(filter(None, (no_dropout("the dropout", each) for each in self._dropouts())), None)
