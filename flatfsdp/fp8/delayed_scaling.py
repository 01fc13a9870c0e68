"""State of delayed scaling: the current scales of casts, and the amax histories behind them.

In:   amaxes, which cast kernels write into row 0 of the histories.
Out:  `Scales` for casts; `Arena.update` makes the next ones, once per forward and once per backward.
Next: `fp8/autocast.py` decides when to update; `quantizers.py` casts.

    Scaling     one direction (forward or backward) of one module: some columns of an arena, which are the
                module's buffers fp8_<direction>_scale [n] and fp8_<direction>_amax_history [L, n]
    Arena       the columns of many modules: one all-reduce and one launch update all of them
    Scales      one generation of scales, never overwritten: a tensor cast with it, or a recomputation, keeps
                the values of its time

Before its first update a `Scaling` has no scales, and casts take the tensor's own, as in current scaling.  A
scale of 1 would turn most of a small gradient into zeros.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch_on_host
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.recipe import DelayedScaling
from flatfsdp.kernels.cast.scaling import Scales, align_inverses, one_by_one, update_scales

logger = logging.getLogger(__name__)

Direction = Literal["forward", "backward"]


class Observer(Protocol):
    """An object that inspects amaxes before each update."""

    def before_update(self, arena: Arena) -> None:
        """Called while row 0 of the history has the latest amaxes, and `scale` the scales of their casts."""


class Holder(Protocol):
    """A step that updates scales once, at its end."""

    def hold(self, scaling: Scaling, group: dist.ProcessGroup | None) -> None:
        """Notes that amaxes are recorded; `group` are the ranks that share the scales."""


class Arena:
    """Scales and histories of n tensors.

    Args:
        fp8_max: largest number of each tensor's format.
        length: rows of the history.
        device: device of the buffers.

    Attributes:
        scale: FP32 [n]; saved and loaded by checkpoints, in place.
        history: FP32 [L, n]; casts raise row 0, row 1 is the oldest update, row L - 1 the latest.
        fp8_max: FP32 [n].
        observers: called before each update, in this order; usually empty.
        is_recorded: whether the CUDA graph being captured begins with `renew`, so that its replays see new
            scales.
    """

    def __init__(self, fp8_max: Sequence[float], length: int, device: torch.device) -> None:
        n, fp32 = len(fp8_max), torch.float32
        # A layer may run for the first time in inference mode.  Tensors made there could not be written by a
        # training step later.
        with torch.inference_mode(False):
            self.scale = torch.ones(n, dtype=fp32, device=device)
            self.history = torch.zeros(length, n, dtype=fp32, device=device)
            self.fp8_max = torch.tensor(fp8_max, dtype=fp32, device=device)
        self._scales: tuple[Scales, ...] = ()
        self._version = -1
        # Weak references: the group must be able to end (see `Ranks`), and members may be layers of several
        # models, which would keep each other alive.
        self._agreed: weakref.ref[dist.ProcessGroup] | None = None
        self._members: list[weakref.ref[Scaling]] = []
        self.observers: dict[Observer, None] = {}
        self.is_recorded = False

    def renew(self) -> None:
        """Makes casts read `scale` again: cached scales belong to another recording, or to none."""
        self._version, self._scales = -1, ()

    @property
    def members(self) -> list[Scaling]:
        """The `Scaling`s whose columns it holds."""
        alive = (member() for member in self._members)
        # Members that have moved to a merged arena are still on the list.
        return [scaling for scaling in alive if scaling is not None and scaling.arena is self]

    def add(self, scaling: Scaling) -> None:
        """Lists `scaling` as a member, as long as it lives and keeps its columns here."""
        self._members.append(weakref.ref(scaling))

    def observe(self, observers: Iterable[Observer]) -> None:
        """Adds observers, which are called before each update."""
        self.observers.update(dict.fromkeys(observers))

    @property
    def scales(self) -> tuple[Scales, ...]:
        """The current generation of scales, by tensor."""
        # Loading a checkpoint writes to `scale` and changes its version.
        if self._version != self.scale._version:
            with torch.inference_mode(False):
                # A copy, because tensors that are saved for a backward keep the scale of their cast, whatever
                # is loaded before it.
                self._scales = one_by_one(align_inverses(Scales(self.scale.clone(), self.scale.reciprocal())))
            self._version = self.scale._version
        return self._scales

    def agree(self, recipe: DelayedScaling, group: dist.ProcessGroup) -> None:
        """Checks, the first time over `group`, that all ranks have the same layers and recipe.

        Raises:
            RuntimeError: if they differ; on every rank.
        """
        if self._agreed is None or self._agreed() is not group:
            lines = [*(scaling.label for scaling in self.members), f"recipe {recipe}"]
            check_same_on_all_ranks(lines, [Ranks.of(group)], self.scale.device)
            self._agreed = weakref.ref(group)

    @torch.no_grad()
    @torch.inference_mode(False)
    def update(self, recipe: DelayedScaling, group: dist.ProcessGroup | None) -> None:
        """Makes the next generation of scales, after a max-reduction of the amaxes over `group`.

        Raises:
            RuntimeError: while a CUDA graph is captured, whose replays would cast with the scales of now.
        """
        if is_captured(self.scale.device) and not self.is_recorded:
            raise RuntimeError(
                "replays of this CUDA graph would all cast with the scales of its capture; use CurrentScaling"
            )
        # Ranks first, so that all of them make the same scales.  Then observers, which read row 0 before the
        # history rolls.
        if group is not None:
            ranks, amaxes = Ranks.of(group), self.history[0]
            with launch_on_host(ranks, Identity.counting(Action.AMAX, amaxes.numel()), amaxes.device):
                raise_to_largest(amaxes, ranks)
        for observer in self.observers:
            observer.before_update(self)
        self._advance(self.history, recipe)

    @torch.no_grad()
    @torch.inference_mode(False)
    def rescale(self, recipe: DelayedScaling) -> None:
        """Recomputes scales for another format or margin from the history, which does not roll."""
        remembered = self.history[1:]
        if len(remembered):
            # A history of one row, and a copy: `update_scales` rolls what it is given, and takes row 0 for an
            # amax that is new.
            is_latest = recipe.amax_compute_algo == "most_recent"
            amax = remembered[-1:].clone() if is_latest else remembered.amax(0, keepdim=True)
            self._advance(amax, recipe)

    def _advance(self, history: Tensor, recipe: DelayedScaling) -> None:
        scales = update_scales(
            history,
            self.scale,
            self.fp8_max,
            most_recent=recipe.amax_compute_algo == "most_recent",
            margin=recipe.margin,
            power_of_two=recipe.power_of_two_scales,
        )
        self._scales = one_by_one(align_inverses(scales))
        self.scale.copy_(scales.scale)
        # This write is no load: casts have the scales of this generation already.
        self._version = self.scale._version


class Scaling:
    """The scales of one direction of one module.

    Args:
        owner: the module whose buffers these are.
        direction: forward or backward.
        dtypes: the FP8 format of each tensor.
        recipe: the recipe.
        device: device of the buffers.

    Attributes:
        was_loaded: whether the buffers come from a checkpoint, possibly with another recipe.
        amaxes: where casts of each tensor record their amax, FP32 [1].
        columns: this module's columns of the arena.
        known: whether there are scales, as in `has_scales`; None if the buffers have yet to tell.
        held_by: what updates them once a step; None: the region in which they are used does, each time.
    """

    def __init__(
        self,
        owner: nn.Module,
        direction: Direction,
        dtypes: Sequence[torch.dtype],
        recipe: DelayedScaling,
        device: torch.device,
    ) -> None:
        self.owner = owner
        self.was_loaded = False
        self.direction = direction
        self._keys = buffer_names(direction)
        self.fp8_max = [torch.finfo(dtype).max for dtype in dtypes]
        self.recipe = recipe
        self.known: bool | None = False
        self.held_by: Holder | None = None
        self.arena: Arena
        self.amaxes: tuple[Tensor, ...]
        self._adopt(device)

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.arena.scale.device

    @property
    def scale_means(self) -> tuple[object, ...]:
        """The values that a scale depends on besides the amax."""
        return (*self.fp8_max, self.recipe.margin, self.recipe.power_of_two_scales)

    @property
    def label(self) -> str:
        """A description for the comparison of ranks."""
        return f"an FP8 {type(self.owner).__name__} with {len(self.fp8_max)} {self._keys[0]}"

    @property
    def is_current(self) -> bool:
        """Whether the owner's buffers are still those of the arena; a copy or move replaces them."""
        buffers = self.owner._buffers
        return all(map(is_, map(buffers.get, self._keys), self._views))

    @property
    def has_scales(self) -> bool:
        """Whether they were updated, here or in the run that saved them."""
        if self.known is None:
            scale, history = self._views
            # Waits for the device, once after a load.
            self.known = bool(history.any() or scale.ne(1).any())
        return self.known

    @has_scales.setter
    def has_scales(self, value: bool) -> None:
        self.known = value

    def reread(self) -> None:
        """Notes that the buffers were loaded: they tell whether there are scales."""
        self.known = None

    def scales(self) -> tuple[Scales, ...]:
        """The current scales of this module's tensors; empty before the first update."""
        return self.arena.scales[self.columns] if self.has_scales else ()

    def forget(self) -> None:
        """Discards the amaxes since the last update."""
        self._row0.zero_()

    def _adopt(self, device: torch.device) -> None:
        """Makes an arena of its own from the owner's buffers, if there are any (loaded, copied or moved)."""
        scale, history = (self.owner._buffers.get(key) for key in self._keys)
        arena = Arena(self.fp8_max, self.recipe.amax_history_len, device)
        n = len(self.fp8_max)
        if scale is not None and history is not None:
            if scale.numel() != n or history.shape[1] != n:
                raise ValueError(
                    f"{self._keys[0]} of {type(self.owner).__name__} has {scale.numel()} scales; this layer "
                    f"has {n}: the checkpoint is of another kind of layer"
                )
            with torch.no_grad():
                arena.scale.copy_(scale)
                # The latest updates are kept, whether a longer or shorter history was saved.
                arena.history[0].copy_(history[0])
                kept = min(history.shape[0], arena.history.shape[0]) - 1
                if kept:
                    arena.history[-kept:].copy_(history[-kept:])
            # Whether a checkpoint has scales, or was saved before the first update, only its values tell;
            # they are read when a cast needs to know.
            self.reread()
        self.move_to(arena, 0)

    def move_to(self, arena: Arena, start: int) -> None:
        """Takes over `arena`'s columns from `start`, which already hold its values."""
        n = len(self.fp8_max)
        self.arena, self.columns = arena, slice(start, start + n)
        arena.add(self)
        self._views = (arena.scale.narrow(0, start, n), arena.history.narrow(1, start, n))
        self._row0 = arena.history[0].narrow(0, start, n)
        self.amaxes = self._row0.split(1)
        # The buffers are views of the arena, so one launch updates those of all layers, and state dicts find
        # them under each layer's name.
        for key, view in zip(self._keys, self._views, strict=True):
            self.owner.register_buffer(key, view)

    def copy_to(self, arena: Arena, start: int) -> None:
        """Copies its values into `arena`'s columns from `start`."""
        n = len(self.fp8_max)
        arena.scale.narrow(0, start, n).copy_(self._views[0])
        arena.history.narrow(1, start, n).copy_(self._views[1])


def is_captured(device: torch.device) -> bool:
    """Whether work launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def buffer_names(direction: Direction) -> tuple[str, str]:
    """The names of a direction's scale and history buffers."""
    return f"fp8_{direction}_scale", f"fp8_{direction}_amax_history"


def update(scalings: Iterable[Scaling], group: dist.ProcessGroup | None) -> None:
    """Updates the scales of all that were used; collective over `group`, if given."""
    used = list(scalings)
    by_kind: dict[tuple[DelayedScaling, torch.device], list[Arena]] = {}
    # One look-up per arena, whose members share a recipe: hashing a recipe is slow.
    for arena, scaling in {scaling.arena: scaling for scaling in used}.items():
        by_kind.setdefault((scaling.recipe, scaling.device), []).append(arena)
    # In the order in which layers ran, which is the same on all ranks of the group: each kind is one
    # all-reduce.
    for (recipe, device), arenas in by_kind.items():
        arena = arenas[0] if len(arenas) == 1 else _merged(arenas, recipe, device)
        if group is not None and recipe.reduce_amax:
            arena.agree(recipe, group)
            arena.update(recipe, group)
        else:
            arena.update(recipe, None)
    for scaling in used:
        scaling.has_scales = True


def _merged(arenas: Sequence[Arena], recipe: DelayedScaling, device: torch.device) -> Arena:
    """A new arena with the columns of all members of these, side by side.

    Unused members are included: layers that run in several regions would otherwise move back and forth.
    """
    members = [scaling for arena in arenas for scaling in arena.members]
    fp8_max = [limit for scaling in members for limit in scaling.fp8_max]
    arena = Arena(fp8_max, recipe.amax_history_len, device)
    for each in arenas:
        arena.observe(each.observers)
    start = 0
    with torch.no_grad():
        for scaling in members:
            scaling.copy_to(arena, start)
            scaling.move_to(arena, start)
            start += len(scaling.fp8_max)
    logger.debug("amaxes of %d layers are updated together", len(members))
    return arena
