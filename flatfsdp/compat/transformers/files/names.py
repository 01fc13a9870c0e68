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
from flatfsdp.contract.transparent import prefixed_modules
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
        prefixes = _prefixes_in_files(model, prefix)
        self.parameters = []
        for (group, slot), keys in keys_of_slots(model).items():
            names = tuple(dict.fromkeys(_renamed(keys, prefixes)))
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


def _prefixes_in_files(model: nn.Module, base: str) -> dict[str, str]:
    """The prefix in files of each module of the base model, by its prefix in the model."""
    found: dict[str, str] = {}
    owners: dict[str, nn.Module] = {}
    for prefix, module in prefixed_modules(model):
        if not prefix.startswith(base):
            continue
        owners[prefix] = module
        if prefix == base:
            found[prefix] = ""
            continue
        parent, _, name = prefix[:-1].rpartition(".")
        parent = f"{parent}." if parent else ""
        if parent not in found:
            continue
        own = owners[parent]._modules
        if "base_layer" in own or "original_module" in own:
            # In a layer of PEFT, the original module and what is trained in its place share its name in
            # files.
            if name in ("base_layer", "original_module", "modules_to_save"):
                found[prefix] = found[parent]
        elif isinstance(owners[parent], nn.ModuleDict) and _is_trained_whole(owners, parent):
            found[prefix] = found[parent]
        else:
            found[prefix] = f"{found[parent]}{name}."
    return found


def _is_trained_whole(owners: dict[str, nn.Module], prefix: str) -> bool:
    """Whether the module at `prefix` holds what PEFT trains in place of a module."""
    above = prefix[:-1].rpartition(".")[0]
    return prefix.endswith("modules_to_save.") and "original_module" in owners[f"{above}."]._modules


def _renamed(keys: list[str], prefixes: dict[str, str]) -> Iterator[str]:
    for key in keys:
        prefix, _, name = key.rpartition(".")
        prefix = f"{prefix}." if prefix else ""
        if prefix in prefixes:
            yield prefixes[prefix] + name
