"""Libraries whose modules need more than others when they are sharded: `compat/sharded` knows what.

In:   a module, or a class, of any library.
Out:  what the file of its library makes of it; nothing for all others.

Files are imported by name, with the first class of their library: the engine does not depend on what is built
on it, and nobody imports a file for a library that he does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from torch import nn

_CLASSES = dict.fromkeys(("transformers", "diffusers", "peft"), "hugging_face")
"""Libraries whose classes get other attributes -> the file that has them."""

_MODULES = {"transformer_engine": "transformer_engine"}
"""Libraries whose modules a unit adapts when it takes their parameters -> the file that does."""


def attributes_for(plain: type[nn.Module]) -> dict[str, Any]:
    """Attributes, by name, that replace those of a class when its modules are sharded in place."""
    made: dict[str, Any] = {}
    for partner in _partners(_CLASSES, plain):
        made.update(partner.attributes_for(plain))
    return made


def adapt(module: nn.Module, unit: object) -> None:
    """Adapts one module to the unit that has taken its parameters."""
    for partner in _partners(_MODULES, type(module)):
        partner.adapt(module, unit)


def _partners(files: Mapping[str, str], kind: type) -> Iterator[Any]:
    """Files of the libraries that a class, or one of its bases, is from."""
    found = (files.get(base.__module__.partition(".")[0]) for base in kind.__mro__)
    for name in dict.fromkeys(each for each in found if each is not None):
        yield import_module(f"flatfsdp.compat.sharded.{name}")
