"""`FusedHalf`: the base of a layer's two halves, attention and MLP.

In:   the modules of one half: first maps that form one operand, a second map, and the norm before them.
Out:  whether our kernels can compute it now; checked once for each state of the modules.
Next: `attention.py` and `mlp.py` compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused import lora
from flatfsdp.compat.transformers.fused.fused_part import FusedPart, name_of
from flatfsdp.compat.transformers.fused.why_not import different, facts_of, no_dropout, no_linear, skipping
from flatfsdp.contract.operand import FP8_OPERAND
from flatfsdp.contract.packed import Pack, packed_tensor
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.base import MapOf, MatmulLayer


class Checked(NamedTuple):
    """The findings for one state of the inner modules.

    Attributes:
        facts: that state.
        reason: why the part is left to transformers, or None.
        packs: the packed operands.
        has_last: whether the last projection is fused, too, or called as a module.
    """

    facts: list[Any]
    reason: str | None
    packs: tuple[Pack, ...]
    has_last: bool = True


class HalfMaps(NamedTuple):
    """The linear maps of one call; without `second`, the second one is called as a module."""

    first: MapOf
    second: MapOf | None


class FusedHalf(FusedPart, MatmulLayer):
    """Half of a layer of transformers; a direct call runs transformers' own forward.

    Attributes:
        first_at: attribute of the family with the names of the maps that form one operand.
        second_at: attribute of the family with the name of the map after them.
        dropout_index: index of its dropout in the family's `dropouts`.
        takes_lora: whether the first maps may have LoRA adapters.
    """

    first_at: ClassVar[str]
    second_at: ClassVar[str]
    dropout_index: ClassVar[int]
    takes_lora: ClassVar[bool] = False
    _checked: Checked | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs transformers' own forward.

        Raises:
            RuntimeError: if an engine stores a weight in FP8, which transformers cannot read.
        """
        bases = map(lora.base_of, (*self._first(), self._second()))
        if any(FP8_OPERAND.of(getattr(each, "weight", each)) is not None for each in bases):
            cause = "its weights are kept in FP8, which transformers cannot read"
            raise RuntimeError(
                f"{name_of(self)} is left to transformers, but {cause}; add hooks and adapters before it is "
                "sharded, ask for no attention weights, or keep weights in 16 bits (fp8_weights=None)"
            )
        return super().forward(*args, **kwargs)

    def packed_parameters(self) -> tuple[Pack, ...]:
        """The packs of the first maps' weights and biases, and of the second map's weight."""
        if self._reason() is not None:
            return ()
        last = _packs_of(self.second_at, [self._second()])[:1] if self._second_reason() is None else ()
        return (*self._first_packs(), *last)

    def fp8_weights(self) -> tuple[str, ...]:
        """Names of weights that only FP8 GEMMs of this layer read."""
        if not self.allows_fp8 or self._family.transposed:
            return ()
        packs = [pack for pack in self.packed_parameters() if pack.name.endswith("weight")]
        sizes = {pack.name: [size for part in pack.tensors() for size in part.shape] for pack in packs}
        return tuple(name for name in sizes if all(n > 0 and n % ALIGNMENT == 0 for n in sizes[name]))

    def maps(self, norm: nn.Module) -> HalfMaps | str:
        """The linear maps of this call after this norm, or why transformers has to compute it."""
        modules = [self, norm, self._second(), *self._first(), *self._dropouts(), *self._others()]
        facts, checked = facts_of(modules), self._checked
        if checked is None or checked.facts != facts:
            reason = self._reason() or skipping("its norm", norm)
            packs = () if reason is not None else self._first_packs()
            checked = Checked(facts, reason, packs, self._second_reason() is None)
            vars(self)["_checked"] = checked
        if checked.reason is not None:
            return checked.reason
        operands = _operands_of(self, checked.packs)
        if operands is None:
            return (
                f"{', '.join(self._first_names())} have no common place in a flat buffer: they are in "
                "several units, frozen and trained, of several dtypes, or of sizes no multiples of 16"
            )
        name, last = self.linear_maps
        second, transposed = self._second(), self._family.transposed
        return HalfMaps(
            MapOf(name, *operands, transposed),
            MapOf(last, second.weight, second.bias, transposed) if checked.has_last else None,
        )

    def dropped(self) -> float:
        """The dropout probability of its result."""
        return next((float(each.p) for each in self._dropouts() if each.training), 0.0)

    def _first_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = getattr(self._family, self.first_at)
        return names

    def _first(self) -> list[Any]:
        """The maps that form one operand."""
        return [self._modules[name] for name in self._first_names()]

    def _second(self) -> Any:
        """The map after them."""
        return self._modules[getattr(self._family, self.second_at)]

    def _first_packs(self) -> tuple[Pack, ...]:
        return _packs_of(self.first_at, [lora.base_of(each) for each in self._first()])

    def _reason(self) -> str | None:
        """The reason why it is left to transformers, whatever the norm; None if it is fused."""
        transposed, named = self._family.transposed, ", ".join(self._first_names())
        for name, module in zip(self._first_names(), self._first(), strict=True):
            if found := no_linear(name, module, transposed=transposed, lora_too=self.takes_lora):
                return found
        bases = [lora.base_of(each) for each in self._first()]
        if len({each.bias is None for each in bases}) > 1:
            return f"some of {named} have a bias, others none"
        return (
            different(named, [each.weight for each in bases])
            or self._own_reason()
            or skipping("it", self)
            or next(filter(None, (no_dropout("the dropout", each) for each in self._dropouts())), None)
        )

    def _own_reason(self) -> str | None:
        """A reason that the other half does not have; None if there is none."""
        raise NotImplementedError

    def _second_reason(self) -> str | None:
        """The reason why the second map is called as a module; None if it is fused."""
        return None

    def _others(self) -> list[nn.Module]:
        """Further modules that decide whether it can be fused."""
        return []

    def _dropouts(self) -> list[Any]:
        """The dropout of its result; none in most families."""
        names = self._family.dropouts
        return [] if names is None else [self._modules[names[self.dropout_index]]]


def _packs_of(name: str, bases: Sequence[Any]) -> tuple[Pack, ...]:
    """The packs of their weights, stacked by rows, and of their biases if they have any."""
    kinds = ("weight",) if bases[0].bias is None else ("weight", "bias")
    return tuple(Pack(f"{name}_{kind}", tuple((each, kind) for each in bases)) for kind in kinds)


def _operands_of(layer: nn.Module, packs: Sequence[Pack]) -> tuple[Tensor, Tensor | None] | None:
    """The weight and bias of one GEMM; None if the weights are not contiguous.

    Args:
        layer: the owner of the packs.
        packs: the result of `_packs_of`.
    """
    weight = packed_tensor(layer, packs[0])
    if weight is None:
        return None
    if len(packs) == 1:
        return weight, None
    bias = packed_tensor(layer, packs[1])
    return weight, torch.cat(packs[1].tensors()) if bias is None else bias
