"""`policy_of`: which modules of a Hugging Face model become units.

Every model of transformers lists the classes that must not be split over devices, in `_no_split_modules`.
Most are its layers; others are parts of a layer, or embeddings.  A unit is an item of an nn.ModuleList or
nn.Sequential that is or contains a module of such a class: a layer.  Embeddings are not in lists and stay in
the outermost unit, because the head is often tied to them, and other code calls them directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from flatfsdp.contract.mixed import innermost
from flatfsdp.engine.api.wrap import WrapPolicy, by_class


def policy_of(model: nn.Module) -> WrapPolicy:
    """The wrap policy for a Hugging Face model: a unit for each of its layers.

        model = shard(model, policy_of(model))

    Args:
        model: a model of transformers, or a module that contains some, such as a PEFT model.

    Raises:
        ValueError: if no layer is found.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = {innermost(type(layer)): None for layer in _layers(model, names, None)}
    if not layers:
        found = f"no module of {', '.join(sorted(names))} in a list" if names else "no _no_split_modules"
        way_out = "pass by_class(...) with the class of its layers"
        raise ValueError(f"{type(model).__name__} has {found}, so its layers are not known; {way_out}")
    return by_class(*layers)


def _layers(module: nn.Module, names: set[str], item: nn.Module | None) -> Iterator[nn.Module]:
    """The innermost list items that are or contain modules of these classes.

    Args:
        module: where to search.
        names: class names.
        item: the innermost list item that is or contains `module`.
    """
    if item is not None and type(module).__name__ in names:
        yield item
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        yield from _layers(child, names, child if is_list else item)
