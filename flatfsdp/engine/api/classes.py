"""The classes of sharded modules: the user's own, with a `__call__` and the engine's methods in front.

In:   a module that has become a unit, or a part of one.
Out:  the same object, whose class has the same name and is a subclass of what it was.
Next: `call.py` runs the call.

A unit gathers its parameters around its `__call__`.  A *part* does so for the unit around it: a part is a
module that may be called by itself, outside of the unit's forward, such as `model.lm_head(hidden)` in a
chunked loss, or the encoder in `model.encode(...)`.  Forward hooks run inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flatfsdp.contract.mixed import About, Mixed, mixed_class
from flatfsdp.contract.partners import attributes_for
from flatfsdp.engine.api.call import call_unit
from flatfsdp.engine.api.methods import UnitMethods, unit_of
from flatfsdp.engine.whole.full_params import whole_for_state_dict
from flatfsdp.engine.whole.state_dicts import COPIED
from flatfsdp.torch_private import traced_inside


class _Sharded(Mixed, nn.Module):
    """Base of the classes that are put in front of a user's class."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole tensors under their own names, as before it was sharded.  Collective."""
        with whole_for_state_dict(unit_of(self)):
            return super().state_dict(*args, **kwargs)

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        return attributes_for(plain)


class FlatFSDPModule(_Sharded, UnitMethods):
    """A module that `shard` has sharded in place; `isinstance(module, FlatFSDPModule)` says so."""

    @traced_inside
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with whole parameters."""
        return call_unit(self, super().__call__, args, kwargs)


class FlatFSDPPart(_Sharded):
    """A module in a unit that may be called by itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with whole parameters of the unit around it."""
        if torch.compiler.is_compiling() and unit_of(self).fsdp_state.uses:
            # Inside a part that the unit calls and that is compiled whole.  Code compiled from outside calls
            # the unit, between its graphs.
            return super().__call__(*args, **kwargs)
        return call_unit(unit_of(self), super().__call__, args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlatFSDPPart:
        unit_of(self)._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(COPIED)


def require_mixable(module: nn.Module, mixin: type[_Sharded]) -> None:
    """Checks that `mix` will not fail, and changes nothing.

    Raises:
        TypeError: if no class can be derived from the module's class.
    """
    if isinstance(module, mixin):
        return
    try:
        mixed_class(type(module), mixin)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__} cannot be sharded in place, because no class can be derived from it "
            f"without arguments ({error}); give them defaults in its __init_subclass__"
        ) from error
