"""Finds and converts tensors inside the arguments and results of a module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of most arguments without tensors."""


def tensors_in(value: Any) -> list[Tensor]:
    """Collects every tensor in nested tuples, lists, dicts and dataclasses."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Most arguments are None or numbers.
    if type(value) in _PLAIN:
        return
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name), found)


def cast_fp32(value: Any, dtype: torch.dtype) -> Any:
    """Casts an FP32 tensor, or those in a tuple, to `dtype`; differentiable.

    Other dtypes are somebody's choice.  So is what is in lists, dicts and objects: a forward may write to
    these (losses that layers append to a list, the state in a cache), and would write to a copy.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype is torch.float32 else value
    if not isinstance(value, tuple):
        return value
    cast = [cast_fp32(each, dtype) for each in value]
    if _same(cast, value):
        return value
    return value._make(cast) if hasattr(value, "_make") else type(value)(cast)


def described(value: Any, tensors: list[Tensor]) -> Hashable:
    """Structure of an argument, shapes and dtypes of its tensors, and all other values in it.

    Args:
        tensors: gets the tensors, in the order of `tree_flatten`, which takes much longer.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, tuple([described(each, tensors) for each in value])
    if kind is dict:
        return kind, tuple([(key, described(each, tensors)) for key, each in value.items()])
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return kind, value
    return str(structure), tuple([described(each, tensors) for each in leaves])


def holds_fp32(value: Any) -> bool:
    """Whether `cast_fp32` would cast something."""
    if isinstance(value, Tensor):
        return value.dtype is torch.float32
    return isinstance(value, tuple) and any(map(holds_fp32, value))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies `function` to each tensor in nested tuples, lists, dicts and dataclasses.

    Containers in which `function` replaces no tensor are not copied: a list that a module appends to remains
    the caller's.
    """
    if isinstance(value, Tensor):
        return function(value)
    # By id: tree_flatten makes a cycle, so objects that `is_leaf` refers to live until Python collects
    # cycles.
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
        # The dataclass may be frozen.
        object.__setattr__(changed, name, part)
    return changed


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(ours, theirs, strict=True))
