"""A module that stands in for the one it wraps: same attributes, same indexing, same state-dict keys.

In:   a module, and from the subclass the `Binding`s of the parameters that it took out of that module.
Out:  `state_dict` and `load_state_dict` as if there were no wrapper, however deep wrappers are nested.
Next: `flatten_params.py` and `engine/fsdp.py` say how a parameter is put back and how a slot is filled.
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
    """Base of the wrappers that keep parameters of `module` in a form of their own.

    State-dict hooks belong on `module`; those of the wrapper itself are not called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._reports_from_below: tuple[str, list[tuple[list[str], int]]] = "", []
        self.register_load_state_dict_post_hook(_report_original_names)

    @property
    @abstractmethod
    def bindings(self) -> Sequence[Binding]:
        """The bindings whose parameters are not registered in `module` at the moment."""

    @abstractmethod
    def _registered_parameters(self) -> AbstractContextManager[None]:
        """Inside, every parameter of `bindings` is registered in `module`, whole and up to date."""

    @abstractmethod
    def _load_slot(self, binding: Binding, slot: ParamSlot, value: Tensor) -> None:
        """Copies `value`, which has the slot's shape and any dtype or device, to where the slot is kept.

        Called under no_grad; once per key, so several times for a tied parameter.
        """

    def _register_flat(self, name: str, parameter: nn.Parameter) -> None:
        """Like `register_parameter`, which refuses names of the wrapped module, say of an inner wrapper."""
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
        """True; else Python would ask `__len__`, which most modules lack."""
        return True

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of `module` as it was before wrapping: same keys, order and shapes.

        Takes what `nn.Module.state_dict` takes: `destination`, `prefix`, `keep_vars`.
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
        """Takes the slots out of `state_dict` and leaves the rest to `module`, one level down.

        `load_state_dict` gave us a dict of its own, so that its keys may be changed.  Values are always
        copied, also with `assign=True`.
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
        # What is reported from here on comes from below, under "module."; see _report_original_names.
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
    """Why a value of a state dict cannot be loaded into a slot, in PyTorch's words; None if it can.

    Args:
        key: of the value in the state dict.
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
    """After a load: takes the level of `wrapper` out of the keys that the modules below it reported."""
    prefix, reports = wrapper._reports_from_below
    wrapper._reports_from_below = "", []
    level = re.compile(rf"(?<![\w.-]){re.escape(prefix)}module\.(?=\w)")
    for report, start in reports:
        report[start:] = [level.sub(lambda _: prefix, text) for text in report[start:]]
