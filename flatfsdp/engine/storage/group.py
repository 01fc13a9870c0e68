"""`FlatGroup`: parameters on their way from the master shard to the module, and back.

In:   parameters of one unit that are trained and stored alike, packed by `flat/layout.py`.
Out:  `module.weight` aliases the gathered flat buffer from `unshard` to `reshard`; a weight stored in FP8 has
      an operand of GEMMs instead (`fp8_weights.py`).
Next: `engine/step/gather_and_free.py` gathers all groups of a unit; gradients land in `MainGrad`, which
      `engine/step/reduce.py` reduces.

    master shard --cast, once a step--> compute shard --all-gather--> flat buffer <--alias-- module.weight

A group's parameters are in one of three states:

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
                         GATHERING (prefetched, then not needed) --reshard--> SHARDED
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.byte_ledger import ByteLedger, span
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import declare, look
from flatfsdp.comm.collectives import all_gather, broadcast
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import ALONE
from flatfsdp.comm.streams import compute_waits_for
from flatfsdp.contract.flat_shard import Moved
from flatfsdp.contract.operand import FP8_OPERAND
from flatfsdp.contract.packed import leave_packed
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.storage.backward_concat import Leaves, Views
from flatfsdp.engine.storage.changes import Changes
from flatfsdp.engine.storage.compute_shard import ComputeShard, compute_tensor
from flatfsdp.engine.storage.first_values import digest
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.fp8_weights import FP8_DTYPE, FP8Weights
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.storage.master import MasterShard, Portion, Version
from flatfsdp.engine.storage.unreduced import UNREDUCED
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import Role
from flatfsdp.microbatch import Microbatch
from flatfsdp.policy import Division, Policy
from flatfsdp.torch_private import shares_memory, uses_of_memory

_REQUIRES_GRAD = attrgetter("requires_grad")

Cut = Callable[[MasterShard, Sequence[nn.Parameter]], list[Portion]]
"""Function of (master shard, the parameters it was filled from) that cuts one portion for each of them."""


class ShardState(Enum):
    """State of a flat group's gathered buffer."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


def settle(groups: Iterable[FlatGroup]) -> None:
    """Waits for the collectives so far; raises RuntimeError if ranks have done different things."""
    for model in dict.fromkeys(group.model for group in groups):
        if model is not None:
            look(model, wait=True)


class Passage(NamedTuple):
    """State of a group between two microbatches, as far as they depend on it or change it.

    Attributes:
        state: state of the gathered buffer; UNSHARDED also stands for GATHERING, as nothing is under way
            then.
        allocated: whether the buffers of gathered parameters, and of FP8 transposes, have memory.
        done: which of amaxes, scales and cast are current, see `ComputeShard.done`.
        written: slots of `main_grad` in which a gradient has landed in this step.
        takes_part: whether the group is reduced in this step.
    """

    state: ShardState
    allocated: tuple[bool, bool]
    done: tuple[bool, bool, bool]
    written: tuple[bool, ...]
    takes_part: bool


class FlatGroup:
    """Parameters of one unit that are treated alike: one layout, one master shard, one flat buffer.

    Args:
        binding: binding of parameters that are registered in the module, all trained or all frozen, of one
            role.
        landed: called when a gradient of this backward is in `main_grad`, with this group and the slot's
            index, or None when all slots landed at once.
        cut: makes the portions, one a parameter, which modules list in place of the parameters from now on;
            None: modules list none, and the shard is one portion.

    Attributes:
        prefix: prefix of the parameters' original names, such as "blocks.0."; set by the root.
        master: the shard that the optimizer updates.
        compute_shard: the shard that is gathered.
        buffer: the gathered parameters; None on one rank, whose compute shard holds all of them.
        fp8: FP8 form of weights that are stored in FP8; None for others.
        main_grad: accumulated gradients; None as long as the group has not been trained.
        built_frozen: whether the group was frozen when it was wrapped.
        division: divisors of gradients before and after the sum over ranks; None for the mean.
        model: identity of the model; None before it is used, or if collectives are not checked.
        moved: what steps of the model change besides; None before it is used.
        params: the tensors that the module has, as `Leaves` or `Views`.
        used: slots that got a gradient on this rank in the step that was reduced last.
        kept_grad: memory of the reduced gradient, if that has a fixed address; None otherwise.
        num_trained: number of slots whose gradients land in a backward.
        changes: count of changes to this group and all others of the model.
    """

    def __init__(
        self,
        binding: Binding,
        grid: Grid,
        device: torch.device,
        policy: Policy,
        microbatch: Microbatch,
        ledger: ByteLedger,
        landed: Callable[[FlatGroup, int | None], None],
        cut: Cut | None = None,
    ) -> None:
        self.prefix = ""
        self.grid = self.reduce_grid = grid
        self.policy = policy
        self.microbatch = microbatch
        self.ledger = ledger
        self.binding = binding
        self.layout = binding.layout
        originals = binding.parameters()
        self.built_frozen = not originals[0].requires_grad
        self.state = ShardState.SHARDED
        self.division: Division | None = None
        self.model: ModelIdentity | None = None
        self.moved: Moved | None = None
        self._unit = 0
        self._gathered: torch.cuda.Event | None = None
        self._partial_grad: Tensor | None = None
        self._partial_step = -1
        self._joined_step = -1
        self.used: set[int] = set()
        self._used_in = self._flags_changed_in = -1
        self.changes = Changes()
        self.kept_grad: Tensor | None = None
        self._uses_of_kept_grad = 0

        is_fp8 = self.layout.role is Role.FP8 and policy.precision.fp8_weights != "in_layers"
        dtype = FP8_DTYPE if is_fp8 else policy.precision.compute
        self.master = self._filled_master(originals, device)
        if cut is not None:
            self.master.divide(cut(self.master, originals))
            binding.list(self.master.parameters)
        own = compute_tensor(self.master, dtype)
        self.buffer = self._new_buffer(dtype)
        # One rank holds everything: the compute shard already is the unsharded buffer.
        unsharded = own.data if self.buffer is None else self.buffer.alias()
        self.fp8 = self._new_fp8(unsharded) if is_fp8 else None
        self.compute_shard = ComputeShard(self.master, own, self.fp8, built_frozen=self.built_frozen)
        self.main_grad = None if self.built_frozen else self._new_main_grad()
        self.params = self._shown_parameters(originals, unsharded, partial(landed, self))
        self.num_trained = sum(self.params.trained)
        if self.buffer is not None:
            self._free(self.buffer)
        elif self.fp8 is None:
            self.update_shard()
            # Until its first use a shard may be written through `.data`, which no version counts.
            self.compute_shard.expire()

    # ---- construction -----------------------------------------------------------------------------------

    def _filled_master(self, originals: Sequence[nn.Parameter], device: torch.device) -> MasterShard:
        precision = self.policy.precision
        dtype = precision.param
        if self.built_frozen and all(each.dtype == precision.compute for each in originals):
            # Nothing is added to it, so the values that came need no wider copy.
            dtype = precision.compute
        master = MasterShard(
            self.layout,
            self.grid,
            dtype,
            device,
            grad_dtype=precision.grad or dtype,
            cpu_offload=self.policy.cpu_offload,
            trainable=not self.built_frozen,
        )
        for slot, parameter in zip(self.layout.slots, originals, strict=True):
            master.load(slot, parameter.detach())
            if self.grid.shard.size > 1:
                master.first_digests[slot] = digest(parameter)
        return master

    def _new_buffer(self, dtype: torch.dtype) -> FlatBuffer | None:
        num_shards = self.grid.shard.size
        if num_shards == 1:
            return None
        numel = self.layout.padded_numel(num_shards)
        return FlatBuffer(numel, dtype, self.master.device, poison=self.policy.debug.poison_on_free)

    def _new_fp8(self, unsharded: Tensor) -> FP8Weights:
        through, poison = self.policy.precision.compute, self.policy.debug.poison_on_free
        return FP8Weights(self.layout, self.grid.shard, unsharded, through, poison=poison)

    def _new_main_grad(self) -> MainGrad:
        main_grad = MainGrad(
            self.layout,
            self.grid.shard.size,
            self.policy.precision.accumulate,
            self.master.device,
            self.microbatch,
            self.ledger,
            poison=self.policy.debug.poison_on_free,
        )
        main_grad.changes = self.changes
        return main_grad

    def _shown_parameters(
        self, originals: Sequence[nn.Parameter], unsharded: Tensor, landed: Callable[[int | None], None]
    ) -> Leaves | Views:
        """Shows the module its parameters in the unsharded buffer, or NaN in place of FP8 weights."""
        if self.fp8 is not None:
            # NaN without memory, in the dtype that gradients have.
            nan = torch.full((), torch.nan, dtype=self.policy.precision.compute, device=unsharded.device)
            unsharded = nan.expand(unsharded.shape)
        params: Leaves | Views
        if self.main_grad is None or self.policy.optimize_backward_concat:
            params = Leaves(self.binding, originals, unsharded, self.main_grad, landed)
        else:
            params = Views(self.binding, originals, unsharded, self.main_grad, landed)
        if self.fp8 is not None:
            for index, weight in (each for shown in params.shown for each in enumerate(shown)):
                FP8_OPERAND.leave(weight, partial(self.fp8.operand, index))
        self._leave_pack_operands(params)
        for index, owners in enumerate(self.binding.pack_owners):
            for owner, name in owners:
                leave_packed(owner, name, partial(params.pack, index))
        return params

    def _leave_pack_operands(self, params: Leaves | Views) -> None:
        if self.fp8 is not None:
            for index, pack in (each for of_all in params.packs.shown for each in enumerate(of_all)):
                FP8_OPERAND.leave(pack, partial(self.fp8.pack_operand, index))

    # ---- addresses for good (`engine/replay`) -----------------------------------------------------------

    def keep_grad(self) -> None:
        """Fixes the address of the reduced gradient from now on, once an earlier one is gone."""
        if self.kept_grad is None and self.main_grad is not None:
            numel, dtype = self.master.flat.numel(), self.master.grad_dtype
            self.kept_grad = torch.empty(numel, dtype=dtype, device=self.master.device)
            self._uses_of_kept_grad = uses_of_memory(self.kept_grad)

    @property
    def is_kept_grad_free(self) -> bool:
        """Whether neither a parameter nor a user holds the gradient of an earlier step."""
        if self.kept_grad is None or self.master.grads:
            return False
        return uses_of_memory(self.kept_grad) == self._uses_of_kept_grad

    def keep_sum(self) -> None:
        """Fixes the address of the gradients that add up over microbatches."""
        if self.main_grad is not None:
            self.main_grad.stay()

    def keep_unsharded(self) -> None:
        """Fixes the address of the gathered parameters."""
        if self.buffer is not None:
            self.buffer.stay()
        if self.fp8 is not None:
            self.fp8.columnwise.stay()

    def follow_stream(self) -> None:
        """Makes autograd nodes anew: their backward runs on the stream that made them."""
        if isinstance(self.params, Leaves) and self.main_grad is not None and self.layout.packs:
            self.params.remake_packs()
            self._leave_pack_operands(self.params)

    @property
    def passage(self) -> Passage:
        """State of the group between two microbatches."""
        is_sharded = self.state is ShardState.SHARDED
        return Passage(
            ShardState.SHARDED if is_sharded else ShardState.UNSHARDED,
            (
                self.buffer is not None and self.buffer.is_allocated,
                self.fp8 is not None and self.fp8.columnwise.is_allocated,
            ),
            self.compute_shard.done,
            () if self.main_grad is None else self.main_grad.written,
            self.takes_part,
        )

    def forget_recorded(self) -> None:
        """Drops what a failed recording would have launched, so that nothing waits for it."""
        self._gathered = None

    def skip_to(self, passage: Passage) -> None:
        """Sets the state that a replayed microbatch leaves."""
        self.changes.count += 1
        if passage.state is not self.state:
            self._gathered, self.state = None, passage.state
            if passage.state is ShardState.UNSHARDED:
                self.params.show()
            elif self.buffer is not None:
                self.params.conceal()
        if self.buffer is not None:
            self.buffer.is_allocated = passage.allocated[0]
        if self.fp8 is not None:
            self.fp8.columnwise.is_allocated = passage.allocated[1]
        self.compute_shard.skip_to(passage.done)
        if self.main_grad is not None:
            self.main_grad.skip_to(passage.written)
        if passage.takes_part:
            self.join_step()

    # ---- the root ---------------------------------------------------------------------------------------

    def attach(self, microbatch: Microbatch, ledger: ByteLedger, moved: Moved, changes: Changes) -> None:
        """Joins a root: takes what all its units share, and makes communicators for reductions."""
        self.microbatch, self.ledger, self.moved = microbatch, ledger, moved
        self._count_in(changes)
        if self.main_grad is not None:
            self.main_grad.microbatch, self.main_grad.ledger = microbatch, ledger
        self.reduce_grid = Grid(
            self.grid.shard.own_communicator(),
            self.grid.replicate.own_communicator(),
            self.grid.tensor.own_communicator() if self.layout.placement is Placement.PARTIAL else ALONE,
        )

    def _count_in(self, changes: Changes) -> None:
        self.changes = changes
        self.master.changes = self.compute_shard.changes = self.master.marks.changes = changes
        if self.main_grad is not None:
            self.main_grad.changes = changes
        if self.buffer is not None:
            self.buffer.changes = changes
        if self.fp8 is not None:
            self.fp8.columnwise.changes = changes

    def introduce(self, model: ModelIdentity, unit: int) -> None:
        """Makes collectives carry the identity of this model, and this number of the unit."""
        if self.policy.debug.check_collectives:
            self.model, self._unit = model, unit
            self.master.identify = self.identify

    def identify(self, action: Action) -> Identity | None:
        """Identity that a collective of this unit carries; None before there is a root, or without checks."""
        if self.model is None or self.microbatch.is_recorded:
            return None
        return Identity(action, self.model, self._unit, self.microbatch.steps_reduced, self.microbatch.index)

    def make_equal(self) -> None:
        """Makes replicas equal, and parameters that all tensor-parallel ranks have whole.  Collective."""
        placement, tensor = self.layout.placement, self.grid.tensor
        same = [self.grid.replicate, *([] if placement is Placement.SPLIT else [tensor])]
        if any(ranks.size > 1 for ranks in same):
            replica = self.master.flat.detach().to(self.master.device)
            for ranks in same:
                declare(ranks, self.identify(Action.BUILD), self.master.device)
                broadcast(replica, ranks)
            self.master.flat.data.copy_(replica)
            self.master.generation += 1

    @property
    def name(self) -> str:
        """Name of the unit, for labels and messages."""
        return self.prefix.rstrip(".") or "root"

    @property
    def flat_name(self) -> str:
        """Name of the flat parameter in its unit; freezing does not change it."""
        placement = self.layout.placement
        kinds = (
            "frozen_" if self.built_frozen else "",
            "fp8_" if self.layout.role is Role.FP8 else "",
            # A file of shards in the order of the modules must not be loaded into it.
            "packed_" if self.binding.is_moved else "",
            "" if self.grid.tensor.size == 1 or placement is Placement.SPLIT else f"{placement.value}_",
        )
        return f"{''.join(kinds)}flat_param"

    # ---- master shard -> flat buffer --------------------------------------------------------------------

    def require_version(self, version: Version) -> None:
        """Checks in a backward that the parameters are those of its forward.

        All ranks raise alike.  A load counts on each of them, and an optimizer of all parameters has one of
        every group on each of them, if only of padding.

        Raises:
            RuntimeError: if they have been written to since they had this version.
        """
        if self.compute_shard.version != version:
            raise RuntimeError(
                f"the parameters of unit {self.name} changed between this forward and its backward (by an "
                "optimizer step, a load, or another write), so gradients would mix old and new values; run "
                "the backward before the change, or the forward again after it"
            )

    def allocate(self) -> bool:
        """Allocates memory for parameters that are neither gathered nor being gathered, or that are stale.

        Returns:
            False if nothing has to be gathered.
        """
        if self.state is not ShardState.SHARDED:
            if self.compute_shard.is_current:
                return False
            self.wait()
        if self.buffer is not None:
            self.buffer.allocate()
        if self.fp8 is not None:
            self.fp8.free()
        return True

    def update_shard(self) -> None:
        """Casts the master shard, if it has changed."""
        if not self.compute_shard.is_current:
            self.compute_shard.cast(self.ledger, self.name, self.microbatch.index)

    def gather(self) -> None:
        """All-gathers the compute shards.  Collective, unless this rank has everything."""
        if self.buffer is not None:
            all_gather(self.buffer.tensor, self.compute_shard.tensor, self.grid.shard)

    @cached_property
    def gathered_bytes(self) -> int:
        """Number of bytes that this rank receives in a gather."""
        if self.buffer is None:
            return 0
        full, size = self.buffer.tensor, self.grid.shard.size
        return full.numel() * full.element_size() * (size - 1) // size

    def transpose(self) -> None:
        """Makes the columnwise form of FP8 weights."""
        assert self.fp8 is not None
        nbytes = 2 * sum(slot.numel for slot in self.layout.slots)
        with span("transpose", self.name, self.microbatch.index, nbytes):
            self.fp8.transpose()
        self.ledger.add("transpose", nbytes)

    def started(self, gathered: torch.cuda.Event | None) -> None:
        """Notes that a gather has begun; the event `gathered` tells when it ends."""
        self.changes.count += 1
        self._gathered = gathered
        self.state = ShardState.GATHERING

    def wait(self) -> None:
        """Makes the compute stream wait until the parameters are gathered."""
        if self.state is ShardState.GATHERING:
            self.changes.count += 1
            compute_waits_for(self._gathered, self.master.device)
            self.state = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Frees the flat buffer; tensors that autograd saved become valid again with the next unshard."""
        self.wait()
        if self.fp8 is not None:
            self.fp8.free()
        if self.state is ShardState.UNSHARDED and self.buffer is not None:
            self.changes.count += 1
            self._free(self.buffer)
            self.state = ShardState.SHARDED

    def _free(self, buffer: FlatBuffer) -> None:
        self.params.conceal()
        buffer.free()

    # ---- gradients and whole parameters -----------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether some parameter requires a gradient now; see `engine/step/requires_grad.py`."""
        return any(map(_REQUIRES_GRAD, self.flagged))

    @property
    def flagged(self) -> Sequence[nn.Parameter]:
        """Parameters whose `requires_grad` a user sets: the flat one, or in place all that are listed."""
        return self.master.parameters if self.master.has_views else (self.master.flat,)

    @property
    def flags(self) -> list[bool]:
        """For each slot, whether its parameter requires a gradient now."""
        flags = list(map(_REQUIRES_GRAD, self.flagged))
        return flags if self.master.has_views else flags * len(self.layout.slots)

    @property
    def flags_changed_in_step(self) -> bool:
        """Whether a parameter was frozen or unfrozen since the step began."""
        return self._flags_changed_in == self.microbatch.step

    def train(self, wanted: Sequence[bool]) -> None:
        """Trains or freezes the parameter of each slot from now on."""
        self.changes.count += 1
        self._flags_changed_in = self.microbatch.step
        self.params.follow(wanted)
        self.num_trained = sum(wanted)
        self.master.flat.requires_grad_(any(wanted))
        flags = wanted if self.master.has_views else [any(wanted)] * len(self.master.parameters)
        for parameter, trains in zip(self.master.parameters, flags, strict=True):
            parameter.requires_grad_(trains)

    def open_main_grad(self) -> None:
        """Lets gradients land in a group that was built frozen.

        Raises:
            RuntimeError: if the optimizer would have to update values in a narrow dtype.
        """
        narrow, wanted = self.master.flat.dtype, self.policy.precision.param
        if narrow != wanted:
            raise RuntimeError(
                f"unit {self.name} was sharded with frozen parameters, which it keeps in {narrow}, and what "
                f"is trained is updated in {wanted}; call requires_grad_(True) before the model is sharded, "
                "and requires_grad_(False) after it"
            )
        self.main_grad = self._new_main_grad()
        assert isinstance(self.params, Leaves)
        self.params.land_in(self.main_grad)

    def take_grad(self) -> Tensor:
        """Hands the accumulated gradient over for reduction, and notes which slots have one."""
        assert self.main_grad is not None
        self.main_grad.flush()
        used = self.main_grad.used
        if self._used_in != self.microbatch.step:
            self.used, self._used_in = set(), self.microbatch.step
        # With several reducing backwards in a step, it is enough that one of them brings a gradient.
        self.used = self.used | used
        return self.main_grad.take()

    def join_step(self) -> None:
        """Joins the reduction of this step."""
        self.changes.count += 1
        self._joined_step = self.microbatch.step

    @property
    def takes_part(self) -> bool:
        """Whether it is reduced in this step."""
        return self._joined_step == self.microbatch.step

    @property
    def is_awaited(self) -> bool:
        """Whether its gradients have landed, or have still to land, in the running backward."""
        return self.takes_part and self.trains

    @property
    def partial_grad(self) -> Tensor | None:
        """Sum that this step's earlier backwards have reduce-scattered, as long as the master shard.

        None if there is none.  The last backward adds its own, and the sum is then reduced across replicas.
        """
        return self._partial_grad if self._partial_step == self.microbatch.step else None

    @partial_grad.setter
    def partial_grad(self, value: Tensor | None) -> None:
        self._partial_grad, self._partial_step = value, self.microbatch.step

    def watch_unreduced(self) -> None:
        """Starts watching for an optimizer's `zero_grad()`, which is to drop accumulated gradients."""
        if self.takes_part:
            self.master.marks.start()
            self.microbatch.call_at_end_of_step(self.master.marks.stop)

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients of this step have been accumulated and not yet reduced."""
        return self.master.marks.is_on

    def drop_if_zeroed(self) -> None:
        """Drops what was accumulated if an optimizer's `zero_grad()` has been called since."""
        if self.master.marks.were_zeroed:
            self.drop_unreduced()

    def require_reduced(self) -> None:
        """Raises RuntimeError if an optimizer would step without gradients that wait to be reduced."""
        self.drop_if_zeroed()
        if self.has_unreduced:
            raise RuntimeError(f"an optimizer was about to step while, in unit {self.name}, {UNREDUCED}")

    def drop_unreduced(self) -> None:
        """Drops gradients that were accumulated and have not reached the master's gradient."""
        self.changes.count += 1
        self.master.marks.stop()
        self.partial_grad = None
        self._joined_step = self._used_in = -1
        if self.main_grad is not None:
            self.main_grad.drop()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in the memory of the gathered parameters."""
        if self.buffer is not None:
            return self.buffer.holds(tensor)
        return shares_memory(tensor, self.compute_shard.tensor.untyped_storage())

    def whole_parameters(self, full: Tensor) -> list[nn.Parameter]:
        """Parameters of the original shapes that alias a whole buffer, in slot order."""
        return list(map(nn.Parameter, self.layout.views(full), self.flags))

    def describe(self) -> Iterable[str]:
        """Describes the geometry, one line a parameter or pack, equal on all ranks if the model is sound."""
        for slot, trains in zip(self.layout.slots, self.flags, strict=True):
            kind = "trained" if trains else "frozen"
            role = "" if slot.role is Role.COMPUTE else f" in {slot.role.value}"
            place = f"{list(slot.shape)} at {slot.offset}{role}"
            if self.grid.tensor.size > 1:
                place += f", {slot.placement.value}"
            if slot.partition is not None:
                place += f" from {list(slot.whole_shape)} in {slot.partition.sizes}"
            yield f"{self.name}: {kind} {slot.name} {place}"
        for pack in self.layout.packs:
            parts = " + ".join(slot.name for slot in self.layout.slots[pack.first : pack.last])
            yield f"{self.name}: one operand {pack.name} {list(pack.shape)} of {parts}"
        yield f"{self.name}: {self.policy}"
