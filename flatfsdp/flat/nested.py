"""Finding and converting the tensors inside what a module takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = frozenset({type(None), bool, int, float, str})
"""What most arguments are that hold no tensors."""


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif type(value) not in _PLAIN and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with floating-point tensors in `dtype`; differentiable."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure with `function` of each tensor in tuples, lists, dicts and dataclasses.

    What holds no tensor that `function` replaces is not copied: a list that a module was given to append to
    is still the caller's.
    """
    if isinstance(value, Tensor):
        return function(value)
    # By its id: what `is_leaf` refers to stays until Python collects cycles, as tree_flatten makes one.
    own = id(value)
    parts, structure = tree_flatten(value, is_leaf=lambda part: id(part) != own)
    if len(parts) == 1 and parts[0] is value:
        is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return _map_fields(function, value) if is_record else value
    mapped = [map_tensors(function, part) for part in parts]
    return value if _same(mapped, parts) else tree_unflatten(mapped, structure)


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value)]
    parts = [getattr(value, name) for name in names]
    mapped = [map_tensors(function, part) for part in parts]
    if _same(mapped, parts):
        return value
    changed = copy.copy(value)
    for name, part in zip(names, mapped, strict=True):
        # It may be frozen.
        object.__setattr__(changed, name, part)
    return changed


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(ours, theirs, strict=True))
