"""Conversions of tensors that transformers stores in another form: single experts, other names.

In:   the tensors of a folder, or of a unit.
Out:  the sources of each parameter; and the reverse.

The rules are transformers' own, of the model's class (`transformers.conversion_mapping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from flatfsdp.compat.transformers.files.folder import Stored

Values = dict[str, Tensor]


@dataclass
class Converted:
    """Tensors of a folder that together become one or several parameters.

    Attributes:
        base: the model of transformers.
        target: name that transformers' converter gives the result.
        converter: one of its rules.
        sources: pattern, name and place of each tensor, in transformers' order of names.
    """

    base: Any
    target: str
    converter: Any
    sources: list[tuple[str, str, Stored]] = field(default_factory=list)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name, computed without reading values."""
        return {name: tuple(value.shape) for name, value in self._convert(Stored.without_values).items()}

    def values(self) -> Values:
        """Computes the parameters, whole, in CPU memory."""
        return self._convert(Stored.read)

    def _convert(self, read: Callable[[Stored], Tensor]) -> Values:
        converter = copy.deepcopy(self.converter)
        for pattern, key, stored in self.sources:
            converter.add_tensor(self.target, key, pattern, partial(read, stored))
        found = converter.convert(self.target, model=self.base, config=self.base.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


class Arranged(NamedTuple):
    """The contents of a folder, by the names of the model's parameters and buffers.

    Attributes:
        as_they_are: tensors that need no conversion.
        converted: tensors that do, grouped by their target.
        rules: those of transformers' rules that were used.
    """

    as_they_are: dict[str, Stored]
    converted: list[Converted]
    rules: list[Any]


def arranged(base: Any, stored: Mapping[str, Stored], known: Iterable[str]) -> Arranged:
    """Determines the target of each tensor of a folder.

    Args:
        base: the model of transformers.
        stored: the tensors of the folder, by name.
        known: names of the model's parameters and buffers.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(base)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    # transformers expects a state dict here, but only reads its keys.
    names = dict.fromkeys(known, True)
    as_they_are: dict[str, Stored] = {}
    converted: dict[str, Converted] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, base.base_model_prefix, names)
        if name not in names and key in names:
            name, pattern = key, None
        if pattern is None:
            as_they_are[name] = stored[key]
        else:
            group = converted.setdefault(name, Converted(base, name, by_pattern[pattern]))
            group.sources.append((pattern, key, stored[key]))
    # Older versions do not record which rules were used.
    used = [rule for rule in rules if not hasattr(rule, "was_used") or rule.was_used()]
    return Arranged(as_they_are, list(converted.values()), used)


def reverted(base: Any, values: Values) -> Values:
    """Converts parameters to the form and names that they have in files; some results are views."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Values = revert_weight_conversion(base, values)
    return found
