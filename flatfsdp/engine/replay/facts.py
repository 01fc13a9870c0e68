"""Facts that a recording depends on besides its inputs: if one changes, it must not be replayed.

In:   a model between two microbatches.
Out:  `Facts`, equal as long as a replay computes what an eager microbatch would.
Next: `replayed.py` compares them before each microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.engine.fsdp import is_own_hook
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import Passage
from flatfsdp.fp8.delayed_scaling import Arena, Scaling
from flatfsdp.fp8.overflows import Countable
from flatfsdp.fp8.region import current_region
from flatfsdp.torch_private import has_global_hooks

_IS_TRAINING = attrgetter("training")
_ADDRESS = Tensor.data_ptr
_KIND = attrgetter("shape", "dtype")


class Facts(NamedTuple):
    """Everything that a recording takes for granted.

    Attributes:
        modes: whether each module is in training mode.
        passages: state of each flat group.
        trained: whether each group is trained.
        addresses: addresses of everything that exists outside of recordings, except buffers.
        buffers: addresses, shapes with dtypes, and strides of all modules' buffers.
        has_scales: whether each `Scaling` has scales; before that, tensors are cast with their own.
        ambient: settings of PyTorch and FP8 around the call.
    """

    modes: list[bool]
    passages: list[Passage]
    trained: list[bool]
    addresses: list[int]
    buffers: list[list[Any]]
    has_scales: list[bool]
    ambient: tuple[Any, ...]


class Surroundings:
    """The places of one model's facts, collected once: each microbatch asks for all of them.

    Attributes:
        arenas: memory of the FP8 scales of all layers; layers that run for the first time get new ones, see
            `renew`.
    """

    def __init__(self, root: Root, model: nn.Module) -> None:
        self._root = root
        self._modules = list(model.modules())
        self._buffers = [module._buffers for module in self._modules if module._buffers]
        self._layers = [module for module in self._modules if isinstance(module, Countable)]
        self._shards = [
            shard for group in root.groups for shard in (group.master.flat, group.compute_shard.tensor)
        ]
        self._with_own: list[Mapping[int, Any]] = []
        self._without_own: list[Mapping[int, Any]] = []
        for hooks in (hooks for module in self._modules for hooks in _hooks_of(module)):
            # A wrapper has a hook on the module that it wraps.
            is_owned = any(map(is_own_hook, hooks.values()))
            (self._with_own if is_owned else self._without_own).append(hooks)
        self.renew()

    def renew(self) -> None:
        """Collects again after an eager microbatch, in which layers may have got scales."""
        of_layers = (getattr(layer, "_scalings", {}).values() for layer in self._layers)
        self._scalings: list[Scaling] = [scaling for scalings in of_layers for scaling in scalings]
        self.arenas: list[Arena] = list(dict.fromkeys(scaling.arena for scaling in self._scalings))
        of_arenas = [tensor for arena in self.arenas for tensor in (arena.scale, arena.history)]
        self._fixed = [*self._shards, *of_arenas]

    def facts(self) -> Facts:
        """The facts at this moment."""
        groups = self._root.groups
        addresses = list(map(_ADDRESS, self._fixed))
        addresses += [0 if group.main_grad is None else group.main_grad.address for group in groups]
        buffers = [buffer for of_one in self._buffers for buffer in of_one.values() if buffer is not None]
        return Facts(
            list(map(_IS_TRAINING, self._modules)),
            self._root.passages(),
            [group.trains for group in groups],
            addresses,
            [list(map(each, buffers)) for each in (_ADDRESS, _KIND, Tensor.stride)],
            [scaling.has_scales for scaling in self._scalings],
            _ambient(),
        )

    def why_not(self, *, is_last: bool) -> str | None:
        """Reason why a microbatch cannot be recorded or replayed now; None if it can."""
        if has_global_hooks():
            return "hooks are registered for all modules, and would not run in replays"
        if any(self._without_own) or any(len(hooks) > 1 for hooks in self._with_own):
            return "modules have hooks, which would not run in replays"
        if any(layer.overflow_counters for layer in self._layers):
            return "overflows are counted, and replays would count on"
        if is_last and any(group.trains and not group.is_kept_grad_free for group in self._root.groups):
            return "gradients of an earlier step are still there, in `.grad` or elsewhere"
        return None


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    yield module._forward_hooks
    yield module._forward_pre_hooks
    yield module._backward_hooks
    yield module._backward_pre_hooks


def _ambient() -> tuple[Any, ...]:
    region = current_region()
    is_cast = torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_cast and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        None if region is None else (region.recipe, region.enabled, region.calibrating, region.group),
    )
