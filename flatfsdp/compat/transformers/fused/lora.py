"""LoRA around a projection (PEFT): the base weight stays in the packed GEMM, and the deltas are added.

y = x w^T + sum over active adapters of (dropout(x) A^T) B^T * scaling
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.mixed import innermost


def is_lora(module: nn.Module) -> bool:
    """Whether a module is PEFT's plain LoRA of a linear map."""
    if "base_layer" not in module._modules:
        return False
    kind = innermost(type(module))
    return bool(kind.__module__ == "peft.tuners.lora.layer" and kind.__name__ == "Linear")


def base_of(module: Any) -> Any:
    """The projection itself, inside its adapters."""
    return module.base_layer if is_lora(module) else module


def state_of(module: Any) -> tuple[Any, ...]:
    """The state that decides whether a module's deltas can be added outside of it."""
    return module.disable_adapters, module.merged, tuple(module.lora_variant)


def obstacle(module: Any) -> str | None:
    """The reason why a module's deltas cannot be added outside of it, or None."""
    if module.disable_adapters and module.merged:
        return "merged adapters are disabled"
    return "an adapter is a variant of LoRA" if module.lora_variant else None


def adds(module: Any) -> bool:
    """Whether a module adds a delta to its base."""
    return is_lora(module) and not (module.disable_adapters or module.merged)


def delta_of(module: Any, x: Tensor) -> Tensor | None:
    """The sum of the active adapters' deltas for x; None if there are none."""
    total: Tensor | None = None
    for name in module.active_adapters:
        if name in module.lora_A:
            down, up = module.lora_A[name], module.lora_B[name]
            own = up(down(module.lora_dropout[name](x.to(down.weight.dtype)))) * module.scaling[name]
            total = own if total is None else total + own
    return total
