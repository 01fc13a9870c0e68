"""Checks before an FP8 layer computes: devices, sizes, shared scales.

In:   a layer's arguments and the region around its call.
Out:  nothing, or an error that names the layer, the cause and the fix.
Next: `base.py` and `layers/` compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn

from flatfsdp.contract.recipe import BlockScaling, DelayedScaling, Recipe
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.matmul.exchange import Exchange


@cache
def require_fp8(device: torch.device, by_block: bool) -> None:
    """Checks that a device has FP8 GEMMs.

    Args:
        device: where the GEMMs run.
        by_block: whether each block has its own scale.

    Raises:
        RuntimeError: if a GPU has no such FP8 GEMMs; CPUs emulate them in FP32.
    """
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        raise RuntimeError(f"FP8 was asked for on {found}; it needs 8.9 or more: use autocast(enabled=False)")
    if by_block and major != 9:
        raise RuntimeError(
            f"BlockScaling was asked for on {found}; PyTorch multiplies with a scale for each block on 9.0 "
            "(Hopper) only, so use CurrentScaling or DelayedScaling"
        )


def require_fp8_shape(layer: nn.Module, name: str, tokens: int, in_features: int, out_features: int) -> None:
    """Checks that a GEMM of these sizes can be in FP8.

    Args:
        layer: the layer, for messages.
        name: name of the layer's weight.
        tokens: rows of the input.
        in_features: columns of the input.
        out_features: columns of the result.

    Raises:
        ValueError: if a size is not a multiple of 16.
    """
    sizes = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
    for what, size in sizes.items():
        if size % ALIGNMENT:
            raise ValueError(
                f"{type(layer).__name__}.{name}: {what} is {size}; FP8 GEMMs need multiples of "
                f"{ALIGNMENT}: pad it, or run this layer under autocast(enabled=False)"
            )


def require_turnable(layer: nn.Module, name: str, recipe: Recipe | None, is_stored: bool) -> None:
    """Checks that FP8 GEMMs can read a weight [in_features, out_features].

    Args:
        layer: the layer, for messages.
        name: name of the layer's weight.
        recipe: of the call; None without FP8.
        is_stored: whether FlatFSDP stores the weight in FP8.

    Raises:
        ValueError: if the transposed operand is not stored, or block scaling would scale other blocks.
    """
    if is_stored:
        raise ValueError(
            f"{type(layer).__name__}.{name} is [in_features, out_features] and kept in FP8 "
            "(Precision(fp8_weights=...)); a forward would need its transpose: leave it out of fp8_weights()"
        )
    if isinstance(recipe, BlockScaling):
        raise ValueError(
            f"{type(layer).__name__}.{name} is [in_features, out_features], whose blocks BlockScaling would "
            "scale along the other dimension; use CurrentScaling or DelayedScaling, or run this layer under "
            "autocast(enabled=False)"
        )


def require_bool_or_none(layer: str, is_first_microbatch: object) -> None:
    """Checks the `is_first_microbatch` argument of a layer's forward.

    Raises:
        TypeError: for anything but None, True and False; NumPy's booleans would count as neither.
    """
    if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
        raise TypeError(f"{layer}: is_first_microbatch is {is_first_microbatch!r}, not None, True or False")


def require_shared_scales(
    layer: nn.Module,
    exchanges: Mapping[str, Exchange],
    recipe: DelayedScaling,
    amax_group: dist.ProcessGroup | None,
) -> None:
    """Checks that ranks which gather FP8 tensors from each other have equal scales.

    Args:
        layer: the layer, for messages.
        exchanges: communication of the layer's linear maps, by the names of their weights.
        recipe: of the call.
        amax_group: rank group over which the region reduces amaxes.

    Raises:
        ValueError: if their scales could differ.
    """
    for name, exchange in exchanges.items():
        gathers = exchange.gathers_input or exchange.gathers_grad
        if gathers and not (recipe.reduce_amax and _covers(amax_group, exchange.ranks.group)):
            raise ValueError(
                f"{type(layer).__name__}.{name}: under sequence_parallel the ranks of tp_group gather FP8 "
                "numbers and need equal scales; use reduce_amax=True and an amax_reduction_group with "
                "all of them"
            )


def _covers(group: dist.ProcessGroup | None, others: dist.ProcessGroup | None) -> bool:
    """Whether `group` contains all ranks of `others`."""
    if others is None or group is others:
        return True
    if group is None:
        return False
    covered = _covered.setdefault(group, WeakSet())
    if others not in covered:
        if not set(dist.get_process_group_ranks(others)) <= set(dist.get_process_group_ranks(group)):
            return False
        covered.add(others)
    return True


_covered: WeakKeyDictionary[dist.ProcessGroup, WeakSet[dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups known to be contained in another group; determined once, not in every forward."""
