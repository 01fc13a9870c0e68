"""Existing models: their nn.Linear become `flatfsdp.layers.Linear`, with the same parameters.

In:   a model, before FlatFSDP wraps it.
Out:  the same model; what computes in FP8 is then up to `autocast`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from flatfsdp.contract.claimed import taken_from
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.linear import Linear
from flatfsdp.matmul.linear_map import FuseWgrad

logger = logging.getLogger(__name__)

LinearFilter = Callable[[nn.Linear, str], bool]
"""Whether to convert a layer, by itself and its name in the model."""

Model = TypeVar("Model", bound=nn.Module)

SMALLEST = 1024
"""On an H200, with 8192 tokens, casting costs what FP8 gains at about this width."""


def is_large_enough(linear: nn.Linear, name: str) -> bool:
    """The default filter: both sizes suit FP8, and the GEMM is large enough to gain from it."""
    sizes = (linear.in_features, linear.out_features)
    return all(size % ALIGNMENT == 0 for size in sizes) and min(sizes) >= SMALLEST


def convert(
    model: Model,
    filter: LinearFilter | None = None,
    fp8: bool = True,
    fuse_wgrad_accumulation: FuseWgrad | None = None,
) -> Model:
    """Swaps the nn.Linear of `model` in place; parameters, names, hooks on parameters and ties stay.

    Args:
        filter: called with each nn.Linear and its name; default with fp8: `is_large_enough`, else all.
        fp8: False: the layers never compute in FP8, whatever autocast says; for fused weight gradients alone.
        fuse_wgrad_accumulation: see `flatfsdp.layers.Linear`; default: not with fp8, and True without.

    Returns:
        The model; a new layer if the model itself is an nn.Linear.

    Raises:
        ValueError: if no layer is converted, one has hooks, which would be lost, or the model is sharded.
    """
    fuses = not fp8 if fuse_wgrad_accumulation is None else fuse_wgrad_accumulation
    if filter is None:
        filter = is_large_enough if fp8 else lambda linear, name: True
    converted: dict[nn.Module, nn.Module] = {}
    skipped = []
    for name, module in list(model.named_modules(remove_duplicate=True)):
        # Subclasses compute something else.
        if type(module) is not nn.Linear:
            continue
        if filter(module, name):
            converted[module] = Linear.sharing(module, name, fp8, fuses)
        else:
            skipped.append(name)
    if not converted:
        _require_unsharded(model)
        raise ValueError(
            f"convert: none of the {len(skipped)} nn.Linear of {type(model).__name__} passes the filter; the "
            f"default one asks for sizes of at least {SMALLEST} that are multiples of {ALIGNMENT}"
        )
    logger.info("converted %d layers, left %d as they are: %s", len(converted), len(skipped), skipped)
    for module in list(model.modules()):
        for child_name, child in module._modules.items():
            if child in converted:
                module._modules[child_name] = converted[child]
    return converted.get(model, model)  # type: ignore[return-value]


def _require_unsharded(model: nn.Module) -> None:
    """Raises ValueError if `model` was sharded in place, which makes other classes of its nn.Linear."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "weight" in taken_from(module):
            raise ValueError(
                f"convert: {name}.weight is sharded already; convert first, then shard or wrap the model"
            )
