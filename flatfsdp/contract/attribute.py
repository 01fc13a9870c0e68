"""`Attribute`: a name under which one side leaves something on a parameter or a layer, for another side."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor, nn

T = TypeVar("T")


class Attribute(Generic[T]):
    """One attribute of parameters or layers, by the name that everybody knows it by.

    Args:
        name: Transformer Engine's or Megatron's, where they have one.
        default: for owners that do not have the attribute.
    """

    def __init__(self, name: str, default: T) -> None:
        self.name = name
        self._default = default

    def of(self, owner: Tensor | nn.Module) -> T:
        """The value that `owner` has, or the default."""
        value: T = getattr(owner, self.name, self._default)
        return value

    def is_on(self, owner: Tensor | nn.Module) -> bool:
        """Whether `owner` has the attribute, with any value."""
        return hasattr(owner, self.name)

    def leave(self, owner: Tensor | nn.Module, value: T) -> None:
        """Gives `owner` the attribute."""
        setattr(owner, self.name, value)
