"""`ModuleWrapper`: stands in for the module that it wraps: same attributes, indexing and state-dict keys.

In:   a module.
Out:  `state_dict` and `load_state_dict` as if there were no wrapper, however deep wrappers are nested.
Next: `flatten_params.py` and `engine/api/wrapper.py` say what is wrapped, and why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from flatfsdp.contract.transparent import Transparent


class ModuleWrapper(Transparent):
    """Base class of wrappers around a module whose parameters are kept in another form.

    Register state-dict hooks on `module`: hooks on the wrapper itself are not called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._reports_from_below: tuple[str, list[tuple[list[str], int]]] = "", []
        self.register_load_state_dict_post_hook(_report_original_names)

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
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Leaves what is in `state_dict` to `module`, one level down.

        `load_state_dict` passes a dict of its own, so its keys may be changed; `others` are
        `local_metadata, strict, missing_keys, unexpected_keys, error_msgs`.
        """
        rest = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
        state_dict.update((f"{prefix}module.{key[len(prefix) :]}", value) for key, value in rest.items())
        # Reports from here on come from modules below, under "module."; see _report_original_names.
        _, _, *reports = others
        self._reports_from_below = prefix, [(report, len(report)) for report in reports]


def _report_original_names(wrapper: ModuleWrapper, _incompatible_keys: object) -> None:
    """Removes the level of `wrapper`, after a load, from the keys that modules below it reported."""
    prefix, reports = wrapper._reports_from_below
    wrapper._reports_from_below = "", []
    level = re.compile(rf"(?<![\w.-]){re.escape(prefix)}module\.(?=\w)")
    for report, start in reports:
        report[start:] = [level.sub(lambda _: prefix, text) for text in report[start:]]
