"""Casts of FP32 inputs to the compute dtype, in front of the outermost unit's modules.

In:   the arguments of a module that owns parameters.
Out:  the same; if the first one is in FP32, with all FP32 tensors in the dtype of these parameters.

The outermost forward is given labels, times and weights of a loss beside activations, and nothing tells which
is which.  So it gets what its caller has, and a tensor is cast where a parameter meets it.  Units inside are
given activations first: these are cast at the door (`step/driven_unit.py`), with less work for the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatfsdp.engine.step.unit import Unit
from flatfsdp.flat.nested import cast_fp32


def cast_in_front_of_modules(unit: Unit, dtype: torch.dtype) -> list[RemovableHandle]:
    """Lets the modules that own parameters of the outermost unit cast their FP32 inputs.

    The unit's own module is left out, unless no module is inside: then it is a layer itself.
    """
    sites = (site for group in unit.groups for sites in group.binding.sites for site in sites)
    inside = (site.module for site in sites if site.name != site.attribute or not site.module._modules)
    owners = dict.fromkeys(inside)
    cast = partial(_cast_arguments, dtype)
    return [owner.register_forward_pre_hook(cast, with_kwargs=True) for owner in owners]


def _cast_arguments(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    # FP32 beside 16-bit activations, such as a router's weights of experts, is so on purpose.
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not _holds_fp32(first):
        return None
    return cast_fp32(args, dtype), {name: cast_fp32(each, dtype) for name, each in kwargs.items()}


def _holds_fp32(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is torch.float32
    return isinstance(value, tuple) and any(map(_holds_fp32, value))


def is_cast(hook: Any) -> bool:
    """Whether `hook` casts inputs; what it launches is recorded with the forward."""
    return isinstance(hook, partial) and hook.func is _cast_arguments
