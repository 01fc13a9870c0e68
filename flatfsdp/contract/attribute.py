"""`Attribute`: a named value that one package leaves on a parameter or a layer for another package."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Attribute(Generic[T]):
    """One attribute of parameters or layers, under its well-known name.

    Args:
        name: name of the attribute; Transformer Engine's or Megatron's, if they have one.
        default: value for owners without the attribute.
    """

    def __init__(self, name: str, default: T) -> None:
        self.name = name
        self._default = default

    def of(self, owner: Tensor | nn.Module) -> T:
        """Value on `owner`, or the default."""
        value: T = getattr(owner, self.name, self._default)
        return value

    def is_on(self, owner: Tensor | nn.Module) -> bool:
        """Whether `owner` has the attribute, with any value."""
        return hasattr(owner, self.name)

    def leave(self, owner: Tensor | nn.Module, value: T) -> None:
        """Sets the attribute on `owner`."""
        setattr(owner, self.name, value)


class LeftOut:
    """What a copy of its owner, or a pickled one, has None in place of: it leads to the engine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class OfThisProcess(LeftOut, partial[Any]):
    """A method of the engine that a tensor has."""
