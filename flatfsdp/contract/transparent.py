"""Names of modules as users know them: `Transparent` wrappers, and PyTorch's for checkpoints, add no level.

In:   a module tree that may contain wrappers of the engine.
Out:  its modules, each with the prefix of its state-dict keys.
Next: `flat/sites.py` finds parameters by these names, `fp8/overflows.py` FP8 layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Transparent(nn.Module):
    """A module that wraps another one, and adds no level to its state-dict keys.

    Attributes:
        module: the wrapped module.
    """

    module: nn.Module


_CHECKPOINTED = "_checkpoint_wrapped_module"
"""Name of the module in PyTorch's `CheckpointWrapper`, whose state dicts leave the level out."""


def _inside(wrapper: nn.Module) -> nn.Module | None:
    """The module that `wrapper` wraps without a level in names; None for other modules."""
    return wrapper._modules.get("module" if isinstance(wrapper, Transparent) else _CHECKPOINTED)


def prefixed_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields `module` and all modules below it, parents first, each with its state-dict prefix.

    A module with several paths comes up once for each path.
    """
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            is_wrapped = child is _inside(module)
            yield from prefixed_modules(child, prefix if is_wrapped else f"{prefix}{name}.")


def unwrapped(value: Any) -> Any:
    """The module inside all wrappers around it; other objects are what they are."""
    while isinstance(value, nn.Module) and (inside := _inside(value)) is not None:
        value = inside
    return value
