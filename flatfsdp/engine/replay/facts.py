"""What a recorded microbatch depends on, besides its inputs: if any of it changes, it must not be replayed.

In:   a model between two microbatches.
Out:  `Facts`, equal as long as a replay computes what an eager microbatch would.
Next: `replayed.py` compares them before each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import FlatGroup, Passage
from flatfsdp.fp8.delayed_scaling import Arena
from flatfsdp.fp8.overflows import Countable
from flatfsdp.fp8.region import current_region
from flatfsdp.torch_private import has_global_hooks


class Facts(NamedTuple):
    """All that a recording takes for given.

    Attributes:
        modes: whether each module is in training mode.
        passages: how the groups are.
        trained: which groups are.
        has_grads: whether some group has a reduced gradient, to which one would be added.
        addresses: of everything that exists outside of recordings.
        ambient: settings of PyTorch and of FP8 around the call.
    """

    modes: tuple[bool, ...]
    passages: list[Passage]
    trained: tuple[bool, ...]
    has_grads: bool
    addresses: tuple[int, ...]
    ambient: tuple[Any, ...]


def facts_of(root: Root, modules: Sequence[nn.Module], arenas: Iterable[Arena]) -> Facts:
    """As they are now."""
    groups = root.groups
    buffers = [b.data_ptr() for module in modules for b in module._buffers.values() if b is not None]
    scales = [each.data_ptr() for arena in arenas for each in (arena.scale, arena.history)]
    owned = [address for group in groups for address in _addresses(group)]
    return Facts(
        tuple([module.training for module in modules]),
        root.passages(),
        tuple(group.trains for group in groups),
        any(group.master.grads for group in groups),
        (*owned, *scales, *buffers),
        _ambient(),
    )


def _addresses(group: FlatGroup) -> Iterable[int]:
    yield group.master.flat.data_ptr()
    yield group.compute_shard.tensor.data_ptr()
    if group.main_grad is not None:
        yield group.main_grad.address


def _ambient() -> tuple[Any, ...]:
    region = current_region()
    is_cast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_cast and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        None if region is None else (region.recipe, region.enabled, region.calibrating),
    )


def why_not(facts: Facts, modules: Sequence[nn.Module]) -> str | None:
    """Why a microbatch cannot be recorded or replayed now; None if it can."""
    if has_global_hooks():
        return "hooks are registered for all modules, and would not run in replays"
    for module in modules:
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks):
            return f"a {type(module).__name__} has hooks, which would not run in replays"
        if isinstance(module, Countable) and module.overflow_counters:
            return "overflows are counted, and replays would count on"
    if facts.has_grads:
        return "gradients of an earlier step are still there, to which new ones are added"
    return None


def arenas_of(modules: Iterable[nn.Module]) -> list[Arena]:
    """The FP8 scales of all layers."""
    layers = (module for module in modules if isinstance(module, Countable))
    return list(dict.fromkeys(scaling.arena for layer in layers for scaling in _scalings(layer)))


def _scalings(layer: Countable) -> Iterable[Any]:
    return getattr(layer, "_scalings", {}).values()
