"""Transformer Engine's extra state: a pickle in a byte tensor, with scales, histories and a recipe.

In:   the result of a module's `get_extra_state` in this process, or what a checkpoint holds of it.
Out:  a dict of tensors, numbers and a recipe; the bytes that `set_extra_state` takes.

The format is that of `TransformerEngineBaseModule` and `BasicOperation` in Transformer Engine 2.20.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

_RECIPES = "transformer_engine.common.recipe"
_MAY_UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def seals(module: nn.Module) -> bool:
    """Whether the module's extra state is Transformer Engine's."""
    return any(base.__module__.split(".")[0] == "transformer_engine" for base in type(module).__mro__)


def opened(extra_state: Tensor) -> Any:
    """Unpickles bytes that this process itself has just pickled; None if there are none."""
    return pickle.loads(extra_state.numpy(force=True).tobytes()) if extra_state.numel() else None


def sealed(content: Any) -> Tensor:
    """Pickles a value to the bytes that a module's `set_extra_state` takes."""
    data = b"" if content is None else pickle.dumps(content)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def unpickling() -> Iterator[None]:
    """Context in which Transformer Engine may unpickle what `sealed` made from tensors and numbers."""
    before = os.environ.get(_MAY_UNPICKLE)
    os.environ[_MAY_UNPICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MAY_UNPICKLE]
        else:
            os.environ[_MAY_UNPICKLE] = before


def take_apart(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Makes a record of a recipe, or a part of one: dataclasses and enumerations of one module."""
    if type(value).__module__ != _RECIPES:
        return None
    if isinstance(value, Enum):
        return type(value).__name__, {"name": value.name}
    if not dataclasses.is_dataclass(value):
        return None
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return type(value).__name__, fields


def make(name: str, fields: dict[str, Any]) -> Any:
    """Makes a recipe, or a part of one, of its record; nothing else is built from a checkpoint's contents."""
    known = vars(importlib.import_module(_RECIPES)).get(name)
    if not isinstance(known, type) or known.__module__ != _RECIPES:
        raise ValueError(f"a {name}, which this version of Transformer Engine does not have")
    if issubclass(known, Enum):
        return known[fields["name"]]
    if not dataclasses.is_dataclass(known):
        raise ValueError(f"a {name}, which is no recipe of Transformer Engine")
    return known(**fields)
