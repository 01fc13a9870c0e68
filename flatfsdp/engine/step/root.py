"""`Root`: the state of one model, shared by its units; forwards and backwards begin and end here.

In:   the first FlatFSDP module that is called becomes the root of all FlatFSDP modules inside it.
Out:  one `Root` that its units refer to.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import declare, look
from flatfsdp.comm.ranks import several
from flatfsdp.comm.streams import SideStream
from flatfsdp.engine.step.passes import Backward, Forward, ForwardOrder
from flatfsdp.engine.step.reduce import Reduced, Reducer
from flatfsdp.engine.step.requires_grad import follow_requires_grad
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.step.weight_scales import weight_scales
from flatfsdp.engine.storage.first_values import make_equal, require_same_first_values
from flatfsdp.flat.nested import tensors_in
from flatfsdp.fp8.recompute import current_tape
from flatfsdp.torch_private import in_backward, never_traced, running_backward

logger = logging.getLogger(__name__)

_HOOKS = attrgetter("_backward_hooks")
_CHANGES = attrgetter("changes")


class Root:
    """One model: the units that its forwards and backwards drive together.  Its construction is collective.

    Args:
        number: number of the model, the same on all ranks.

    Attributes:
        units: units in registration order, the root module's own first; settings such as the prefetch are
            those of that one.
        unit: the root module's own.
        groups: flat groups of all units, in that order.
        shared: what they have in common.
        microbatch: which microbatch this is.
        order: in which order forwards call the units.
        reducer: reduces gradients, and knows what of them has been launched.
        publish: takes what is reduced at the end of a step: hands it to the optimizer.
        identity: what collectives of the model carry.
        gather_ranks: communicators that gathers use.
        in_forward: whether a forward of the model runs.
        calls: calls of units that have ended in the running forward, inner ones before outer ones: the
            numbers of the differentiable operations in it, and what gathers the unit once a backward has come
            to a result of the call.
        forward_action: purpose for which the running forward, or the last one, gathers.
        backward: tracks the running backward.
        pools: memory of recorded microbatches, each with `nbytes`, as long as there are any.
    """

    def __init__(self, units: Sequence[Unit], number: int) -> None:
        self.units, self.unit = units, units[0]
        self.groups = [group for unit in units for group in unit.groups]
        shared, policy = self.unit.shared, self.unit.policy
        self.shared, self.microbatch = shared, shared.microbatch
        # Each object for good, so that a look at all of them takes no detour by their groups.
        self._states = [group.state for group in self.groups]
        self._watched: int | None = None
        self.order = ForwardOrder(policy.prefetch)
        # First, as it may raise: the reducer makes communicators.
        self._weight_scales = weight_scales(self.groups)
        self.reducer = Reducer([unit.groups for unit in units if unit.groups], shared)
        self.gather_ranks = several(group.grid.shard for group in self.groups)
        self.publish: Callable[[Sequence[Reduced]], None] = self.reducer.publish
        self._has_begun = False
        self.in_forward = False
        self.calls: list[tuple[range, Callable[[Tensor], None]]] = []
        self.backward = Backward(self.end_backward)
        self.forward_action = Action.FORWARD
        self.pools: weakref.WeakSet[Any] = weakref.WeakSet()
        grids = [*(group.grid for group in self.groups), *self.reducer.grids.values()]
        data_parallel = several(ranks for grid in grids for ranks in (grid.shard, grid.replicate))
        communicators = several(ranks for grid in grids for ranks in grid.dimensions)
        names = [unit.name if unit.groups else "" for unit in units]
        self.identity = ModelIdentity(number, names, data_parallel, communicators, policy.timeout)
        shared.identity, shared.gather_stream = self.identity, SideStream(shared.device)
        # Before the first collective, which carries the unit's number and the model's identity.
        for index, unit in enumerate(units):
            unit.number, unit.shared = index, shared
        for group in self.groups:
            make_equal(group.master, group.unit.identify(Action.BUILD))
        # A loop over microbatches ends a step as well, as it begins or is left, without asking the root.
        shared.microbatch.at_end_of_step.append(self._end_step)

    @property
    def changes(self) -> int:
        """Number of changes to the state of any group."""
        return sum(map(_CHANGES, self._states))

    def _end_step(self) -> None:
        # Of a step that was left, or of a forward without a backward: as many as this rank happens to run.
        self.shared.scales.drop_held()
        for group in self.groups:
            group.end_step()

    @property
    def reduces(self) -> bool:
        """Whether gradients that land now are reduced in this backward."""
        return self.shared.reduces_every or self.microbatch.ends_turn

    @property
    def reduces_early(self) -> bool:
        """Whether earlier backwards than the last one of a step reduce gradients, too."""
        return self.shared.reduces_every or self.microbatch.turns > 1

    @property
    def place(self) -> Hashable:
        """What a microbatch adds to what, as far as its place in the step decides."""
        lanes, microbatch = self.unit.policy.lanes, self.microbatch
        place = microbatch.index == 0, microbatch.is_last
        if lanes is None:
            # The second one begins the sums of what the first has left to it.
            return *place, microbatch.index == 1 and bool(self.reducer.left)
        begins, ends = microbatch.begins_turn, microbatch.ends_turn
        of_first_block, begins_block, ends_block = lanes.place(self.unit.grid, microbatch.turn)
        return *place, begins, ends, of_first_block, begins_block, ends and ends_block

    def begin_forward(self, inputs: object) -> None:
        """Begins the outermost forward of any unit; the inner ones run inside it.

        Args:
            inputs: arguments of the forward.
        """
        # First: it raises, and nothing is gathered or begun by then.
        self.look_at_user()
        if torch.is_grad_enabled():
            self.microbatch.require_turns()
        if not self._has_begun:
            # Not earlier: a checkpoint may have been loaded in between.
            require_same_first_values([group.master for group in self.groups])
            for group in self.groups:
                group.master.first_digests.clear()
            self._has_begun = True
        tensor_ranks = self.unit.grid.tensor  # All units have the same ones.
        if tensor_ranks.size > 1 and self.is_checked:
            # They share layers, and exchange parts of inputs, which have to be of equal size.
            elements = sum(tensor.numel() for tensor in tensors_in(inputs))
            is_early = self.microbatch.steps_reduced == 0
            identity = Identity.counting(Action.INPUTS, elements, self.identity, is_early)
            declare(tensor_ranks, identity, self.shared.device)
        self.forward_action = Action.FORWARD if torch.is_grad_enabled() else Action.EVALUATION
        if not torch.is_grad_enabled():
            # Evaluations often run on other weights, such as an average, written uncounted through `.data`.
            self._expire()
        # Before the order takes down what is trained, and before scales are taken of what is cast.
        self.follow_user()
        # Once it is known what the user has zeroed; not in an evaluation, whose end nothing would wait for.
        if torch.is_grad_enabled():
            self.reducer.take_up()
        self.order.start(self.units)
        self._refresh_scales()
        tape = current_tape()
        # A reentrant checkpoint runs a training forward under no_grad first.
        if torch.is_grad_enabled() or (tape is not None and tape.trains):
            self.begin_scales()
        self.in_forward = True

    @property
    def is_checked(self) -> bool:
        """Whether ranks compare what they launch."""
        return any(unit.model is not None for unit in self.units)

    def look_at_user(self) -> None:
        """Checks what the user may have done to the parameters, before anything is gathered."""
        self.look_at_ranks()
        # All units before any is gathered: ranks may hold parts of different ones.
        for group in self.groups:
            if group.master.has_moved:
                raise RuntimeError(
                    f"a parameter of unit {group.name} was given other memory (p.data = ...), from which "
                    "nothing is gathered; write into it instead: p.data.copy_(...)"
                )
            # No graph leads to an optimizer's parameter.  The first hook is the engine's, see
            # `UnreducedMarks.follow`.
            counts = [len(hooks) for hooks in map(_HOOKS, group.master.parameters)]
            if max(counts, default=1) > 1:
                name = group.unit.prefix + group.master.local_shard_name(counts.index(max(counts)))
                raise RuntimeError(
                    f"parameter {name} has a tensor hook (register_hook), which would never run; use "
                    "register_post_accumulate_grad_hook, or register it before the model is sharded"
                )
        self.require_no_writes()

    def require_no_writes(self) -> None:
        """Checks that nobody has written to what modules show in place of their sharded parameters."""
        for unit in self.units:
            unit.writes.require_none()

    def look_at_ranks(self) -> None:
        """Raises for other ranks that do something else, and cleans up after a backward that has failed."""
        look(self.identity)
        if self.backward.has_failed:
            self.abandon_step()

    def begin_scales(self) -> None:
        """Lets layers note the FP8 scales that they use, until the forward ends."""
        self.shared.scales.begin_forward([group.master.version for group in self.groups])

    def _refresh_scales(self) -> None:
        for scales in self._weight_scales:
            scales.refresh()

    @never_traced
    def end_forward(self, outputs: object) -> None:
        """Frees what was gathered ahead and not used; if no backward can follow, frees everything."""
        tensors = tensors_in(outputs)
        # An output in which no tensor was found may still hide one that starts a backward.
        can_start_backward = not tensors or any(t.requires_grad for t in tensors)
        backward_follows = torch.is_grad_enabled() and can_start_backward
        self.in_forward = False
        self.calls.clear()
        if backward_follows and self.order.current.trained:
            # Gradients that are there are of a backward before this forward, such as one of a validation.
            has_gradients = any(group.master.published() is not None for group in self.groups)
            self.microbatch.awaits_gradients |= not has_gradients
        self.shared.scales.end_forward()
        # Not the root's own: its head ran last, and the backward begins with it.
        for unit in self.units[1:]:
            unit.reshard(if_unused=True)
        if not backward_follows:
            self._free_parameters()
            self._finish_uploads()

    def _finish_uploads(self) -> None:
        """Lets the host write to offloaded shards again: the device has read them."""
        if any(group.master.is_offloaded for group in self.groups):
            self.shared.gather_stream.synchronize()

    @never_traced
    def fail_forward(self) -> None:
        """Cleans up after the outermost forward raised; without a backward, gradients are untouched."""
        self.in_forward = False
        self.calls.clear()
        self.shared.scales.end_forward()
        # It may differ between ranks: the next one gathers nothing ahead.
        self.order = ForwardOrder(self.unit.policy.prefetch)
        if torch.is_grad_enabled():
            self.abandon_step()
        else:
            self._free_parameters()

    def _free_parameters(self) -> None:
        for unit in self.units:
            unit.reshard()
            unit.expire()

    def _expire(self) -> None:
        for unit in self.units:
            unit.expire()

    def follow_user(self) -> None:
        """Follows what the user did: left a loop, zeroed gradients, froze or unfroze parameters."""
        self.microbatch.drop_left()
        for group in self.groups:
            group.drop_if_zeroed()
            follow_requires_grad(group)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context in which all parameters are gathered.  Collective at the beginning.

        Raises:
            RuntimeError: inside a forward or backward.
        """
        if self.in_forward or in_backward():
            raise RuntimeError("unsharded() inside a forward or backward; call it before or after")
        # Contexts may be nested: the inner one gathers and frees nothing.
        fresh = [unit for unit in self.units if not unit.is_kept]
        self.look_at_user()
        self._expire()
        self.follow_user()
        self._refresh_scales()
        try:
            for unit in fresh:
                unit.show(Action.EVALUATION)
                unit.is_kept = True
            yield
        finally:
            for unit in fresh:
                unit.is_kept = False
            # Not those of an outer context: a unit that is kept ignores this.
            self._free_parameters()

    def begin_backward(self, forward: Forward | None = None) -> int:
        """Begins a backward at its first event, and is called by later ones, too; returns its number.

        Args:
            forward: the forward whose graph the backward has reached; None if that is not known.
        """
        number = running_backward()
        if not (self.backward.is_open and self.backward.number == number):
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True is not supported: it would need parameters that are freed by then"
                )
            if self.backward.has_failed:
                self.abandon_step()
            if not self.backward.is_open:
                # Other weights, such as an average, may have been in place since the forward.
                self._refresh_scales()
                self.follow_user()
                self.microbatch.require_turns()
                self.microbatch.require_place()
                # Of the backward before, if the forward has not: pipelines run several forwards ahead.
                self.reducer.take_up()
                self.reducer.settle()
                # If unknown, as for outputs without tensors: a backward follows its forward.
                forward = self.order.current if forward is None else forward
                self.backward.open()
        self.backward.reach(forward)
        return number

    def end_backward(self) -> None:
        """Ends a backward whose gradients have all landed."""
        # Before the last reductions: with a rank that does something else they would never end.
        look(self.identity)
        if self.reduces:
            # Only now, so that a backward that fails half-way leaves all gradients as they were.
            self.publish(self.reducer.finish())
        if self.microbatch.is_last:
            self.shared.scales.update_held()
        # After the reductions, which took the buffers: what is still there is for the next microbatch.
        for unit in self.units:
            unit.end_of_backward()
        self.backward.close()
        self._finish_uploads()
        # Last: the end of a step forgets what the units have just asked for, such as who took part.
        self.end_microbatch()

    def end_microbatch(self) -> None:
        """Ends a microbatch, and with the last one the step."""
        self.microbatch.index += 1
        if self.microbatch.is_last:
            # An optimizer may write through `.data`, uncounted, so the next forward casts anew.
            self._expire()
            # Not in the count of steps, which ranks end at will: all ranks take part in a reduction.
            self.microbatch.steps_reduced += any(state.takes_part for state in self._states)
            self.microbatch.end_step()
        elif self._watched != self.changes:
            # Otherwise the same groups take part, and are watched since an earlier microbatch.
            for group in self.groups:
                if not group.master.marks.is_on:
                    group.watch_unreduced()
            self._watched = self.changes

    def abandon_step(self) -> None:
        """Restores a state in which the next step is clean, after an exception."""
        # A forward that fails at the beginning of a step loses nothing; its error says enough.
        if self.microbatch.index > 0 or self.backward.has_failed:
            logger.warning("a step failed; what it had accumulated since the last reduction is dropped")
        self.backward.close()
        self.microbatch.awaits_gradients = False
        # Running reductions first: they read buffers that units are about to drop.
        self.reducer.forget()
        for unit in self.units:
            unit.abandon()
        # Amaxes of a failed backward may be NaN, and would stay as long as the history.
        self.shared.scales.abandon()
        self.microbatch.end_step()
