"""Gradients on their way from `main_grad` to the master shard's `.grad`.

In:   units whose last gradient of a reducing backward has landed (`driven_unit.py`).
Out:  the master's gradient: this rank's shard of the mean over all data-parallel ranks.
Next: hooks that users have on views (`register_post_accumulate_grad_hook`), `optim/clip.py`, the optimizer.

Every rank launches the reductions in one fixed order, whatever order the gradients land in: the reverse of
registration, which is the order of a backward.  A unit that is ready early waits for its turn.  A parameter
may therefore lack a gradient on some ranks: its group reduces zeros there.  Each reduction carries the
identity of its unit (`comm/checking/journal.py`), so ranks that do not pair raise.

    main_grad --`sum_over_ranks.py`, or with lanes `lane_sum.py`--> master.grad

With `grad_sync="last"` one backward of a step reduces; with "every", each does; with lanes, the last one of
each lane.  Until the last backward of all, the sums stay in `partial_grad`.

With "every", nothing in a backward would hide the reductions of its last units, as of the embedding.  They
run in the next microbatch, beside the forwards of its first units (`take_up`).

A parameter that no rank has used in a step has no gradient, as in plain PyTorch, so that optimizers leave it
alone.  Ranks tell each other what they have used: one bit a parameter, in one small all-reduce a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import ALONE, Ranks, several
from flatfsdp.comm.streams import SideStream, compute_waits_for
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.step.lane_sum import LaneSum
from flatfsdp.engine.step.sum_over_ranks import Groups, SumOverRanks
from flatfsdp.engine.storage.grad_norms import NormsOverRanks
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.state import Shared
from flatfsdp.torch_private import run_post_accumulate_hooks

logger = logging.getLogger(__name__)

Used = tuple[bool, ...]
"""Whether a gradient has come to each parameter that the optimizer has of a group."""

MAX_IN_FLIGHT = 2
"""Reductions under way before the compute stream waits for the oldest: one runs while the next one's
gradients are being computed.  Bounds how many gradient buffers outlive their backward."""

LEFT = MAX_IN_FLIGHT
"""Units that a backward before the last one leaves to the next microbatch: as many as may be under way."""

SETTLED_BEFORE = 6
"""Position in a forward of the unit that runs once those are reduced, or of the last unit: enough forwards
to hide them, and early enough that the memory is free again when activations are at their most."""


class Reduced(NamedTuple):
    """The reduced gradient of a group.

    Attributes:
        group: the group.
        grad: this rank's part, as long as the master shard.
        used: what this rank has used of the group in the step.
    """

    group: FlatGroup
    grad: Tensor
    used: Used


class _Reduction(NamedTuple):
    """One unit's reduction, running on the side stream until the compute stream has waited for `done`."""

    sums: dict[FlatGroup, Tensor]
    """What the gradients have become a part of."""
    ends: bool
    """Whether these are final; otherwise they stay in `partial_grad`."""
    read: list[Tensor | None]
    """Tensors that the stream still reads; freed now, the compute stream would reuse their memory at once."""
    done: torch.cuda.Event | None


class Reducer:
    """Reduces the gradients of all groups of one root.

    Args:
        units: the groups of each unit, in registration order.  The groups of a unit that take part in the
            step are reduced together.

    Attributes:
        grids: the ranks that each group is reduced over, with communicators of their own: a reduction runs
            beside the gathers of other units, and one communicator runs its collectives one by one.
    """

    def __init__(self, units: Sequence[Groups], shared: Shared) -> None:
        self._norms = NormsOverRanks(group.master for groups in units for group in groups)
        # The order of a backward, and the same on all ranks, whichever gradients land first on each.
        self._order = units[::-1]
        self._shared = shared
        # Not the gathers' stream: a reduction waits for its gradients, and a gather would wait with it.
        self._stream = SideStream(shared.device)
        self.grids = {group: _own_grid(group) for groups in units for group in groups}
        lanes = units[0][0].unit.policy.lanes if units else None
        self._sum = (SumOverRanks if lanes is None else LaneSum)(shared, self.grids)
        # With lanes a reduction belongs to the turn of its backward.
        self._may_leave = lanes is None and len(units) > LEFT
        self._ready: set[int] = set()
        self._next = 0
        self._has_warned = False
        self._in_flight: deque[_Reduction] = deque()
        self._reduced: dict[FlatGroup, Tensor] = {}

    @property
    def left(self) -> Sequence[Groups]:
        """Units that backwards before a step's last one leave to the next microbatch, on all ranks alike."""
        return self._order[-LEFT:] if self._shared.reduces_every and self._may_leave else ()

    @property
    def _reduced_now(self) -> Sequence[Groups]:
        """Units that the running backward reduces."""
        is_last = self._shared.microbatch.is_last
        return self._order if is_last else self._order[: len(self._order) - len(self.left)]

    def ready(self, groups: Groups) -> None:
        """Reduces the groups of a unit whose gradients have all landed, as soon as it is their turn."""
        self._ready.add(self._order.index(groups))
        first = self._next
        for groups in self._reduced_now[first:]:
            # Gradients of that unit may still land; a frozen unit gets none.
            if self._next not in self._ready and any(group.is_awaited for group in groups):
                break
            self._launch(groups, ends=self._shared.microbatch.is_last)
            self._next += 1
        self._warn_if_late(first, held=len(self._ready.intersection(range(first, self._next))) - 1)

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

    def finish(self) -> list[Reduced]:
        """Reduces what has not been, but for what is left; returns gradients that are reduced for good."""
        ends = self._shared.microbatch.is_last
        self._warn_if_late(self._next, held=len(self._ready.difference(range(self._next))))
        for groups in self._reduced_now[self._next :]:
            self._launch(groups, ends=ends)
        # A nested backward (reentrant checkpointing) may have added to a unit that was reduced already.
        for groups in self._reduced_now:
            late = [g for g in groups if g.main_grad is not None and g.main_grad.holds_gradients]
            if late and late[0].unit.policy.lanes is not None:
                raise RuntimeError(
                    f"unit {late[0].name} got gradients after it was reduced, in a reentrant checkpoint, and "
                    "lanes add all of a lane at once; pass use_reentrant=False to the checkpoint"
                )
            self._launch(late, ends=ends)
        # First, so that what was sent is freed before the units that are left get buffers.
        self.settle()
        for groups in () if ends else self.left:
            for group in groups:
                if group.main_grad is not None and group.state.takes_part:
                    # On a rank that has not used it as well: by this `take_up` tells.
                    group.main_grad.open()
        reduced = [Reduced(group, grad, _used(group)) for group, grad in self._reduced.items()]
        self.forget()
        return reduced

    def take_up(self) -> None:
        """Launches what the last backward has left, at the beginning of the next microbatch."""
        for groups in self.left:
            # What a user has zeroed since is gone, on all ranks.
            left = [g for g in groups if g.main_grad is not None and g.main_grad.holds_gradients]
            self._launch(left, ends=False)

    def settle(self) -> None:
        """Lets the compute stream wait for what is under way, whose memory is free then."""
        while self._in_flight:
            self._retire()

    def forget(self, *, waits: bool = True) -> None:
        """Drops the running reductions and their results, and waits for them unless they never run."""
        for reduction in self._in_flight if waits else ():
            compute_waits_for(reduction.done, self._shared.device)
        self._in_flight.clear()
        self._reduced.clear()
        self._ready.clear()
        self._next = 0

    def _launch(self, unit: Groups, *, ends: bool) -> None:
        groups = [group for group in unit if group.state.takes_part]
        if not groups:
            return
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._retire()
        flats = [main_grad.take() for group in groups if (main_grad := group.main_grad) is not None]
        # Allocated on the compute stream, which uses them in the end.
        kept = [self._kept_for(group) for group in groups]
        memory = [self._sum.memory_for(*each) for each in zip(groups, flats, kept, strict=True)]
        # Taken before the partial sums are replaced: the stream reads these, too.
        read = [*flats, *memory, *(group.partial_grad.so_far for group in groups)]
        with self._stream.after_compute():
            sums = self._sum.add(groups, flats, memory, kept, ends=ends)
        of_groups = dict(zip(groups, sums, strict=True))
        self._in_flight.append(_Reduction(of_groups, ends, [*read, *sums], self._stream.mark()))

    def _kept_for(self, group: FlatGroup) -> Tensor | None:
        """Memory that the optimizer will read, unless a backward around this one has reduced into it already.

        A unit in a reentrant checkpoint may be reduced twice.
        """
        is_first = group not in self._reduced and not any(
            each.ends and group in each.sums for each in self._in_flight
        )
        return _kept(group) if is_first else None

    def _retire(self) -> None:
        # The oldest: its buffers are freed after this, for the compute stream to use again.
        reduction = self._in_flight.popleft()
        compute_waits_for(reduction.done, self._shared.device)
        for group in reduction.sums:
            if group.main_grad is not None:
                group.main_grad.returned()
        for group, reduced in reduction.sums.items() if reduction.ends else ():
            grad = self._sum.cast(reduced, group.master.grad_dtype)
            if group in self._reduced:
                # A nested backward has brought more since; to the optimizer it is one gradient.
                self._reduced[group].add_(grad)
                self._shared.ledger.add("accumulate", 3 * grad.nbytes)
                continue
            kept = _kept(group)
            if kept is not None and kept.data_ptr() != grad.data_ptr():
                grad = kept.copy_(grad)
            elif kept is None and grad is group.partial_grad.memory:
                # The next step's gradients are added up in this memory.
                grad = grad.clone()
            self._reduced[group] = grad

    def publish(self, reduced: Sequence[Reduced]) -> None:
        """Hands reduced gradients to the optimizer, on its device, adding to those that are there."""
        used = self._used_by_any(reduced)
        grads = [_on_its_device(group, grad) for group, grad, _ in reduced]
        if any(group.master.is_offloaded for group, _, _ in reduced):
            # The optimizer reads them on the host first.
            torch.cuda.current_stream(self._shared.device).synchronize()
        for (group, _, _), grad, of_group in zip(reduced, grads, used, strict=True):
            added = group.master.add_grad(grad, of_group)
            # Before hooks, which may step an optimizer: what is reduced no longer waits for it.
            group.master.marks.stop()
            if added:
                self._shared.ledger.add("accumulate", 3 * added * grad.element_size())
        # Once all gradients are there: a hook may step an optimizer that has parameters of several groups.
        for (group, _, _), of_group in zip(reduced, used, strict=True):
            for parameter, is_used in zip(group.master.parameters, of_group, strict=True):
                if is_used:
                    run_post_accumulate_hooks(parameter)

    def _used_by_any(self, reduced: Sequence[Reduced]) -> Sequence[Used]:
        """What any rank has used of each reduced group.  Collective.

        Every rank sends its bits in every step, in the order of the reductions.  The host waits for the
        answer only on a rank that has left a trained parameter unused: all others know it.
        """
        by_ranks: dict[tuple[Ranks, ...], list[int]] = {}
        for index, (group, _, _) in enumerate(reduced):
            grid = self.grids[group]
            if ranks := tuple(several((grid.shard, grid.replicate, group.grid.tensor))):
                by_ranks.setdefault(ranks, []).append(index)
        answers = [each.used for each in reduced]
        # Imagined ranks, on the meta device, do what this one does.
        for ranks, indices in by_ranks.items() if self._shared.device.type != "meta" else ():
            bits = tuple(bit for index in indices for bit in answers[index])
            asks = any(_may_be_used_elsewhere(reduced[index].group, answers[index]) for index in indices)
            # Pinned, so that the host does not wait for the copy, which waits for all kernels so far.
            own = torch.tensor(bits, dtype=torch.uint8, pin_memory=self._shared.device.type == "cuda")
            identity = self._identify_end(reduced[indices[0]].group)
            with self._stream.after_compute():
                mask = own.to(self._shared.device, non_blocking=True)
                for each in ranks:
                    with launch(each, identity, self._shared.device):
                        raise_to_largest(mask, each)
            compute_waits_for(self._stream.mark(), self._shared.device)
            if asks:
                # This rank alone waits for its device: every other one knows the answer.
                found = iter(mask.tolist())
                for index in indices:
                    answers[index] = tuple(bool(next(found)) for _ in answers[index])
        return answers

    def _identify_end(self, group: FlatGroup) -> Identity | None:
        """What ranks compare at the end of a step; with lanes also how many microbatches it had."""
        unit = group.unit
        if unit.policy.lanes is None or unit.model is None:
            return unit.identify(Action.USED)
        microbatch = self._shared.microbatch
        is_early = microbatch.steps_reduced == 0
        return Identity.counting(Action.LANES, microbatch.index + 1, unit.model, is_early)


def _on_its_device(group: FlatGroup, grad: Tensor) -> Tensor:
    """The gradient where the optimizer is, if on the host, on its way there."""
    if not group.master.is_offloaded:
        return grad
    with group.unit.moving("download", "offload", grad.nbytes):
        return torch.empty_like(grad, device="cpu", pin_memory=True).copy_(grad, non_blocking=True)


def _own_grid(group: FlatGroup) -> Grid:
    """The ranks of a group with communicators of their own.  Collective."""
    grid, is_partial = group.grid, group.layout.placement is Placement.PARTIAL
    tensor = grid.tensor.own_communicator() if is_partial else ALONE
    return Grid(grid.shard.own_communicator(), grid.replicate.own_communicator(), tensor)


def _kept(group: FlatGroup) -> Tensor | None:
    """Memory with a fixed address for the reduced gradient; None if there is none, or it is in use."""
    return None if group.kept_grad is None else group.kept_grad.free_memory


def _used(group: FlatGroup) -> Used:
    """What this rank has used of a group: of a flat parameter, anything counts as all of it.

    A penalty that has a gradient counts as well, so that ranks agree on who has one.
    """
    of_slots = list(map(group.state.used.__contains__, range(len(group.layout.slots))))
    penalties = group.master.marks.autograds()
    return tuple(used or n in penalties for n, used in enumerate(group.master.per_local_shard(of_slots)))


def _may_be_used_elsewhere(group: FlatGroup, own: Used) -> bool:
    """Whether another rank may have used something that this one has not; nobody uses what is frozen."""
    if all(own):
        return False
    trained = zip(group.master.per_local_shard(group.params.trained), own, strict=True)
    return group.state.flags_changed or any(trains and not is_used for trains, is_used in trained)
