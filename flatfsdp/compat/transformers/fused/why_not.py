"""Reasons why a part of a layer is left to transformers; checked in every call, recomputed after changes.

A fused part does not call its inner modules, so their hooks would not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from flatfsdp.compat.transformers.fused import lora
from flatfsdp.contract.claimed import is_unit
from flatfsdp.contract.mixed import innermost
from flatfsdp.engine.step.driven_unit import is_cast
from flatfsdp.layers.linear import Linear

_hooks_in = itemgetter("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPTURING = "transformers.utils.output_capturing"


def facts_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The facts that reasons depend on, as a comparable list; includes the bases of LoRA.

    It runs several times per layer and call, so it only looks at dictionaries.
    """
    found: list[Any] = []
    for module in modules:
        state = module.__dict__
        before, after, of_grad, before_grad = _hooks_in(state)
        changes = None
        if before or after or of_grad or before_grad or "forward" in state:
            changes = (len(before), len(after), len(of_grad), len(before_grad), "forward" in state)
        has_bias = "bias" in state or state["_parameters"].get("bias") is not None
        found.append((module, module.__class__, has_bias, changes))
        if "base_layer" in state["_modules"] and lora.is_lora(module):
            found.append(lora.state_of(module))
            found += facts_of([lora.base_of(module)])
    return found


def skipping(name: str, module: nn.Module) -> str | None:
    """The reason why `module` has to be called as a module, or None."""
    return f"{name} is sharded as a unit of its own" if is_unit(module) else changed(name, module)


def changed(name: str, module: nn.Module) -> str | None:
    """The reason why `module` may not compute what its class does, or None."""
    if "forward" in vars(module):
        return f"{name} has a forward of its own"
    for hooks in _hooks_in(vars(module)):
        if not all(map(_is_not_needed, hooks.values())):
            return f"{name} has hooks"
    return None


def _is_not_needed(hook: Any) -> bool:
    # What a fused part reads has been cast: by its unit, or by the norm in front of it.
    return getattr(hook, "__module__", None) == _CAPTURING or is_cast(hook)


def no_linear(name: str, module: Any, *, transposed: bool, lora_too: bool = False) -> str | None:
    """The reason why the weight of `module` cannot be used without calling the module, or None.

    Args:
        name: name of the module, for the reason.
        module: the module.
        transposed: whether it has to be a Conv1D of transformers.
        lora_too: whether LoRA around it is supported.
    """
    if lora.is_lora(module):
        if not lora_too:
            return f"{name} has LoRA adapters"
        found = skipping(name, module) or lora.obstacle(module)
        return found or no_linear(name, module.base_layer, transposed=transposed)
    kind = innermost(type(module))
    if transposed:
        is_map = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    else:
        is_map = kind in (nn.Linear, Linear)
    if not is_map:
        # Several libraries have a class Linear.
        return f"{name} is a {kind.__module__}.{kind.__name__}"
    if kind is Linear and not module.is_plain:
        return f"{name} is a Linear with options of its own: several parameters, ranks, or late gradients"
    return no_tensor(name, module) or skipping(name, module)


def no_tensor(name: str, module: Any) -> str | None:
    """The reason why our kernels cannot read the weight of `module` (a DTensor, quantized), or None."""
    kind = type(module.weight)
    return None if kind in (Tensor, nn.Parameter) else f"{name} has a weight that is a {kind.__name__}"


def no_dropout(name: str, module: nn.Module) -> str | None:
    """The reason why our kernel cannot replace the dropout `module`, or None."""
    if type(module) is not nn.Dropout:
        return f"{name} is a {type(module).__name__}"
    return skipping(name, module)


def different(name: str, tensors: Iterable[Tensor]) -> str | None:
    """The reason why parameters cannot be one operand, or None."""
    kinds = {(each.dtype, each.device, each.shape[1:]) for each in tensors}
    return None if len(kinds) == 1 else f"{name} have different dtypes, devices or sizes"


def captures_attentions() -> bool:
    """Whether this forward of transformers returns attention weights, which hooks collect."""
    collector = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
    return collector is not None and "attentions" in (collector.get() or {})
