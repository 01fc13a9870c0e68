"""`Root`: the state of one model, shared by its units; forwards and backwards begin and end here.

In:   the first FlatFSDP module that is called becomes the root of all FlatFSDP modules inside it.
Out:  one `Root` that its units refer to.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Protocol

import torch

from flatfsdp.byte_ledger import ByteLedger
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import declare, look
from flatfsdp.comm.ranks import Ranks
from flatfsdp.comm.streams import SideStream
from flatfsdp.engine.step.backward import Backward
from flatfsdp.engine.step.gather_and_free import reshard_unused
from flatfsdp.engine.step.prefetch_order import Forward, ForwardOrder
from flatfsdp.engine.step.reduce import Reducer, Used
from flatfsdp.engine.step.requires_grad import follow_requires_grad
from flatfsdp.engine.step.unit import Call, Unit
from flatfsdp.engine.step.weight_scales import weight_scales
from flatfsdp.engine.storage.changes import Changes
from flatfsdp.engine.storage.first_values import require_same_first_values
from flatfsdp.engine.storage.group import FlatGroup, Passage
from flatfsdp.engine.storage.master import Version
from flatfsdp.engine.storage.unreduced import AllMarkers
from flatfsdp.flat.nested import tensors_in
from flatfsdp.fp8.delayed_scaling import Scaling
from flatfsdp.fp8.recompute import current_tape
from flatfsdp.fp8.step_scales import StepScales
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import Prefetch
from flatfsdp.torch_private import call_before_shutdown, in_backward, never_traced, running_backward

logger = logging.getLogger(__name__)

_HOOKS = attrgetter("_backward_hooks")


class MemoryPool(Protocol):
    """Memory beside the buffers of the engine, such as that of recorded microbatches."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""


class Root:
    """State that all units of one model share.  Its construction is collective.

    Args:
        number: number of the model, the same on all ranks.
        timeout: seconds that a rank waits for the others in a gather or reduction.

    Attributes:
        units: units in registration order, the root module's own first.
        groups: flat groups of all units, in that order.
        scales: scales of FP8 layers at the beginning of the step.
        changes: count of changes to the groups.
        calls: calls of units that have ended in the running forward, inner ones before outer ones.
        forward_action: purpose for which the running forward, or the last one, gathers.
        backward: tracks the running backward.
        pools: memory pools of recorded microbatches, as long as there are any.
    """

    def __init__(
        self,
        units: list[Unit],
        device: torch.device,
        prefetch: Prefetch,
        reduce_every: bool,
        microbatch: Microbatch,
        ledger: ByteLedger,
        number: int,
        timeout: float,
    ) -> None:
        self.units = units
        self.groups = [group for unit in units for group in unit.groups]
        self.microbatch = microbatch
        self.ledger = ledger
        self.scales = StepScales()
        self.changes = Changes()
        self._markers = AllMarkers([group.master.marks for group in self.groups], self.changes)
        self._watched: int | None = None
        self.order = ForwardOrder(prefetch)
        self.gather_stream = SideStream(device)
        self.reducer = Reducer([unit.groups for unit in units if unit.groups], device, ledger)
        self._gather_ranks = _several(group.grid.shard for group in self.groups)
        self._tensor_ranks = _several(group.grid.tensor for group in self.groups)
        self._weight_scales = weight_scales(self.groups, ledger)
        self._reduce_every = reduce_every
        self._device = device
        self._has_begun = False
        self.in_forward = False
        self.calls: list[Call] = []
        self.backward = Backward(self.end_backward)
        self.forward_action = Action.FORWARD
        self.pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()
        self._model = self._join(number, timeout)

    def _join(self, number: int, timeout: float) -> ModelIdentity:
        """Gives all groups what they share, and makes replicas equal.  Collective."""
        for group in self.groups:
            group.attach(self.microbatch, self.ledger, self.scales, self.changes)
        grids = [grid for group in self.groups for grid in (group.grid, group.reduce_grid)]
        model = ModelIdentity(
            number,
            units=[next((group.name for group in unit.groups), "") for unit in self.units],
            data_parallel=_several(ranks for grid in grids for ranks in (grid.shard, grid.replicate)),
            communicators=_several(ranks for grid in grids for ranks in grid.dimensions),
            timeout=timeout,
        )
        for index, unit in enumerate(self.units):
            for group in unit.groups:
                group.introduce(model, index)
        for group in self.groups:
            group.make_equal()
        return model

    def call_before_shutdown(self, method: Callable[[], None]) -> None:
        """Calls a bound method before any of this model's process groups is destroyed, or Python ends.

        A communicator of NCCL waits for the CUDA graphs that launch its collectives.  Unless they are freed
        first, `destroy_process_group()` never returns.
        """
        for ranks in self._model.communicators:
            if ranks.group is not None:
                call_before_shutdown(ranks.group, method, also_at_exit=True)

    @property
    def unit(self) -> Unit:
        """The root module's own unit."""
        return self.units[0]

    @property
    def reduces(self) -> bool:
        """Whether gradients that land now are reduced in this backward."""
        return self._reduce_every or self.microbatch.is_last

    def begin_forward(self, inputs: object) -> None:
        """Begins the outermost forward of any unit; the inner ones run inside it.

        Args:
            inputs: arguments of the forward.
        """
        self._look_at_user()
        if not self._has_begun:
            # Not earlier: a checkpoint may have been loaded in between.
            masters = [(group.prefix, group.master) for group in self.groups]
            identity = self.groups[0].identify(Action.VALUES) if self.groups else None
            require_same_first_values(masters, self._model.communicators, identity)
            for group in self.groups:
                group.master.first_digests.clear()
            self._has_begun = True
        self._compare_inputs(inputs)
        self.forward_action = Action.FORWARD if torch.is_grad_enabled() else Action.EVALUATION
        if not torch.is_grad_enabled():
            # Evaluations often run on other weights, such as an average, written uncounted through `.data`.
            self._expire()
        self._follow_user()
        self.order.start(self.units)
        self._refresh_scales()
        tape = current_tape()
        # A reentrant checkpoint runs a training forward under no_grad first.
        if torch.is_grad_enabled() or (tape is not None and tape.trains):
            self.scales.begin_forward(self._versions)
        self.in_forward = True

    def _compare_inputs(self, inputs: object) -> None:
        """Checks that ranks which share layers have inputs of equal size: they exchange parts of these."""
        if self._tensor_ranks and any(group.model is not None for group in self.groups):
            elements = sum(tensor.numel() for tensor in tensors_in(inputs))
            is_early = self.microbatch.steps_reduced == 0
            identity = Identity.counting(Action.INPUTS, elements, self._model, is_early)
            for ranks in self._tensor_ranks:
                declare(ranks, identity, self._device)

    def _look_at_user(self) -> None:
        """Checks what the user may have done to the parameters, before anything is gathered."""
        self._look_at_ranks()
        self._require_own_memory()
        self._require_no_hooks()
        self.require_no_writes()

    def require_no_writes(self) -> None:
        """Checks that nobody has written to what modules show in place of their sharded parameters."""
        for unit in self.units:
            unit.writes.require_none()

    def _look_at_ranks(self) -> None:
        look(self._model)
        if self.backward.has_failed:
            self.abandon_step()

    @property
    def _versions(self) -> list[Version]:
        return [group.master.version for group in self.groups]

    def _require_own_memory(self) -> None:
        """Checks all units before any is gathered: ranks may hold parts of different ones."""
        for group in self.groups:
            if group.master.has_moved:
                raise RuntimeError(
                    f"the flat parameter of unit {group.name} was given other memory (p.data = ..., "
                    "vector_to_parameters), from which nothing is gathered; write into it instead: "
                    "p.data.copy_(...)"
                )

    def _require_no_hooks(self) -> None:
        """Checks that the optimizer's parameters have no tensor hooks: no graph leads to them."""
        for group in self.groups:
            # The first one is the engine's, see `UnreducedMarks.follow`.
            counts = [len(hooks) for hooks in map(_HOOKS, group.master.parameters)]
            for number, count in enumerate(counts if max(counts, default=1) > 1 else ()):
                if count > 1:
                    name = group.prefix + group.master.portion_name(number)
                    raise RuntimeError(
                        f"parameter {name} has a tensor hook (register_hook), which would never run: it is "
                        "this rank's part, and its gradient comes from a reduction; use "
                        "register_post_accumulate_grad_hook, which runs when .grad is there, or register the "
                        "hook before the model is sharded"
                    )

    def _refresh_scales(self) -> None:
        for scales in self._weight_scales:
            scales.refresh()

    def end_forward(self, *, backward_follows: bool) -> None:
        """Frees what was gathered ahead and not used; without a backward, frees everything."""
        self.in_forward = False
        self.calls.clear()
        if backward_follows and self.order.current.trained:
            # Gradients that are there are of a backward before this forward, such as one of a validation.
            has_gradients = any(group.master.has_reduced_grad for group in self.groups)
            self.microbatch.awaits_gradients |= not has_gradients
        self.scales.end_forward()
        for unit in self.units[1:]:
            reshard_unused(unit.groups)
        if not backward_follows:
            self._free_parameters()
            self._finish_uploads()

    def _finish_uploads(self) -> None:
        """Lets the host write to offloaded shards again: the device has read them."""
        if any(group.master.is_offloaded for group in self.groups):
            self.gather_stream.synchronize()

    @never_traced
    def fail_forward(self) -> None:
        """Cleans up after the outermost forward raised; without a backward, gradients are untouched."""
        self.in_forward = False
        self.calls.clear()
        self.scales.end_forward()
        self.order.forget()
        if torch.is_grad_enabled():
            self.abandon_step()
        else:
            self._free_parameters()

    def _free_parameters(self) -> None:
        for unit in self.units:
            unit.reshard()
        self._expire()

    def _expire(self) -> None:
        for unit in self.units:
            unit.expire()

    def _follow_user(self) -> None:
        """Follows what the user did: left a loop, zeroed gradients, froze or unfroze parameters."""
        self.drop_left()
        for group in self.groups:
            group.drop_if_zeroed()
            follow_requires_grad(group)

    def drop_left(self) -> None:
        """Drops what was accumulated in a loop over microbatches that was left before its last backward."""
        if self.microbatch.is_left:
            self.microbatch.end_step()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which all parameters are gathered.  Collective at the beginning.

        Raises:
            RuntimeError: inside a forward or backward.
        """
        if self.in_forward or in_backward():
            raise RuntimeError("unsharded() inside a forward or backward; call it before or after")
        fresh = [unit for unit in self.units if not unit.is_kept]
        look(self._model)
        self._require_own_memory()
        self.require_no_writes()
        self._expire()
        self._follow_user()
        self._refresh_scales()
        try:
            for unit in fresh:
                unit.show(Action.EVALUATION)
                unit.is_kept = True
            yield
        finally:
            for unit in fresh:
                unit.is_kept = False
                unit.reshard()
                unit.expire()

    def begin_backward(self, forward: Forward | None = None) -> int:
        """Begins a backward at its first event, and is called by later ones, too; returns its number.

        Args:
            forward: the forward whose graph the backward has reached; None if that is not known.
        """
        number = running_backward()
        if not self.backward.is_running(number):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True is not supported: second derivatives would need parameters that are "
                    "freed by then"
                )
            if self.backward.has_failed:
                self.abandon_step()
            if not self.backward.is_open:
                # Other weights, such as an average, may have been in place since the forward.
                self._refresh_scales()
                self._follow_user()
                # If unknown, as for outputs without tensors: a backward follows its forward.
                forward = self.order.current if forward is None else forward
                self.backward.open()
        self.backward.reach(forward)
        return number

    def end_backward(self) -> None:
        """Ends a backward whose gradients have all landed."""
        look(self._model)
        if self.reduces:
            self.reducer.finish(publishes=not self.microbatch.is_recorded)
        for unit in self.units:
            unit.end_of_backward()
        self.backward.close()
        self._finish_uploads()
        self._end_microbatch()

    def _end_microbatch(self) -> None:
        self.microbatch.index += 1
        if self.microbatch.is_last:
            self._expire()
            self.microbatch.steps_reduced += self.reducer.has_units
            self.microbatch.end_step()
        elif self._watched != self.changes.count:
            # Otherwise the same groups take part, and are watched since an earlier microbatch.
            for group in self.groups:
                if not group.has_unreduced:
                    group.watch_unreduced()
            self._watched = self.changes.count

    # ---- microbatches that are recorded and replayed (`engine/replay`) ----------------------------------

    def look_before_replayable(self) -> None:
        """Follows what the user has done since the last microbatch, before this one's facts are taken."""
        if self.microbatch.index == 0:
            self._look_at_user()
            self._follow_user()
        else:
            # Other changes by users between microbatches are noticed in the next step.
            self._look_at_ranks()
            for group in () if self._markers.are_in_place else self.groups:
                group.drop_if_zeroed()

    def begin_replayable(self, scalings: Sequence[Scaling], action: Action, number: int) -> None:
        """Does what an eager, a recorded and a replayed microbatch have in common first.  Collective.

        Args:
            scalings: FP8 scales that it updates.
            action: which of the three it is, for the check against other ranks.
            number: number of the recording, the same on all ranks.
        """
        is_first, is_last = self.microbatch.index == 0, self.microbatch.is_last
        # Under ZeRO-2, ranks may have different numbers of microbatches between.
        launches = is_first or is_last or any(unit.reshards_after_forward for unit in self.units)
        if launches and any(group.model is not None for group in self.groups):
            place = self.microbatch.steps_reduced, self.microbatch.index
            identity = Identity(action, self._model, number, *place)
            # Microbatches before the last only gather.
            for ranks in self._model.data_parallel if is_last else self._gather_ranks:
                declare(ranks, identity, self._device)
        if is_first:
            self.scales.begin_forward(self._versions)
            self.scales.end_forward()
        # Later microbatches may use layers that the first did not.
        self.scales.note_all(scalings)

    def passages(self) -> list[Passage]:
        """State of all groups between two microbatches."""
        return [group.passage for group in self.groups]

    def skip_to(
        self, passages: Iterable[tuple[FlatGroup, Passage]], reduced: Sequence[tuple[FlatGroup, Used]]
    ) -> None:
        """Sets the state that a replayed microbatch would have left, had it run eagerly.

        Args:
            passages: groups that it changes, each with the state that it leaves.
            reduced: groups whose gradients it has reduced, each with what the step has used of it.
        """
        for group, passage in passages:
            group.skip_to(passage)
        for group, _ in reduced:
            group.join_step()
        if reduced:
            self.reducer.publish_kept(reduced)
        self._end_microbatch()

    def abandon_recording(self) -> None:
        """Cleans up after a failed recording, none of which will run."""
        self.in_forward = False
        self.calls.clear()
        self.scales.end_forward()
        self.order.forget()
        # The recorded reductions never run, so nothing may wait for them.
        self.reducer.forget()
        for group in self.groups:
            group.forget_recorded()
        self.abandon_step()

    def abandon_step(self) -> None:
        """Restores a state in which the next step is clean, after an exception."""
        # A forward that fails at the beginning of a step loses nothing; its error says enough.
        if self.microbatch.index > 0 or self.backward.has_failed:
            logger.warning("a step failed; what it had accumulated since the last reduction is dropped")
        self.backward.close()
        self.microbatch.awaits_gradients = False
        self.reducer.abandon()
        for unit in self.units:
            unit.abandon()
        # Amaxes of a failed backward may be NaN, and would stay as long as the history.
        self.scales.abandon()
        self.microbatch.end_step()


def _several(dimensions: Iterable[Ranks]) -> list[Ranks]:
    """Communicators of more than one rank, each once."""
    return [ranks for ranks in dict.fromkeys(dimensions) if ranks.size > 1]
