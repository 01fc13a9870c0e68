"""Gradients on their way from `main_grad` to the master shard's `.grad`.

In:   units whose last gradient of a reducing backward has landed (`unit.py`).
Out:  the master's gradient: this rank's shard of the mean over all data-parallel ranks.
Next: hooks that users have on views (`register_post_accumulate_grad_hook`), `optim/clip.py`, the optimizer.

Every rank launches the reductions in one fixed order, whatever order the gradients land in: the reverse of
registration, which is the order of a backward.  A unit that is ready early waits for its turn.  A parameter
may therefore lack a gradient on some ranks: its group reduces zeros there.  Each reduction carries the
identity of its unit (`comm/checking/journal.py`), so ranks that do not pair raise.

    main_grad --reduce-scatter inside the shard group--> partial_grad, summed over the reducing backwards
              --all-reduce across replicas, in the last backward
              --all-reduce across tensor-parallel ranks, where each has a part of a sum--> master.grad

With `grad_sync="last"` there is one reducing backward, and `partial_grad` is not kept.

A parameter that no rank has used in a step has no gradient, as in plain PyTorch, so that optimizers leave it
alone.  Ranks tell each other what they have used: one bit a parameter, in one small all-reduce a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.byte_ledger import ByteLedger, span
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import all_reduce, raise_to_largest, reduce_scatter
from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.streams import SideStream, compute_waits_for
from flatfsdp.engine.storage.grad_norms import NormsOverRanks
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.torch_private import run_post_accumulate_hooks

logger = logging.getLogger(__name__)

Used = tuple[bool, ...]
"""Whether a gradient has come to each parameter of a group in place, or, alone, to a flat parameter."""

MAX_IN_FLIGHT = 2
"""Reductions under way before the compute stream waits for the oldest: one runs while the next one's
gradients are being computed.  Bounds how many gradient buffers outlive their backward."""


class _Reduction(NamedTuple):
    """One unit's reduction, running on the side stream until the compute stream has waited for `done`."""

    groups: Sequence[FlatGroup]
    kept: list[Tensor | None]
    """Tensors that the stream still reads; freed now, the compute stream would reuse their memory at once."""
    reduced: list[Tensor]
    """Reduced gradients, one a group."""
    done: torch.cuda.Event | None
    is_complete: bool
    """Whether `reduced` is the final gradient, not a part of it that stays in `partial_grad`."""


class Reducer:
    """Reduces the gradients of all groups of one root.

    Args:
        units: the groups of each unit, in registration order.  The groups of a unit that take part in the
            step are reduced together.

    Attributes:
        recorded: groups that the last recorded microbatch has reduced, with what was used of each.
    """

    def __init__(
        self, units: Iterable[Sequence[FlatGroup]], device: torch.device, ledger: ByteLedger
    ) -> None:
        units = list(units)
        self._norms = NormsOverRanks(group.master for groups in units for group in groups)
        self._order = units[::-1]
        self._device = device
        self._stream = SideStream(device)
        self._ledger = ledger
        self._ready: set[int] = set()
        self._next = 0
        self._has_warned = False
        self._in_flight: deque[_Reduction] = deque()
        self._reduced: list[tuple[FlatGroup, Tensor]] = []
        self.recorded: list[tuple[FlatGroup, Used]] = []

    @property
    def has_units(self) -> bool:
        """Whether there is anything to reduce in this step."""
        return any(group.takes_part for groups in self._order for group in groups)

    def ready(self, groups: Sequence[FlatGroup]) -> None:
        """Reduces the groups of a unit whose gradients have all landed, as soon as it is their turn."""
        self._ready.add(self._order.index(groups))
        first = self._next
        while self._next < len(self._order) and not self._is_awaited(self._next):
            self._launch(self._order[self._next])
            self._next += 1
        self._warn_if_late(first, held=len(self._ready.intersection(range(first, self._next))) - 1)

    def _is_awaited(self, index: int) -> bool:
        """Whether gradients of that unit may still land; a frozen unit gets none."""
        return index not in self._ready and any(group.is_awaited for group in self._order[index])

    def _warn_if_late(self, first: int, held: int) -> None:
        """Warns once if a unit has held up many others, whose reductions then overlap with no computation."""
        if held > MAX_IN_FLIGHT and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the gradients of unit %s landed after those of %d units, or not at all, and held them up: "
                "units are reduced in the reverse of their registration; register modules as they run",
                self._order[first][0].name,
                held,
            )

    def finish(self, *, publishes: bool = True) -> None:
        """Reduces what is left and sets the gradient of every group, adding to one that is there.

        Args:
            publishes: False only notes the groups in `recorded`.
        """
        self._warn_if_late(self._next, held=len(self._ready.difference(range(self._next))))
        for groups in self._order[self._next :]:
            self._launch(groups)
        # A nested backward (reentrant checkpointing) may have added to a unit that was reduced already.
        for groups in self._order:
            self._launch([g for g in groups if g.main_grad is not None and g.main_grad.holds_gradients])
        while self._in_flight:
            self._retire()
        used = [_used(group) for group, _ in self._reduced]
        # Only now, so that a backward that fails half-way leaves all gradients as they were.
        if publishes:
            self._publish(used)
        else:
            self.recorded = [(group, each) for (group, _), each in zip(self._reduced, used, strict=True)]
        self.forget()

    def publish_kept(self, reduced: Iterable[tuple[FlatGroup, Used]]) -> None:
        """Publishes the gradients of groups, which a replay has reduced into their kept memory.

        Args:
            reduced: the groups, each with what this rank has used of it.
        """
        used = []
        for group, of_group in reduced:
            assert group.kept_grad is not None
            self._reduced.append((group, group.kept_grad))
            used.append(of_group)
        self._publish(used)
        self.forget()

    def abandon(self) -> None:
        """Waits for the running reductions and drops their results."""
        for reduction in self._in_flight:
            compute_waits_for(reduction.done, self._device)
        self.forget()

    def forget(self) -> None:
        """Drops the running reductions and their results without waiting for them."""
        self._in_flight.clear()
        self._reduced.clear()
        self._ready.clear()
        self._next = 0

    def _launch(self, unit: Sequence[FlatGroup]) -> None:
        groups = [group for group in unit if group.takes_part]
        if not groups:
            return
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._retire()
        is_last = groups[0].microbatch.is_last
        flats = [group.take_grad() for group in groups]
        # Allocated on the compute stream, which uses them in the end.
        shards = [self._shard_for(group, flat) for group, flat in zip(groups, flats, strict=True)]
        kept = [*flats, *shards, *(group.partial_grad for group in groups)]
        with self._stream.after_compute():
            sums = self._reduce_scatter(groups, flats, shards)
            reduced = [self._completed(*each, is_last) for each in zip(groups, sums, strict=True)]
        self._in_flight.append(_Reduction(groups, kept, reduced, self._stream.mark(), is_last))

    def _shard_for(self, group: FlatGroup, flat: Tensor) -> Tensor:
        if group.grid.shard.size == 1:
            return flat
        dtype, kept = group.policy.precision.reduce, self._kept(group)
        if kept is not None and kept.dtype == dtype and group.microbatch.is_last:
            return kept
        return flat.new_empty(group.master.flat.numel(), dtype=dtype)

    def _kept(self, group: FlatGroup) -> Tensor | None:
        """Memory with a fixed address for the reduced gradient; None if there is none, or it is in use."""
        return group.kept_grad if group.is_kept_grad_free else None

    def _reduce_scatter(
        self, groups: Sequence[FlatGroup], flats: list[Tensor], shards: list[Tensor]
    ) -> list[Tensor]:
        first = groups[0]
        ranks, division = first.reduce_grid.shard, first.division
        if division is not None:
            for flat in flats:
                flat.div_(division.before)
        if ranks.size == 1:
            return flats
        payloads = [self._cast(flat, first.policy.precision.reduce) for flat in flats]
        nbytes = sum(each.numel() * each.element_size() for each in payloads) * (ranks.size - 1) // ranks.size
        action = Action.REDUCE if first.microbatch.is_last else Action.REDUCE_EARLY
        with (
            span("reduce_scatter", first.name, first.microbatch.index, nbytes),
            launch(ranks, first.identify(action), self._device, len(payloads)),
        ):
            for shard, payload in zip(shards, payloads, strict=True):
                reduce_scatter(shard, payload, ranks, mean=division is None)
        self._ledger.add("reduce", nbytes)
        return shards

    def _completed(self, group: FlatGroup, reduced: Tensor, is_last: bool) -> Tensor:
        """Adds what earlier backwards of this step have reduced; in the last one, reduces over all ranks."""
        if group.partial_grad is not None or not is_last:
            reduced = self._add_to_partial(group, reduced)
        if is_last:
            group.partial_grad = None
            reduced = self._tp_all_reduce(group, self._all_reduce(group, reduced))
        return reduced

    def _add_to_partial(self, group: FlatGroup, reduced: Tensor) -> Tensor:
        """Adds to the sum over this step's reducing backwards, in the dtype of accumulation."""
        reduced, partial = self._cast(reduced, group.policy.precision.accumulate), group.partial_grad
        if partial is not None:
            reduced = partial.add_(reduced)
            self._ledger.add("accumulate", 3 * reduced.numel() * reduced.element_size())
        group.partial_grad = reduced
        return reduced

    def _all_reduce(self, group: FlatGroup, reduced: Tensor) -> Tensor:
        ranks, division = group.reduce_grid.replicate, group.division
        if ranks.size > 1:
            reduced = self._cast(reduced, group.policy.precision.reduce)
            nbytes = 2 * reduced.numel() * reduced.element_size() * (ranks.size - 1) // ranks.size
            with (
                span("all_reduce", group.name, group.microbatch.index, nbytes),
                launch(ranks, group.identify(Action.REDUCE_REPLICAS), self._device),
            ):
                all_reduce(reduced, ranks, mean=division is None)
            self._ledger.add("all_reduce", nbytes)
        if division is not None:
            reduced.div_(division.after)
        return reduced

    def _tp_all_reduce(self, group: FlatGroup, reduced: Tensor) -> Tensor:
        """All-reduces over tensor-parallel ranks in FP32 at least, once a step."""
        ranks = group.reduce_grid.tensor
        if ranks.size == 1:
            return reduced
        reduced = self._cast(reduced, torch.promote_types(reduced.dtype, torch.float32))
        nbytes = 2 * reduced.numel() * reduced.element_size() * (ranks.size - 1) // ranks.size
        with (
            span("tp_all_reduce", group.name, group.microbatch.index, nbytes),
            launch(ranks, group.identify(Action.REDUCE_PARTIAL), self._device),
        ):
            all_reduce(reduced, ranks, mean=False)
        self._ledger.add("tp_all_reduce", nbytes)
        return reduced

    def _retire(self) -> None:
        reduction = self._in_flight.popleft()
        compute_waits_for(reduction.done, self._device)
        if reduction.is_complete:
            for group, reduced in zip(reduction.groups, reduction.reduced, strict=True):
                grad, kept = self._cast(reduced, group.master.grad_dtype), self._kept(group)
                if kept is not None and kept.data_ptr() != grad.data_ptr():
                    grad = kept.copy_(grad)
                self._reduced.append((group, grad))

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts to the reduce dtype; usually nothing, as gradients are accumulated in that dtype."""
        if tensor.dtype == dtype:
            return tensor
        cast = tensor.to(dtype)
        self._ledger.add("cast", tensor.numel() * (tensor.element_size() + cast.element_size()))
        return cast

    def _used_by_any(self, own: Sequence[Used]) -> Sequence[Used]:
        """What any rank has used of each reduced group, from what this rank has used.  Collective.

        Every rank sends its bits in every step, in the order of the reductions.  The host waits for the
        answer only on a rank that has left a trained parameter unused: all others know it.
        """
        places: dict[tuple[Ranks, ...], list[int]] = {}
        for index, (group, _) in enumerate(self._reduced):
            grid = group.reduce_grid
            ranks = tuple(each for each in (grid.shard, grid.replicate, group.grid.tensor) if each.size > 1)
            if ranks:
                places.setdefault(ranks, []).append(index)
        answers = list(own)
        # Imagined ranks, on the meta device, do what this one does.
        for ranks, indices in places.items() if self._device.type != "meta" else ():
            groups = [self._reduced[index][0] for index in indices]
            bits = tuple(bit for index in indices for bit in own[index])
            pairs = zip(groups, (own[index] for index in indices), strict=True)
            asks = any(_may_be_used_elsewhere(*pair) for pair in pairs)
            # Pinned, so that the host does not wait for the copy, which waits for all kernels so far.
            own_bits = torch.tensor(bits, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            with self._stream.after_compute():
                mask = own_bits.to(self._device, non_blocking=True)
                for each in ranks:
                    with launch(each, groups[0].identify(Action.USED), self._device):
                        raise_to_largest(mask, each)
            compute_waits_for(self._stream.mark(), self._device)
            if asks:
                found = iter(mask.tolist())
                for index in indices:
                    answers[index] = tuple(bool(next(found)) for _ in own[index])
        return answers

    def _publish(self, used: Sequence[Used]) -> None:
        """Hands the gradients to the optimizer, on its device.

        Args:
            used: what this rank has used of each reduced group.
        """
        used = self._used_by_any(used)
        downloads = [group.master.is_offloaded for group, _ in self._reduced]
        grads = [self._download(group, g) if group.master.is_offloaded else g for group, g in self._reduced]
        if any(downloads):
            # The optimizer reads them on the host first.
            torch.cuda.current_stream(self._device).synchronize()
        for (group, _), grad, of_group in zip(self._reduced, grads, used, strict=True):
            added = group.master.add_grad(grad, of_group)
            if added:
                self._ledger.add("accumulate", 3 * added * grad.element_size())
        for (group, _), of_group in zip(self._reduced, used, strict=True):
            of_parameters = of_group if group.master.has_views else repeat(of_group[0])
            for parameter, is_used in zip(group.master.parameters, of_parameters, strict=False):
                if is_used:
                    run_post_accumulate_hooks(parameter)

    def _download(self, group: FlatGroup, grad: Tensor) -> Tensor:
        nbytes = grad.numel() * grad.element_size()
        with span("download", group.name, group.microbatch.index, nbytes):
            host = torch.empty(grad.shape, dtype=grad.dtype, device="cpu", pin_memory=True)
            host.copy_(grad, non_blocking=True)
        self._ledger.add("offload", nbytes)
        return host


def _used(group: FlatGroup) -> Used:
    """What this rank has used of a group: of a wrapper's flat parameter, anything counts as all of it.

    A penalty that has a gradient counts as well, so that ranks agree on who has one.
    """
    penalties = group.master.marks.autograds()
    if not group.master.has_views:
        return (bool(group.used or penalties),)
    used = group.used.union(penalties) if penalties else group.used
    return tuple(map(used.__contains__, range(len(group.layout.slots))))


def _may_be_used_elsewhere(group: FlatGroup, own: Used) -> bool:
    """Whether another rank may have used something that this one has not; nobody uses what is frozen."""
    if all(own):
        return False
    if not group.master.has_views or group.flags_changed_in_step:
        return True
    return any(trains and not is_used for trains, is_used in zip(group.params.trained, own, strict=True))
