"""`FlatFSDP` and `auto_wrap`: modules around modules that are sharded in place, for programs that wrap.

In:   a module and options.
Out:  a module that adds no level to names, and whose every method is that of the module inside.
Next: `shard.py` shards that module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import Unpack

from flatfsdp.contract.foreign_words import OPTIONS, answering
from flatfsdp.engine.api.methods import UnitMethods, unit_of
from flatfsdp.engine.api.shard import make_units, shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.engine.guards.other_engines import Guarded
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.options import Options, require_known


class FlatFSDP(Guarded, ModuleWrapper):
    """A module around one that `flatfsdp.shard` has sharded, as one unit together with all that is unsharded.

    Takes every parameter below `module` that no inner FlatFSDP has taken, so wrap inner modules first
    (`flatfsdp.auto_wrap` does).  `named_parameters()` lists local shards under the names that the parameters
    had in the plain module: see `flatfsdp.shard`.

    Args:
        module: module to shard, the same on all ranks; changed in place.
        options: ranks, dtypes and other settings, by name: see `Options`.

    Attributes:
        module: the sharded module.  Attributes not found here are looked up there, such as `fsdp_state`.

    Raises:
        TypeError, ValueError: as `flatfsdp.shard`.
    """

    @answering(OPTIONS)
    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        require_known("FlatFSDP", options)
        super().__init__(module)
        shard(module, **options)

    @property
    def _unit(self) -> UnitMethods:
        return unit_of(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the sharded module."""
        return self.module(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module and those of the sharded one, which has the same name; so parameters have theirs."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def __setattr__(self, name: str, value: Any) -> None:
        # Attributes set on the wrapper itself may be replaced; "module" does not exist before wrapping.
        is_new = isinstance(value, nn.Module) and name != "module" and name not in self._modules
        if is_new and hasattr(self, name):
            raise TypeError(
                f"{name} cannot be replaced after wrapping: nobody would reduce the new one; replace it first"
            )
        super().__setattr__(name, value)

    # nn.Module has these itself, so that they are not looked up in the module inside.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, also what was accumulated and not yet reduced."""
        self.module.zero_grad(set_to_none)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> NoReturn:
        """Raises TypeError: what was on the meta device has memory and values."""
        self._unit.to_empty(device=device, recurse=recurse)


@answering(OPTIONS)
def auto_wrap(model: nn.Module, policy: WrapPolicy, **options: Unpack[Options]) -> FlatFSDP:
    """Makes a unit of every module the policy picks, inner ones first, and of the whole model at the end.

    Args:
        model: model to wrap; changed in place.
        policy: `by_class`, `by_size`, or any callable of (name, module, numel).  It is not asked about the
            parts of nn.MultiheadAttention.
        options: ranks, dtypes and other settings of every unit, by name: see `Options`.

    Returns:
        The wrapped model.

    Raises:
        TypeError: if the policy is a class or cannot be called; for an unknown option.
        ValueError: as `FlatFSDP`, with the unit's name; if the policy picks nothing, as the whole model would
            then be one unit, which is not resharded between forward and backward.
    """
    require_known("auto_wrap", options)
    return make_units(model, policy, FlatFSDP, options)
