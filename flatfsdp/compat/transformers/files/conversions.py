"""Conversions of tensors that transformers stores in another form: single experts, other names.

In:   the tensors of a folder, or of a unit.
Out:  the sources of each parameter; and the reverse.

The rules are transformers' own, of the model's class (`transformers.conversion_mapping`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.compat.transformers.files.folder import Stored

Values = dict[str, Tensor]


class Converted:
    """Tensors of a folder that together become one or several parameters.

    Attributes:
        shapes: shapes of these parameters, by name.
    """

    def __init__(self, base: Any, target: str, converter: Any) -> None:
        self._base, self._target, self._converter = base, target, converter
        self._sources: list[tuple[str, str, Stored]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, pattern: str, key: str, stored: Stored) -> None:
        """Adds one tensor, in transformers' order of keys."""
        self._sources.append((pattern, key, stored))

    def check(self) -> None:
        """Computes the shapes without reading values."""
        self.shapes = {name: tuple(value.shape) for name, value in self._convert(_described).items()}

    def values(self) -> Values:
        """Computes the parameters, whole, in CPU memory."""
        return self._convert(Stored.read)

    def _convert(self, read: Callable[[Stored], Tensor]) -> Values:
        converter = copy.deepcopy(self._converter)
        for pattern, key, stored in self._sources:
            converter.add_tensor(self._target, key, pattern, partial(read, stored))
        found = converter.convert(self._target, model=self._base, config=self._base.config)
        return {name: _only(value) for name, value in found.items()}


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
            group.add(pattern, key, stored[key])
    # Older versions do not record which rules were used.
    used = [rule for rule in rules if not hasattr(rule, "was_used") or rule.was_used()]
    return Arranged(as_they_are, list(converted.values()), used)


def reverted(base: Any, values: Values) -> Values:
    """Converts parameters to the form and names that they have in files; some results are views."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Values = revert_weight_conversion(base, values)
    return found


def _described(stored: Stored) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _only(value: Any) -> Tensor:
    found: Tensor = value[0] if isinstance(value, list) else value
    return found
