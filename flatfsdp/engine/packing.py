"""Finds the parameters of a unit that are one operand of a GEMM, of those that layers declare.

In:   the modules of one unit, which declare packs (`contract/packed.py`), and its parameters.
Out:  a `PackedParams` for each set of parameters that can be one operand; parameter order; storage roles.
Next: `claim.py` packs them side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from torch import nn

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import FP8_WEIGHTS
from flatfsdp.contract.packed import PACKED_PARAMETERS, Pack
from flatfsdp.contract.placement import placement_of
from flatfsdp.flat.binding import PackedParams
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT, Role
from flatfsdp.flat.packing import why_not_pack

logger = logging.getLogger(__name__)

Parts = tuple[nn.Parameter, ...]


class Packs:
    """The packs of one unit.

    Args:
        modules: the unit's modules, by path.
        parameters: parameters that the unit takes.
        tensor: tensor-parallel ranks that share the layers inside.

    Attributes:
        found: the packs whose parameters can be one operand.
        read_in_fp8: (module, attribute) of parameters that a layer reads in FP8 only, through a pack listed
            in its `fp8_weights()`.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        parameters: Iterable[nn.Parameter],
        tensor: Ranks,
    ) -> None:
        own = set(parameters)
        self.found: list[PackedParams] = []
        self.read_in_fp8: set[tuple[nn.Module, str]] = set()
        self._apart: set[nn.Parameter] = set()
        owners: dict[Parts, dict[tuple[nn.Module, str], str]] = {}
        for path, owner, pack in _declared(modules):
            if pack.name in FP8_WEIGHTS.of(owner)():
                self.read_in_fp8.update(pack.parts)
            if len(pack.parts) > 1:
                registered = [module._parameters.get(attribute) for module, attribute in pack.parts]
                reason = _why_not(registered, own, tensor)
                key = tuple(part for part in registered if part is not None)
                if reason is not None:
                    _say_once(type(owner).__name__, pack.name, reason)
                    self._apart.update(key)
                    continue
                owners.setdefault(key, {}).setdefault((owner, pack.name), f"{path}.{pack.name}".lstrip("."))
        taken: set[nn.Parameter] = set()
        for parts, names in owners.items():
            if taken.isdisjoint(parts):
                taken.update(parts)
                self.found.append(PackedParams(next(iter(names.values())), parts, tuple(names)))
                continue
            self._apart.update(parts)
            for owner, name in names:
                _say_once(type(owner).__name__, name, "one of its parameters is in another pack")

    def in_order(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Orders the parameters so that those of a pack follow its first one."""
        parts_of = {part: pack.parts for pack in self.found for part in pack.parts}
        ordered: dict[nn.Parameter, None] = {}
        for parameter in parameters:
            ordered.update(dict.fromkeys(parts_of.get(parameter, (parameter,))))
        return list(ordered)

    def agreed(self, roles: Mapping[nn.Parameter, Role]) -> dict[nn.Parameter, Role]:
        """Storage roles in which the parameters of a pack agree: FP8 if every one of them would be.

        Parameters of a declared pack that cannot be one operand are not stored in FP8: their layer does not
        multiply with the operand that it has declared.
        """
        agreed = {p: Role.COMPUTE if p in self._apart else role for p, role in roles.items()}
        for pack in self.found:
            if any(agreed[part] is not Role.FP8 for part in pack.parts):
                agreed.update(dict.fromkeys(pack.parts, Role.COMPUTE))
        return agreed

    def among(self, parameters: Iterable[nn.Parameter]) -> list[PackedParams]:
        """The packs whose parts are among these parameters."""
        members = set(parameters)
        return [pack for pack in self.found if pack.parts[0] in members]


def _declared(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, Pack]]:
    for path, owner in modules:
        for pack in PACKED_PARAMETERS.of(owner)():
            yield path, owner, pack


def _why_not(
    parts: Sequence[nn.Parameter | None], parameters: set[nn.Parameter], tensor: Ranks
) -> str | None:
    """Reason why these parameters cannot be one operand; None if they can."""
    ours = [part for part in parts if part is not None and part in parameters]
    if len(ours) < len(parts):
        return "its parameters are not all in one unit"
    if len(set(ours)) < len(ours):
        return "two of its parameters are one"
    if len({part.requires_grad for part in ours}) > 1:
        return "some of its parameters are frozen, and others are trained"
    if len({part.dtype for part in ours}) > 1:
        return "its parameters have several dtypes"
    if len({placement_of(part, tensor) for part in ours}) > 1:
        return "tensor-parallel ranks have parts of some of its parameters, and all of others"
    reason = why_not_pack([tuple(part.shape) for part in ours], ELEMENT_ALIGNMENT)
    return None if reason is None else f"of its parameters, {reason}"


@cache
def _say_once(layer: str, pack: str, reason: str) -> None:
    """Logs the reason once for all equal layers of a model."""
    logger.warning("%s.%s is not one operand: %s; the layer multiplies with them apart", layer, pack, reason)
