"""The classes of sharded modules: the user's own, with a `__call__` and the engine's methods in front.

In:   a module that has become a unit, or a part of one.
Out:  the same object, whose class has the same name and is a subclass of what it was.
Next: `engine/step/driven_unit.py` gathers and frees around a call; `engine/step/root.py` begins and ends it.

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
from flatfsdp.engine.api.methods import UnitMethods, unit_of
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.whole.full_params import state_dict_gathering, whole_units
from flatfsdp.engine.whole.state_dicts import COPIED
from flatfsdp.engine.whole.units import UnitModule, distinct_units, root_of
from flatfsdp.torch_private import in_backward, never_traced, traced_inside


@traced_inside
def call_unit(unit: UnitModule, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs `compute(*args, **kwargs)` with the parameters of `unit` gathered, and prepares its backward.

    A nested call of the same unit, or of a part of it, only computes: the outer call has gathered already.

    Args:
        compute: the forward of the unit, or of a part of it.
    """
    state = unit.fsdp_state
    if state.uses:
        return compute(*args, **kwargs)
    root = _begin(unit, (args, kwargs))
    try:
        begun, args, kwargs = state.before_forward(args, kwargs)
        state.uses += 1
        try:
            outputs = compute(*args, **kwargs)
        except BaseException:
            # A write to a parameter may be why: PyTorch refuses some views for that.
            state.writes.end()
            raise
        finally:
            state.uses -= 1
        outputs = state.after_forward(begun, (args, kwargs), outputs)
    except BaseException:
        if root is not None:
            root.fail_forward()
        raise
    if root is not None:
        root.end_forward(outputs)
    return outputs


@never_traced
def _begin(unit: UnitModule, inputs: object) -> Root | None:
    """Begins the model's forward and returns its root; None inside another forward or a recomputation."""
    root = root_of(unit)
    if unit.fsdp_state.is_whole:
        raise RuntimeError("a sharded module cannot compute inside summon_full_params; leave it first")
    if root.in_forward or in_backward():
        return None
    root.begin_forward(inputs)
    return root


class _Sharded(Mixed, nn.Module):
    """Base of the classes that are put in front of a user's class."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole tensors under their own names, as before it was sharded.  Collective."""
        unit = unit_of(self)
        root_of(unit)
        with whole_units([unit], state_dict_gathering.get(), writeback=False):
            return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for group in (group for unit in distinct_units(unit_of(self)) for group in unit.fsdp_state.groups):
            flat = group.master.flat
            # One element tells what `fn` does.  Moves to where the shard is already change nothing.
            probe = fn(flat.detach()[:1])
            if (probe.dtype, probe.device) != (flat.dtype, flat.device):
                raise TypeError(
                    f"a sharded module cannot be moved or converted ({flat.dtype} on {flat.device} to "
                    f"{probe.dtype} on {probe.device}); pass device= and precision= where it is sharded"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(COPIED)

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
