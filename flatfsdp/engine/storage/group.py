"""`FlatGroup`: parameters on their way from the master shard to the module, and back.

In:   parameters of one unit that are trained and stored alike, packed by `flat/layout.py`.
Out:  `module.weight` aliases the gathered flat buffer from `unshard` to `reshard`; a weight stored in FP8 has
      an operand of GEMMs instead (`fp8_storage.py`).
Next: `engine/step/unit.py` gathers all groups of a unit; gradients land in `MainGrad`, which
      `engine/step/reduce.py` reduces.

    master shard --cast, once a step--> compute shard --all-gather--> flat buffer <--alias-- module.weight

A group's parameters are in one of three states:

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
                         GATHERING (prefetched, then not needed) --reshard--> SHARDED
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from flatfsdp.comm.checking.journal import look
from flatfsdp.comm.collectives import all_gather
from flatfsdp.comm.streams import compute_waits_for
from flatfsdp.contract.placement import Placement
from flatfsdp.engine.storage.backward_concat import Leaves, Views
from flatfsdp.engine.storage.compute_shard import ComputeShard
from flatfsdp.engine.storage.first_values import digest
from flatfsdp.engine.storage.flat_buffer import FlatBuffer
from flatfsdp.engine.storage.fp8_storage import FP8Shard, FP8Weights
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.storage.master import KeptGrad, MasterShard
from flatfsdp.engine.storage.packed_operands import Operands
from flatfsdp.engine.storage.state import GroupFacts, ShardState, UnitMember, Version
from flatfsdp.engine.storage.unreduced import UNREDUCED
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import Role
from flatfsdp.options import Division
from flatfsdp.torch_private import shares_memory

REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(eq=False)
class RunningSum:
    """A sum of gradients that passes from one backward of a step to the next.

    Attributes:
        so_far: the sum; None if this step has not begun one.
        memory: where it is to be; None if that has no fixed address of its own.
    """

    so_far: Tensor | None = None
    memory: Tensor | None = None


def settle(groups: Iterable[FlatGroup]) -> None:
    """Waits for the collectives so far; raises RuntimeError if ranks have done different things."""
    for model in dict.fromkeys(group.unit.model for group in groups):
        if model is not None:
            look(model, wait=True)


class FlatGroup:
    """Parameters of one unit that are treated alike: one layout, one master shard, one flat buffer.

    Args:
        unit: the unit that the group is in; its `landed` is called for each gradient.
        binding: binding of parameters that are registered in the module, all trained or all frozen, of one
            role.
        lists_flat: whether the optimizer has the master shard as one parameter, and modules list none; False:
            modules list a local shard in place of each parameter.

    Attributes:
        state: what is true of the group now; see `become`.
        master: the shard that the optimizer updates.
        compute_shard: the shard that is gathered.
        buffer: the gathered parameters; None on one rank, whose compute shard holds all of them.
        gathered_bytes: number of bytes that this rank receives in a gather.
        operands: what GEMMs read of the gathered parameters.
        main_grad: accumulated gradients; None as long as the group has not been trained.
        partial_grad: what this step's earlier backwards have reduced, as long as the master shard, or with
            lanes and replicas a part of it.  The last backward adds its own, and the sum is then reduced
            across replicas.
        block_grad: with lanes, the sum of a block whose lanes this step has not all reduced yet.
        kept_grad: memory of the reduced gradient, if that has a fixed address.
        built_frozen: whether the group was frozen when it was built.
        division: divisors of gradients before and after the sum over ranks; None for the mean.
        params: the tensors that the module has, as `Leaves` or `Views`.
        num_trained: number of slots whose gradients land in a backward.
    """

    def __init__(self, unit: UnitMember, binding: Binding, *, lists_flat: bool = False) -> None:
        self.unit = unit
        self.grid = unit.grid
        self.binding = binding
        self.layout = binding.layout
        self.division: Division | None = None
        self.sums = self.partial_grad, self.block_grad = RunningSum(), RunningSum()
        self.kept_grad: KeptGrad | None = None
        self._gathered: torch.cuda.Event | None = None

        policy, num_shards, originals = unit.policy, self.grid.shard.size, binding.parameters()
        self.built_frozen = not originals[0].requires_grad
        self.master = MasterShard(self.layout, unit, originals, lists_flat=lists_flat)
        self.state = self.master.state
        if num_shards > 1:
            self.master.first_digests.update(zip(self.layout.slots, map(digest, originals), strict=True))
        if not lists_flat:
            binding.list(self.master.parameters)
        # "in_layers" packs weights as FP8 would, and each layer casts its own: what `verify` compares with.
        is_fp8 = self.layout.role is Role.FP8 and policy.precision.fp8_weights != "in_layers"
        shard = self.compute_shard = FP8Shard(self.master) if is_fp8 else ComputeShard(self.master)
        self.buffer: FlatBuffer | None = None
        # One rank holds everything: the compute shard already is the unsharded buffer.
        unsharded = shard.tensor.data
        if num_shards > 1:
            numel, device = self.layout.padded_numel(num_shards), self.master.device
            self.buffer = FlatBuffer(numel, unsharded.dtype, device, poison=policy.debug.poison_on_free)
            # With a version counter of its own: a gather must not look to autograd like a write.
            unsharded = self.buffer.tensor.data
        # Its own shard is here already.
        self.gathered_bytes = shard.tensor.nbytes * (num_shards - 1)
        self._unsharded = unsharded.untyped_storage()
        self.operands = FP8Weights(shard, unsharded) if isinstance(shard, FP8Shard) else Operands(unsharded)
        self.main_grad = None if self.built_frozen else MainGrad(self.layout, unit, self.state)
        kind = Leaves if self.built_frozen or policy.optimize_backward_concat else Views
        self.params = kind(binding, self.operands, self.main_grad, partial(unit.landed, self))
        self.num_trained = sum(self.params.trained)
        if self.buffer is not None:
            # It had memory only so that views could be made of it.
            self._free(self.buffer)
        elif not is_fp8:
            # FP8 weights are cast at the first forward, when all ranks make their scales.
            shard.cast()
            # Until its first use a shard may be written through `.data`, which no version counts.
            shard.expire()

    # ---- names ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the unit, for labels and messages."""
        return self.unit.name

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

    def become(self, facts: GroupFacts) -> None:
        """Assigns the facts from after an equal microbatch, and derives what modules show."""
        # Before `take`, which overwrites it.
        was_written = bool(self.state.written)
        self.compute_shard.state.take(facts)
        # Whatever was under way is a part of the microbatch that ran.
        self._gathered = None
        if facts.shard is not ShardState.SHARDED:
            self.params.show()
        elif self.buffer is not None:
            self.params.conceal()
        if self.main_grad is not None and bool(facts.written) is not was_written:
            self.main_grad.show()

    def require_version(self, version: Version) -> None:
        """Checks in a backward that the parameters are those of its forward.

        All ranks raise alike.  A load counts on each of them, and an optimizer of all parameters has one of
        every group on each of them, if only of padding.

        Raises:
            RuntimeError: if they have been written to since they had this version.
        """
        if self.compute_shard.version != version:
            raise RuntimeError(
                f"the parameters of unit {self.name} changed between this forward and its backward (by a "
                "step, a load, a write); run the backward before the change, or the forward again after it"
            )

    def allocate(self) -> bool:
        """Allocates memory for parameters that are neither gathered nor being gathered, or that are stale.

        Returns:
            False if nothing has to be gathered.
        """
        if self.state.shard is not ShardState.SHARDED:
            if self.compute_shard.state.is_cast:
                return False
            # Stale.  What is still being gathered must end before the next gather, which waits for compute.
            self.wait()
        if self.buffer is not None:
            self.buffer.allocate()
        # Transposes of stale values are stale, too.
        self.operands.free()
        return True

    def gather(self) -> None:
        """All-gathers the compute shards.  Collective, unless this rank has everything."""
        if self.buffer is not None:
            all_gather(self.buffer.tensor, self.compute_shard.tensor, self.grid.shard)

    def transpose(self) -> None:
        """Makes the columnwise form of FP8 weights."""
        nbytes = 2 * sum(slot.numel for slot in self.layout.slots)
        with self.unit.moving("transpose", "transpose", nbytes):
            self.operands.transpose()

    def started(self, gathered: torch.cuda.Event | None) -> None:
        """Notes that a gather has begun; the event `gathered` tells when it ends."""
        self._gathered = gathered
        self.state.changes += 1
        self.state.shard = ShardState.GATHERING

    def wait(self) -> None:
        """Makes the compute stream wait until the parameters are gathered."""
        if self.state.shard is ShardState.GATHERING:
            compute_waits_for(self._gathered, self.master.device)
            self.state.changes += 1
            self.state.shard = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Frees the flat buffer; tensors that autograd saved become valid again with the next unshard."""
        # Freed memory may be given out at once, so the gather must have ended for whoever gets it.
        self.wait()
        self.operands.free()
        if self.state.shard is ShardState.UNSHARDED and self.buffer is not None:
            self._free(self.buffer)
            self.state.changes += 1
            self.state.shard = ShardState.SHARDED

    def _free(self, buffer: FlatBuffer) -> None:
        # Modules first: a read of freed memory crashes.
        self.params.conceal()
        buffer.free()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in the memory of the gathered parameters."""
        return shares_memory(tensor, self._unsharded)

    # ---- which parameters are trained; see `engine/step/requires_grad.py` -------------------------------

    @property
    def trains(self) -> bool:
        """Whether some parameter requires a gradient now."""
        return any(map(REQUIRES_GRAD, self.master.parameters))

    @property
    def flags(self) -> Sequence[bool]:
        """For each slot, whether its parameter requires a gradient now."""
        return self.master.per_slot(list(map(REQUIRES_GRAD, self.master.parameters)))

    def train(self, wanted: Sequence[bool]) -> None:
        """Trains or freezes the parameter of each slot from now on."""
        self.state.changes += 1
        self.state.flags_changed = True
        self.params.follow(wanted)
        self.num_trained = sum(wanted)
        self.master.flat.requires_grad_(any(wanted))
        flags = self.master.per_local_shard(wanted)
        for parameter, trains in zip(self.master.parameters, flags, strict=True):
            parameter.requires_grad_(trains)

    def open_main_grad(self) -> None:
        """Lets gradients land in a group that was built frozen.

        Raises:
            RuntimeError: if the optimizer would have to update values in a narrow dtype.
        """
        narrow, wanted = self.master.flat.dtype, self.unit.policy.precision.param
        if narrow != wanted:
            raise RuntimeError(
                f"unit {self.name} was sharded with frozen parameters, which it keeps in {narrow}; to train "
                f"in {wanted}, call requires_grad_(True) before sharding, and requires_grad_(False) after it"
            )
        self.main_grad = MainGrad(self.layout, self.unit, self.state)
        assert isinstance(self.params, Leaves)
        self.params.land_in(self.main_grad)

    # ---- gradients of a step ----------------------------------------------------------------------------

    def join_step(self) -> None:
        """Joins the reduction of this step."""
        self.state.changes += 1
        self.state.takes_part = True

    def watch_unreduced(self) -> None:
        """Starts watching for an optimizer's `zero_grad()`, which is to drop accumulated gradients."""
        if self.state.takes_part:
            self.master.marks.start()

    @property
    def is_awaited(self) -> bool:
        """Whether its gradients have landed, or have still to land, in the running backward."""
        # A group that has joined the step may be frozen since.
        return self.state.takes_part and self.trains

    @property
    def lengths_of_sums(self) -> tuple[int, int]:
        """Elements of `partial_grad` and `block_grad` that are memory beside the reduced gradient.

        A sum that is as long as the reduced gradient, and of its dtype, becomes it in the end.
        """
        policy, lanes, numel = self.unit.policy, self.unit.policy.lanes, self.master.flat.numel()
        if not self.unit.shared.reduces_every and (lanes is None or lanes.turns(self.grid) == 1):
            return 0, 0
        replicas = 1 if lanes is None else self.grid.replicate.size
        becomes_it = replicas == 1 and self.master.grad_dtype == policy.precision.accumulate
        has_blocks = lanes is not None and lanes.turns_of_block(self.grid) > 1
        return 0 if becomes_it else numel // replicas, numel if has_blocks else 0

    def keep_sums(self) -> None:
        """Gives the sums that pass from backward to backward fixed addresses, for good."""
        dtype, device = self.unit.policy.precision.accumulate, self.master.device
        for each, numel in zip(self.sums, self.lengths_of_sums, strict=True):
            if numel and each.memory is None:
                each.memory = torch.empty(numel, dtype=dtype, device=device)

    def end_step(self) -> None:
        """Drops what belongs to the step that ends, reduced or abandoned; what was reduced is handed over."""
        state = self.state
        # A loop ends a step even where nothing has begun: once more for each step.
        if not (state.takes_part or state.flags_changed or state.written or state.used):
            return
        if self.main_grad is not None:
            self.main_grad.end_step()
        self.partial_grad.so_far = self.block_grad.so_far = None
        self.master.marks.stop()
        self.state.end_step()

    def drop_unreduced(self) -> None:
        """Drops gradients that were accumulated and have not reached the master's gradient."""
        if self.main_grad is not None:
            self.main_grad.drop()
        self.end_step()

    def drop_if_zeroed(self) -> None:
        """Drops what was accumulated if an optimizer's `zero_grad()` has been called since."""
        if self.master.marks.were_zeroed:
            self.drop_unreduced()

    def require_reduced(self) -> None:
        """Raises RuntimeError if an optimizer would step without gradients that wait to be reduced."""
        # First: what the user has dropped is not missing.
        self.drop_if_zeroed()
        if self.master.marks.is_on:
            raise RuntimeError(f"an optimizer was about to step while, in unit {self.name}, {UNREDUCED}")
