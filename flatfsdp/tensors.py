"""Finding and converting the tensors inside what a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with floating-point tensors in `dtype`; differentiable."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
