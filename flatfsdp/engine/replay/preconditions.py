"""Preconditions of a replay: the facts besides its inputs that a recording takes for granted.

In:   a model between two microbatches.
Out:  `Facts`, equal as long as a replay computes what an eager microbatch would.
Next: `eager_or_replayed.py` compares them before each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from flatfsdp.engine.step.driven_unit import is_cast
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import REQUIRES_GRAD
from flatfsdp.engine.storage.state import GroupFacts
from flatfsdp.fp8.delayed_scaling import Arena, Direction, Scaling, buffer_names
from flatfsdp.fp8.overflows import Countable
from flatfsdp.fp8.region import current_region
from flatfsdp.torch_private import allows_tf32, has_global_hooks

_ADDRESS = Tensor.data_ptr
_STORED_AT = torch.UntypedStorage.data_ptr
_VERSION = attrgetter("_version")
_KIND = attrgetter("shape", "dtype")
# From an object's own dict: to find attributes, Python also looks at the object, its class and all bases.
_IS_TRAINING = itemgetter("training")
_KNOWN = itemgetter("known")
_GRAD_OF = attrgetter("grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

T = TypeVar("T")

Facts = tuple[Any, ...]
"""Everything that a recording takes for granted, see `Surroundings.facts`."""


def fetched(objects: Sequence[T]) -> Sequence[T]:
    """Copies the list, which brings its objects into the processor's caches before a loop reads them.

    A model has hundreds of modules and parameters, and other work between two microbatches has pushed them
    out of the caches.  A copy of a list raises the reference count of each object, in a loop so short that
    the processor waits for many objects at once.  A loop that calls a function for each object waits for one
    after the other.
    """
    return objects[:]


class _Collected(NamedTuple):
    """Facts that stay true until the engine changes a group, or somebody writes to a master shard.

    Attributes:
        at: number of changes to groups, and versions of all master shards, when it was collected.
        of_groups: of each group `GroupFacts`; the address of its accumulated gradients, 0 while there are
            none; whether each of its parameters is trained, as noticed at the beginning of the step.
        watched: parameters whose `.grad` is watched.
        markers: what is in their `.grad`; None if some of it is no marker.
    """

    at: tuple[int, list[int]]
    of_groups: tuple[list[GroupFacts], list[int], list[list[bool]]]
    watched: list[nn.Parameter]
    markers: list[Tensor] | None


def facts_of(root: Root) -> list[GroupFacts]:
    """Facts of all groups, between two microbatches."""
    return [group.compute_shard.state.facts() for group in root.groups]


class Surroundings:
    """The places of one model's facts, collected once: each microbatch asks for all of them.

    Attributes:
        root: the model.
        scalings: FP8 scales of all layers; layers that run for the first time get new ones, see `renew`.
        arenas: memory of these scales.
    """

    def __init__(self, root: Root, model: nn.Module) -> None:
        self.root = root
        modules = list(model.modules())
        self._states = [vars(module) for module in modules if _has_own_mode(module)]
        self._of_others = [module for module in modules if not _has_own_mode(module)]
        self._buffers = [module._buffers for module in modules if _has_other_buffers(module)]
        self._layers = [module for module in modules if isinstance(module, Countable)]
        self._counted = [vars(layer) for layer in self._layers]
        self._of_layers = [layer._buffers for layer in self._layers]
        self._flagged = [group.master.parameters[0] for group in root.groups]
        self._flats = [group.master.flat for group in root.groups]
        self._storages = [group.compute_shard.tensor.untyped_storage() for group in root.groups]
        self._hooks = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._sort_hooks()
        self._known: _Collected | None = None
        self.renew()

    def renew(self) -> None:
        """Collects again after an eager microbatch, in which layers may have got scales."""
        of_layers = (getattr(layer, "_scalings", {}).values() for layer in self._layers)
        self.scalings: list[Scaling] = [scaling for scalings in of_layers for scaling in scalings]
        self.arenas: list[Arena] = list(dict.fromkeys(scaling.arena for scaling in self.scalings))
        of_arenas = (tensor for arena in self.arenas for tensor in (arena.scale, arena.history))
        self._fixed = [*self._flats, *of_arenas]
        self._of_scalings = [vars(scaling) for scaling in self.scalings]

    def _sort_hooks(self) -> None:
        """Tells modules' hooks that may be recorded from all others, of which there should be none."""
        may_be = [bool(hooks) and all(map(_may_be_recorded, hooks.values())) for hooks in self._hooks]
        self._recordable = [hooks for hooks, may in zip(self._hooks, may_be, strict=True) if may]
        self._others = [hooks for hooks, may in zip(self._hooks, may_be, strict=True) if not may]
        self._recorded = self._recordable_now()

    def _recordable_now(self) -> list[tuple[Any, ...]]:
        return list(map(tuple, map(dict.values, self._recordable)))

    def facts(self) -> Facts:
        """Everything that a recording takes for granted, as it is now; `why_not` has been asked before."""
        # One call of C for each list: a loop in Python over all parameters would take as long as the rest.
        addresses = list(map(_ADDRESS, fetched(self._fixed)))
        # Nobody else has these tensors; only their memory can be exchanged, through others in it.
        addresses += map(_STORED_AT, fetched(self._storages))
        of_modules = chain.from_iterable(map(dict.values, fetched(self._buffers)))
        buffers = [buffer for buffer in of_modules if buffer is not None]
        known, region = list(map(_KNOWN, fetched(self._of_scalings))), current_region()
        return (
            self._collected().of_groups,
            self._recorded,
            [*map(_IS_TRAINING, fetched(self._states)), *(module.training for module in self._of_others)],
            # Most groups are frozen as a whole; other changes are noticed at the beginning of the next step.
            list(map(REQUIRES_GRAD, fetched(self._flagged))),
            addresses,
            [list(map(each, buffers)) for each in (_ADDRESS, _KIND, Tensor.stride)],
            # Layers get other buffers when their scales move.  A recording keeps its own, so that no other
            # object gets the same number.
            list(map(id, self.buffers_of_scales())),
            # Before there are scales, tensors are cast with their own.  Buffers that have just been loaded
            # have to be asked.
            [scaling.has_scales for scaling in self.scalings] if None in known else known,
            # Settings of PyTorch and FP8 around the call.
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_deterministic_debug_mode(),
            allows_tf32(),
            None if region is None else (region.recipe, region.enabled, region.calibrating, region.group),
            # The last microbatch of a step updates them together.
            tuple(self.root.shared.scales.held),
        )

    def buffers_of_scales(self) -> list[Tensor | None]:
        """The buffers of all FP8 layers."""
        return list(chain.from_iterable(map(dict.values, fetched(self._of_layers))))

    def _collected(self) -> _Collected:
        """Facts of all groups; the same object as long as they cannot have changed."""
        root, known = self.root, self._known
        # A write to a master shard makes what was cast from it stale, and only its version tells.
        at = root.changes, list(map(_VERSION, self._flats))
        if known is None or known.at != at:
            of_sums = [None if group.main_grad is None else group.main_grad.tensor for group in root.groups]
            of_sums += [each.so_far for group in root.groups for each in group.sums]
            sums = [0 if tensor is None else tensor.data_ptr() for tensor in of_sums]
            trained = [group.params.trained for group in root.groups]
            marks = [group.master.marks for group in root.groups if group.master.marks.is_on]
            watched = [parameter for each in marks for parameter in each.parameters]
            markers = [marker for each in marks for marker in each.watched]
            are_all = not any(each.zeroings for each in marks)
            known = _Collected(at, (facts_of(root), sums, trained), watched, markers if are_all else None)
            self._known = known
        return known

    @property
    def markers_are_in_place(self) -> bool:
        """Whether every `.grad` is a marker, where it was put; if not, each of the groups has to be asked."""
        _, _, watched, markers = self._collected()
        return markers is not None and all(map(is_, map(_GRAD_OF, fetched(watched)), fetched(markers)))

    def why_not(self) -> str | None:
        """Reason why a microbatch cannot be recorded or replayed now; None if it can."""
        if has_global_hooks():
            return "hooks are registered for all modules, and would not run in replays"
        if any(fetched(self._others)) or self._recordable_now() != self._recorded:
            self._sort_hooks()
            if any(self._others):
                return "modules have hooks, which would not run in replays"
        if any(map(dict.get, self._counted, repeat("overflow_counters"))):
            return "overflows are counted, and replays would count on"
        # Earlier microbatches may begin the sum in the same memory.
        is_reduced = self.root.microbatch.is_last or self.root.reduces_early
        trained = (group.kept_grad for group in self.root.groups if is_reduced and group.trains)
        if any(kept is not None and kept.free_memory is None for kept in trained):
            return "gradients of an earlier step are still there, in `.grad` or elsewhere"
        return None


def _has_own_mode(module: nn.Module) -> bool:
    """Whether `training` is an ordinary attribute; a compiled module asks the one that it is made of."""
    return "training" in vars(module) and not hasattr(type(module), "training")


def _has_other_buffers(module: nn.Module) -> bool:
    """Whether it has buffers other than FP8 scales, which layers get, and exchange, as they run."""
    names: set[str] = set()
    if isinstance(module, Countable):
        names.update(*map(buffer_names, get_args(Direction)))
    return not module._buffers.keys() <= names


def _may_be_recorded(hook: Any) -> bool:
    """Whether a hook launches nothing and has no other effect, so that a replay is right without it."""
    # For gradient checkpointing, transformers and PEFT have one that calls `requires_grad_` of embeddings.
    name, package = getattr(hook, "__name__", ""), (getattr(hook, "__module__", None) or "").partition(".")[0]
    asks_for_grads = package in ("transformers", "peft") and name.startswith("make_inputs_require_grad")
    return is_cast(hook) or asks_for_grads
