"""One call of a sharded module: its unit's forward, and the whole model's around it.

In:   the module, and what computes: its own `__call__`, or another method of it.
Out:  its outputs; hooks on them start the unit's backward.
Next: `engine/step/driven_unit.py` gathers and frees; `engine/step/root.py` begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatfsdp.engine.step.driven_unit import DrivenUnit
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.whole.units import UnitModule, root_of
from flatfsdp.torch_private import in_backward, never_traced, traced_inside


@traced_inside
def call_unit(
    unit: UnitModule, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `compute(*args, **kwargs)` with the parameters of `unit` gathered, and prepares its backward.

    A nested call of the same unit, or of a part of it, only computes: the outer call has gathered already.

    Args:
        compute: the forward of the unit, or of a part of it.
    """
    if unit.fsdp_state.uses:
        return compute(*args, **kwargs)
    root = _begin(unit, (args, kwargs))
    if root is None:
        return _around(unit.fsdp_state, compute, args, kwargs)
    try:
        outputs = _around(unit.fsdp_state, compute, args, kwargs)
    except BaseException:
        root.fail_forward()
        raise
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


@traced_inside
def _around(
    unit: DrivenUnit, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    begun, args, kwargs = unit.before_forward(args, kwargs)
    unit.uses += 1
    try:
        outputs = compute(*args, **kwargs)
    except BaseException:
        # A write to a parameter may be why: PyTorch refuses some views for that.
        unit.writes.end()
        raise
    finally:
        unit.uses -= 1
    return unit.after_forward(begun, (args, kwargs), outputs)
