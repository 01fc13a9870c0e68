"""Names of a sharded model's parameters and buffers in its files.

In:   a model of transformers, optionally with PEFT's adapters, sharded in place or wrapped.
Out:  its parameters and buffers by the names that the base model alone gives them.
Next: `load.py` and `save.py`.

Adapters are not in these files.  A layer that PEFT adapts, or trains whole, appears under its original name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from flatfsdp.contract.late_buffers import LATE_BUFFERS
from flatfsdp.contract.mixed import innermost
from flatfsdp.contract.transparent import prefixed_modules, unwrapped
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.whole.units import keys_of_slots
from flatfsdp.flat.layout import ParamSlot


class FileParameter(NamedTuple):
    """A parameter of the model, and its place in the flat buffer of its unit.

    Attributes:
        names: all its names in files; tied parameters have several.
    """

    group: FlatGroup
    slot: ParamSlot
    names: tuple[str, ...]


class FileNames:
    """The names in the files of one model.

    Attributes:
        base: the model of transformers.
        parameters: all parameters except those of adapters.
        buffers: persistent buffers by name, without the scales of FP8 layers.

    Raises:
        TypeError: if `model` is neither a model of transformers nor a PEFT model around one.
    """

    def __init__(self, model: nn.Module) -> None:
        prefix, self.base = _base_of(model)
        prefixes = dict(_prefixes_in_files(self.base, prefix))
        self.parameters = []
        for (group, slot), keys in keys_of_slots(model).items():
            split = ((path + dot, name) for path, dot, name in (key.rpartition(".") for key in keys))
            names = tuple(dict.fromkeys(prefixes[own] + name for own, name in split if own in prefixes))
            if names:
                self.parameters.append(FileParameter(group, slot, names))
        self.buffers: dict[str, Tensor] = {}
        for own_prefix, owner in prefixed_modules(model):
            for name, buffer in owner._buffers.items():
                hidden = name in owner._non_persistent_buffers_set or name in LATE_BUFFERS.of(owner)
                if buffer is not None and not hidden and own_prefix in prefixes:
                    self.buffers[prefixes[own_prefix] + name] = buffer


def _base_of(model: Any) -> tuple[str, Any]:
    """The model of transformers, with its prefix."""
    for prefix, module in prefixed_modules(model):
        if hasattr(innermost(type(module)), "_init_weights") and (
            not prefix or hasattr(model, "peft_config")
        ):
            return prefix, module
    raise TypeError(f"{type(model).__name__} is neither a model of transformers nor PEFT's around one")


def _prefixes_in_files(
    module: nn.Module, own: str, in_files: str = "", *, shares: bool = False
) -> Iterator[tuple[str, str]]:
    """Yields the prefixes of a module and all below it, in the model and in files.

    Args:
        module: the base model, or a module inside it.
        own: its prefix in the model.
        in_files: its prefix in files.
        shares: whether the modules below have that prefix, too.
    """
    yield own, in_files
    children = unwrapped(module)._modules
    is_adapted = "base_layer" in children or "original_module" in children
    for name, child in children.items():
        # In a layer of PEFT, the original module and what is trained in its place share its name in files.
        is_same = shares or (is_adapted and name in ("base_layer", "original_module", "modules_to_save"))
        if child is not None and (is_same or not is_adapted):
            inner = in_files if is_same else f"{in_files}{name}."
            is_list = "original_module" in children and name == "modules_to_save"
            yield from _prefixes_in_files(child, f"{own}{name}.", inner, shares=is_list)
