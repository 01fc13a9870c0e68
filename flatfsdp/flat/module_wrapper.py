"""`ModuleWrapper`: stands in for the module that it wraps: same attributes, indexing and state-dict keys.

In:   a module, and the `Binding`s of the parameters that the subclass took out of that module.
Out:  `state_dict` and `load_state_dict` as if there were no wrapper, however deep wrappers are nested.
Next: `flatten_params.py` and `engine/api/wrapper.py` define how a parameter is registered again and how a
      slot is
      filled.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.transparent import Transparent
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import ParamSlot


class ModuleWrapper(Transparent, ABC):
    """Base class of wrappers that keep the parameters of `module` in a form of their own.

    Register state-dict hooks on `module`: hooks on the wrapper itself are not called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._reports_from_below: tuple[str, list[tuple[list[str], int]]] = "", []
        self.register_load_state_dict_post_hook(_report_original_names)

    @property
    @abstractmethod
    def bindings(self) -> Sequence[Binding]:
        """Bindings whose parameters are not registered in `module` at the moment."""

    @abstractmethod
    def _registered_parameters(self) -> AbstractContextManager[None]:
        """Context in which every parameter of `bindings` is registered in `module`, whole and current."""

    @abstractmethod
    def _load_slot(self, binding: Binding, slot: ParamSlot, value: Tensor) -> None:
        """Stores `value`, which has the slot's shape and any dtype or device.

        Called under no_grad; once per key, so several times for a tied parameter.
        """

    def _register_flat(self, name: str, parameter: nn.Parameter) -> None:
        """Registers a parameter, also under a name that the wrapped module has, such as an inner wrapper."""
        self._parameters[name] = parameter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet: in __init__, or while unpickling
                raise
        if any(name in vars(cls) for cls in type(self).__mro__):
            # A property raised AttributeError: let its message through, not one about the wrapped module.
            return object.__getattribute__(self, name)
        return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __bool__(self) -> bool:
        """Always True; otherwise Python would call `__len__`, which most modules lack."""
        return True

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State dict of `module` as before wrapping: same keys, order and shapes.

        Takes the arguments of `nn.Module.state_dict`: `destination`, `prefix`, `keep_vars`.
        """
        with self._registered_parameters():
            return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the slots from `state_dict` and leaves the rest to `module`, one level down.

        `load_state_dict` passes a dict of its own, so its keys may be changed.  Values are always copied,
        even with `assign=True`.
        """
        for binding in self.bindings:
            for slot, sites in zip(binding.layout.slots, binding.sites, strict=True):
                for key in (prefix + site.name for site in sites):
                    if key in state_dict:
                        self._load_value(binding, slot, state_dict.pop(key), key, error_msgs)
                    elif strict:
                        missing_keys.append(key)
        rest = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        state_dict.update((f"{prefix}module.{key[len(prefix) :]}", value) for key, value in rest.items())
        # Reports from here on come from modules below, under "module."; see _report_original_names.
        reports = (missing_keys, unexpected_keys, error_msgs)
        self._reports_from_below = prefix, [(report, len(report)) for report in reports]

    def _load_value(
        self, binding: Binding, slot: ParamSlot, value: Any, key: str, error_msgs: list[str]
    ) -> None:
        problem = misfit(slot, value, key)
        if problem is not None:
            error_msgs.append(problem)
        else:
            with torch.no_grad():
                self._load_slot(binding, slot, value)


def misfit(slot: ParamSlot, value: Any, key: str) -> str | None:
    """Says why a value cannot be loaded into a slot, in PyTorch's words; None if it can.

    Args:
        slot: slot to load into.
        value: value in the state dict.
        key: its key in the state dict.
    """
    if not torch.overrides.is_tensor_like(value):
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object '
            f"from checkpoint but received {type(value)}"
        )
    if tuple(value.shape) == slot.shape:
        return None
    problem = (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {torch.Size(slot.shape)}."
    )
    if tuple(value.shape) == slot.whole_shape:
        problem += (
            " That is a part of what the checkpoint has: load whole tensors with "
            "flatfsdp.checkpoint.load_full_state_dict."
        )
    return problem


def _report_original_names(wrapper: ModuleWrapper, _incompatible_keys: object) -> None:
    """Removes the level of `wrapper`, after a load, from the keys that modules below it reported."""
    prefix, reports = wrapper._reports_from_below
    wrapper._reports_from_below = "", []
    level = re.compile(rf"(?<![\w.-]){re.escape(prefix)}module\.(?=\w)")
    for report, start in reports:
        report[start:] = [level.sub(lambda _: prefix, text) for text in report[start:]]
