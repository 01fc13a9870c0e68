"""Packs: neighbouring parameters that one GEMM reads as one operand.

In:   the modules of one unit, which declare packs (`contract/packed.py`), and its parameters.
Out:  `PackedParams` for each set of parameters that can be one operand; their order; what is stored in FP8.
Next: `layout.py` makes a `PackedSlot` of each, `engine/storage/packed_operands.py` a tensor.

    flat     | q_proj.weight | k_proj.weight | v_proj.weight |gap| o_proj.weight |
    packs   |<---------------- qkv_weight ----------------->|

Each parameter still has its own slot: shards, checkpoints and optimizers do not see packs.  A shard boundary
may cut a pack anywhere, because packs exist in unsharded buffers only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import FP8_WEIGHTS
from flatfsdp.contract.packed import PACKED_PARAMETERS
from flatfsdp.contract.placement import placement_of
from flatfsdp.flat.sites import parameter_sites

logger = logging.getLogger(__name__)

Parts = tuple[nn.Parameter, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class PackedSlot:
    """Slots [first, last) of a layout as one operand.

    Attributes:
        name: name that its first owner gives it, such as "layers.0.self_attn.qkv_weight".
        shape: [sum of rows, columns], or [sum of elements] for biases.
        offset: first element in the flat buffer.
    """

    name: str
    first: int
    last: int
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements in the pack."""
        return math.prod(self.shape)

    @property
    def slots(self) -> range:
        """Indices of the slots."""
        return range(self.first, self.last)

    def view_of(self, flat: Tensor) -> Tensor:
        """View of a flat buffer, in the pack's shape."""
        return flat.narrow(0, self.offset, self.numel).view(self.shape)


class PackedParams(NamedTuple):
    """Parameters that are one GEMM operand, before they are packed.

    Attributes:
        name: name that the first owner gives the operand, with the owner's path.
        owners: modules that multiply with it, each with its own name for it.
    """

    name: str
    parts: Parts
    owners: tuple[tuple[nn.Module, str], ...]


class Packs:
    """The packs of one unit.

    Args:
        modules: the unit's modules, by path.
        parameters: parameters that the unit takes.
        tensor: tensor-parallel ranks that share the layers inside.
        alignment: alignment of slots, in elements.

    Attributes:
        found: the packs whose parameters can be one operand.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        parameters: Iterable[nn.Parameter],
        tensor: Ranks,
        alignment: int,
    ) -> None:
        own = set(parameters)
        self.found: list[PackedParams] = []
        # By module and attribute: a layer reads them in FP8 only, through a pack in its `fp8_weights()`.
        self._read_in_fp8: set[tuple[nn.Module, str]] = set()
        # Of declared packs that cannot be one operand: their layer multiplies with none that is in FP8.
        self._apart: set[nn.Parameter] = set()
        owners: dict[Parts, dict[tuple[nn.Module, str], str]] = {}
        for path, owner in modules:
            for pack in PACKED_PARAMETERS.of(owner)():
                if pack.name in FP8_WEIGHTS.of(owner)():
                    self._read_in_fp8.update(pack.parts)
                if len(pack.parts) == 1:
                    # It has nothing beside it; it only says who reads its part.
                    continue
                registered = [module._parameters.get(attribute) for module, attribute in pack.parts]
                parts = tuple(part for part in registered if part is not None)
                reason: str | None = "its parameters are not all in one unit"
                if own.issuperset(registered):
                    reason = _why_not(parts, tensor, alignment)
                if reason is None:
                    owners.setdefault(parts, {}).setdefault((owner, pack.name), f"{path}.{pack.name}")
                else:
                    _say_once(type(owner).__name__, pack.name, reason)
                    self._apart.update(parts)
        taken: set[nn.Parameter] = set()
        for parts, names in owners.items():
            # A parameter has one place in the buffer: the first pack that was declared gets it.
            if taken.isdisjoint(parts):
                taken.update(parts)
                # All owners read the one tensor; messages call it what the first one does.
                name = next(iter(names.values())).lstrip(".")
                self.found.append(PackedParams(name, parts, tuple(names)))
                continue
            self._apart.update(parts)
            for owner, name in names:
                _say_once(type(owner).__name__, name, "one of its parameters is in another pack")

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Orders the parameters so that those of a pack follow its first one."""
        # The parts of a pack must be neighbours, without a gap.
        parts_of = {part: pack.parts for pack in self.found for part in pack.parts}
        ordered: dict[nn.Parameter, None] = {}
        for parameter in parameters:
            ordered.update(dict.fromkeys(parts_of.get(parameter, (parameter,))))
        return list(ordered)

    def stored_in_fp8(self, module: nn.Module) -> set[nn.Parameter]:
        """Chooses the parameters below `module` that are stored in FP8 if FP8 weights are wanted.

        A weight is if every module that holds it names it in `fp8_weights()`, or leaves it to another module
        that does; of a pack, all parameters or none are.
        """
        found: set[nn.Parameter] = set()
        wide = set(self._apart)
        for site, parameter in parameter_sites(module):
            found.add(parameter)
            place = site.module, site.attribute
            if site.attribute not in FP8_WEIGHTS.of(site.module)() and place not in self._read_in_fp8:
                wide.add(parameter)
        for pack in self.found:
            # One operand has one dtype.
            if not wide.isdisjoint(pack.parts):
                wide.update(pack.parts)
        return found - wide

    def among(self, parameters: Iterable[nn.Parameter]) -> list[PackedParams]:
        """The packs whose parts are among these parameters."""
        # Parts agree in all that makes groups differ, so one tells for all of them.
        members = set(parameters)
        return [pack for pack in self.found if pack.parts[0] in members]


def _why_not(parts: Sequence[nn.Parameter], tensor: Ranks, alignment: int) -> str | None:
    """Reason why these parameters cannot be one operand; None if they can."""
    if len(set(parts)) < len(parts):
        return "two of its parameters are one"
    if len({part.requires_grad for part in parts}) > 1:
        return "some of its parameters are frozen, and others are trained"
    if len({part.dtype for part in parts}) > 1:
        return "its parameters have several dtypes"
    if len({placement_of(part, tensor) for part in parts}) > 1:
        return "tensor-parallel ranks have parts of some of its parameters, and all of others"
    reason = why_not_pack([tuple(part.shape) for part in parts], alignment)
    return None if reason is None else f"of its parameters, {reason}"


def why_not_pack(shapes: Sequence[Shape], alignment: int) -> str | None:
    """Checks whether parameters of these shapes, packed one after the other, form one operand.

    Args:
        shapes: shapes of the parameters, in order.
        alignment: alignment of slots, in elements.

    Returns:
        None if they do; otherwise the reason why not.
    """
    if any(not shape for shape in shapes):
        return "one is a scalar"
    if len({shape[1:] for shape in shapes}) > 1:
        return "they have rows of different shapes"
    if any(math.prod(shape) % alignment for shape in shapes[:-1]):
        return f"one has a number of elements that is no multiple of {alignment}"
    return None


@cache
def _say_once(layer: str, pack: str, reason: str) -> None:
    """Logs the reason once for all equal layers of a model."""
    logger.warning("%s.%s is not one operand: %s; the layer multiplies with them apart", layer, pack, reason)
