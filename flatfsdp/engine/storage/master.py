"""The master shard: the part of a unit's parameters that this rank's optimizer updates.

In:   whole parameter values (construction, `load`), reduced gradients (`engine/step/reduce.py`).
Out:  local shards with `.grad`: parameters in its memory, one a slot; whole values again for checkpoints.
Next: `flat/binding.py` lists the local shards in modules, and optimizers update them; `group.py` casts and
      gathers the master shard for forward and backward.

    master shard    | slot 0 .......|gap| slot 1 ....................|
    local shards      [0, 13)             [16, 48)                       slot 2: [48, 48), on the next rank

An empty one stands where its parameter would be, so starts ascend in the order of the slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import declare, launch
from flatfsdp.comm.collectives import all_gather, broadcast, gather, scatter
from flatfsdp.comm.ranks import ALONE
from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.flat_shard import GradAt
from flatfsdp.contract.main_grad import GRAD, MAIN_GRAD
from flatfsdp.contract.placement import Placement
from flatfsdp.contract.users_own import users_own
from flatfsdp.contract.whole_shape import WHOLE_SHAPE
from flatfsdp.engine.storage.shard_grad import Published, ShardGrad, ShardInModel, plain
from flatfsdp.engine.storage.state import GroupState, UnitMember, Version
from flatfsdp.engine.storage.unreduced import UnreducedMarks, reduced_grad
from flatfsdp.flat.layout import FlatLayout, ParamSlot, Piece
from flatfsdp.torch_private import uses_of_memory

T = TypeVar("T")


_ADDRESS = Tensor.data_ptr


class LocalShard(NamedTuple):
    """Elements [start, stop) of a master shard, and the parameter that aliases them for the optimizer."""

    parameter: nn.Parameter
    start: int
    stop: int


class MasterShard:
    """This rank's shard of one flat buffer, in master precision.

    With `cpu_offload` the shard is in (pinned) CPU memory, and its gradient too.

    Args:
        layout: places of the parameters in the whole buffer.
        unit: the unit that the group is in.
        originals: the parameters that the slots are filled from, all trained or all frozen.
        lists_flat: whether the optimizer has the shard as one parameter, not one for each slot.

    Attributes:
        state: facts about the group.
        flat: the shard, 1-D, `layout.shard_numel(N)` elements.
        grad_dtype: dtype of the reduced gradient: `Precision.grad`, by default that of the shard.  It goes
            to `.grad`, which PyTorch keeps in the parameter's own dtype, or else to `.main_grad`.
        local_shards: what the optimizer updates: one for each slot, even an empty one, or one for all.
        parameters: the parameters of the local shards, in the same order.
        in_model: number of the shard in its model, and what asks the model's ranks about gradients.
        marks: watch over the `.grad` of the local shards while gradients wait to be reduced.
        stages: ranks of the pipeline around this stage, if any; a norm counts other stages' gradients, too.
        generation: number of loads, also from other replicas; any other write raises `flat._version`.
        first_digests: by slot, the digest of the values that it began with, until they are replaced or
            compared (`first_values.py`).
        first_version: version of `flat` that stands for no write by others; loads of state dicts raise it.
        published: returns the reduced gradient, as long as a part of it is still there.
        is_average: whether it holds an average for now, inside `EMA.averaged`.
    """

    def __init__(
        self, layout: FlatLayout, unit: UnitMember, originals: Sequence[nn.Parameter], *, lists_flat: bool
    ) -> None:
        self.layout = layout
        self.grid = unit.grid
        self.unit = unit
        self.state = GroupState()
        self.in_model = ShardInModel()
        self.stages = ALONE
        self.generation = 0
        self.first_digests: dict[ParamSlot, Tensor] = {}
        self.first_version = 0
        self.is_average = False
        # Weak, so that zeroing the gradients of all local shards frees the memory.
        self.published: Callable[[], Published | None] = lambda: None

        precision, trains = unit.policy.precision, originals[0].requires_grad
        # To what is built frozen nothing is added, so values in the compute dtype need no wider copy.
        is_narrow = not trains and all(each.dtype == precision.compute for each in originals)
        dtype = precision.compute if is_narrow else precision.param
        self.grad_dtype = precision.grad or dtype
        is_offloaded, device = unit.policy.cpu_offload, self.device
        numel, pins = layout.shard_numel(self.grid.shard.size), is_offloaded and device.type == "cuda"
        shard = torch.zeros(numel, dtype=dtype, device="cpu" if is_offloaded else device, pin_memory=pins)
        self.flat = nn.Parameter(shard, requires_grad=trains)
        for slot, original in zip(layout.slots, originals, strict=True):
            self.load(slot, original.detach())

        whole = LocalShard(self.flat, 0, self.flat.numel())
        self.local_shards: Sequence[LocalShard] = [whole] if lists_flat else self._divided(originals)
        self.parameters = [local.parameter for local in self.local_shards]
        self._empty = [parameter for parameter in self.parameters if not parameter.numel()]
        self._with_memory = [self.flat, *(parameter for parameter in self.parameters if parameter.numel())]
        self._addresses = list(map(_ADDRESS, self._with_memory))
        # `add_grad` splits a gradient into gaps and local shards in turn, a gap first, but no empty gaps.
        edges = [0, *(edge for _, *both in self.local_shards for edge in both), self.flat.numel()]
        lengths = [stop - start for start, stop in pairwise(edges)]
        kept = [number for number, length in enumerate(lengths) if length or number % 2]
        self._lengths = [lengths[number] for number in kept]
        self._numbers = [place for place, number in enumerate(kept) if number % 2]
        self.marks = UnreducedMarks(self.parameters, self.in_model, self.state)

    def _divided(self, originals: Sequence[nn.Parameter]) -> list[LocalShard]:
        """One local shard for each slot: 1-D, in the shard's memory, empty if the slot lies on other ranks.

        Each has the original's `requires_grad` and own attributes, and its whole shape (`whole_shape`).
        """
        found, length = [], self.flat.numel()
        for slot, original in zip(self.layout.slots, originals, strict=True):
            start, stop = (min(max(edge - self.start, 0), length) for edge in (slot.offset, slot.end))
            # A slice of a detached tensor shares the version counter, so its updates are noticed.
            parameter = nn.Parameter(self.flat.detach()[start:stop], original.requires_grad)
            # Tensor-parallel marks are kept, too: other libraries read them from what the optimizer has.
            vars(parameter).update(users_own(original))
            WHOLE_SHAPE.leave(parameter, slot.whole_shape)
            found.append(LocalShard(parameter, start, stop))
        return found

    @property
    def device(self) -> torch.device:
        """Device that the model computes on; an offloaded shard itself is in CPU memory."""
        return self.unit.shared.device

    @property
    def is_offloaded(self) -> bool:
        """Whether it is in CPU memory, so that compute and communication need a copy first."""
        return self.flat.device != self.device

    @property
    def start(self) -> int:
        """First element of the whole buffer that is in this shard."""
        return self.grid.shard.rank * self.flat.numel()

    @property
    def has_moved(self) -> bool:
        """Whether it, or a local shard, was given other memory than is cast and gathered."""
        if list(map(_ADDRESS, self._with_memory)) != self._addresses:
            return True
        # An empty local shard has no address of its own, and has moved on all ranks or none.
        memory = self.flat.untyped_storage().data_ptr()
        return any(empty.untyped_storage().data_ptr() != memory for empty in self._empty)

    @property
    def version(self) -> Version:
        """Changes whenever the values may have changed."""
        return self.generation, self.flat._version

    # ---- what the optimizer has -------------------------------------------------------------------------

    @property
    def is_divided(self) -> bool:
        """Whether each slot has a local shard, rather than one for all."""
        return self.parameters[0] is not self.flat

    def per_slot(self, given: Sequence[T]) -> Sequence[T]:
        """For each slot, what is given for the local shard that it is in."""
        return given if self.is_divided else [*given] * len(self.layout.slots)

    def per_local_shard(self, of_slots: Sequence[bool]) -> Sequence[bool]:
        """For each local shard, whether it holds for a slot in it."""
        return of_slots if self.is_divided else [any(of_slots)]

    def local_shard_name(self, number: int) -> str:
        """Name of a local shard in its unit: "head.weight" for a slot, otherwise "flat_param"."""
        return self.layout.slots[number].name if self.is_divided else "flat_param"

    # ---- whole values -----------------------------------------------------------------------------------

    def load(self, slot: ParamSlot, value: Tensor) -> None:
        """Copies this rank's part of a whole parameter into the shard."""
        self.first_digests.pop(slot, None)
        piece = self.layout.piece(slot, self.grid.shard.rank, self.grid.shard.size)
        if piece is not None:
            # Not counted as a write, of which other ranks may have none: `generation` counts a load, on every
            # rank alike, even where the shard is all padding.
            _put(self.flat.data, piece, value)
        self.count_load()

    def count_load(self) -> None:
        """Notes a load, on every rank alike, even if it wrote to the shards of some ranks only."""
        self.state.changes += 1
        self.generation += 1

    def loaded(self) -> None:
        """Notes that all values were replaced."""
        self.first_digests.clear()
        self.count_load()

    def cut(self, value_of: Callable[[ParamSlot], Tensor | None], dtype: torch.dtype) -> Tensor:
        """This rank's part of whole values, as a new tensor as long as the shard; zero elsewhere."""
        shard = torch.zeros_like(self.flat.detach(), dtype=dtype)
        for piece in self.layout.pieces(self.grid.shard.rank, self.grid.shard.size):
            if (value := value_of(piece.slot)) is not None:
                _put(shard, piece, value)
        return shard

    def gather(self, shard: Tensor | None = None, *, rank0_only: bool = False) -> Tensor | None:
        """Gathers shards like this one into a whole padded buffer on the compute device.

        Collective if sharded.

        Args:
            shard: this rank's part, of the shape of `flat`; default: `flat` itself.
            rank0_only: only the first rank of the grid gets it, the others None.
        """
        ranks = self.grid.shard
        own = (self.flat if shard is None else shard).detach().to(self.device)
        if rank0_only and self.grid.replicate.rank != 0:
            return None
        if ranks.size == 1:
            return own.clone()
        is_given, identity = not rank0_only or ranks.rank == 0, self.unit.identify(Action.SHOW)
        full = own.new_empty(self.layout.padded_numel(ranks.size)) if is_given else None
        if full is None or rank0_only:
            declare(ranks, identity, self.device)
            gather(full, own, ranks)
        else:
            with launch(ranks, identity, self.device):
                all_gather(full, own, ranks)
        return full

    def store(self, full: Tensor) -> None:
        """Stores this rank's part of a whole padded buffer."""
        self.flat.detach().copy_(full[self.start : self.start + self.flat.numel()])
        self.loaded()

    def store_from_rank0(self, full: Tensor | None) -> None:
        """Stores this rank's part of the first rank's whole buffer.  Collective; see `store`."""
        self.flat.detach().copy_(self.scattered(full, self.flat.dtype))
        self.loaded()

    def scattered(self, full: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scatters the whole padded buffer of the grid's first rank; returns this rank's part.  Collective.

        The result is on the compute device.  Other ranks pass None.
        """
        own = torch.empty_like(self.flat.detach(), dtype=dtype, device=self.device)
        if self.grid.replicate.rank == 0:
            declare(self.grid.shard, self.unit.identify(Action.STORE), self.device)
            scatter(own, full, self.grid.shard)
        declare(self.grid.replicate, self.unit.identify(Action.STORE), self.device)
        broadcast(own, self.grid.replicate)
        return own

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the gradient in a norm: of ranks with the same one, one does."""
        return self.layout.placement is Placement.SPLIT or self.grid.tensor.rank == 0

    # ---- gradients --------------------------------------------------------------------------------------

    @property
    def grad_attribute(self) -> Attribute[Tensor | None]:
        """Attribute of the local shards that holds their reduced gradients."""
        return GRAD if self.grad_dtype == self.flat.dtype else MAIN_GRAD

    @property
    def grads_at(self) -> Sequence[GradAt]:
        """The reduced gradients in this shard: one a local shard that has one, or one of all together."""
        if (joint := self.joint_grad(0, len(self.local_shards))) is not None:
            return [GradAt(0, joint.flat)]
        found = ((start, reduced_grad(p, self.grad_attribute)) for p, start, _ in self.local_shards)
        return [GradAt(start, plain(grad)) for start, grad in found if grad is not None]

    @property
    def grads(self) -> Sequence[Tensor]:
        """The same gradients without their places."""
        return [grad for _, grad in self.grads_at]

    def joint_grad(self, first: int, last: int, *, empty: bool = False) -> Published | None:
        """The gradient of the whole shard, if local shards [first, last) all have their parts of it.

        An idle one has none, where that is zero.  None if one of them has no gradient for another reason, or
        another gradient.

        Args:
            first: number of the first local shard.
            last: number of the local shard after the last one.
            empty: whether local shards without elements count, which are others on each rank.
        """
        published, attribute = self.published(), self.grad_attribute
        if published is None:
            return None
        for index in range(first, last):
            parameter, start, stop = self.local_shards[index]
            if start == stop and not empty:
                continue
            grad = reduced_grad(parameter, attribute)
            if index in published.idle:
                ours = grad is None
            else:
                ours = type(grad) is ShardGrad and grad.published is published and grad.place.number == index
            if not ours:
                return None
        return published

    def add_grad(self, grad: Tensor, used: Sequence[bool]) -> int:
        """Sets the reduced gradient, or adds to one that is there.

        Args:
            grad: as long as the shard.
            used: for each local shard, whether some rank has used it in this step; what nobody has used gets
                no gradient.

        Returns:
            Number of elements that were added, not set.
        """
        attribute, added = self.grad_attribute, 0
        published = self.joint_grad(0, len(self.local_shards), empty=True)
        if published is not None:
            published.flat.add_(grad)
            added = grad.numel()
        else:
            published = Published(grad, set(range(len(self.local_shards))))
            self.published = weakref.ref(published)
        # Before anything is set: what autograd has brought is in the same `.grad`.
        autograds = self.marks.take_autograds()
        if not published.idle and not autograds:
            return added
        if autograds and self.unit.policy.lanes is not None:
            raise RuntimeError(
                "a penalty on model.parameters() has a gradient of its own on each rank, which lanes would "
                "add as often as this rank has microbatches; compute it inside the model's forward, or use "
                "weight_decay"
            )
        # An empty part shares the version counter, too, so that all ranks notice the same writes.
        split = published.flat.split_with_sizes(self._lengths)
        parts = [split[number] for number in self._numbers]
        places = zip(self.parameters, parts, self.marks.places, used, strict=True)
        for index, (parameter, part, place, is_used) in enumerate(places):
            if index in autograds:
                # From a penalty on this rank's part of the parameter: it is not to be a mean over ranks.
                part.add_(plain(autograds[index]))
            if index not in published.idle:
                continue
            old = reduced_grad(parameter, attribute)
            # Zeros to which nobody has written but to zero them.
            if isinstance(old, ShardGrad) and old.stands_for_none and old._version == old.zeroings:
                old = None
                attribute.leave(parameter, None)
            if old is not None:
                # The user's own memory.
                published.idle.discard(index)
                if is_used:
                    attribute.leave(parameter, ShardGrad.of(plain(old).add_(part), place))
                    added += part.numel()
            elif is_used:
                published.idle.discard(index)
                attribute.leave(parameter, ShardGrad.of(part, place, published))
        return added

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients."""
        if set_to_none:
            for parameter in self.parameters:
                self.grad_attribute.leave(parameter, None)
        else:
            for grad in self.grads:
                grad.zero_()


def _put(shard: Tensor, piece: Piece, value: Tensor) -> None:
    """Copies a piece of a whole parameter to its place in a shard."""
    shard[piece.shard_offset : piece.shard_stop] = value.reshape(-1)[piece.start : piece.stop]


class KeptGrad:
    """Memory that a group's reduced gradients take turns in.

    Args:
        master: master shard that the gradient is of.

    Attributes:
        tensor: the memory, 1-D, as long as the shard, in the dtype of the gradient.
    """

    def __init__(self, master: MasterShard) -> None:
        self._master = master
        self.tensor = torch.empty(master.flat.numel(), dtype=master.grad_dtype, device=master.device)
        # Counted before anybody else can have it.
        self._uses_if_free = uses_of_memory(self.tensor)

    @property
    def free_memory(self) -> Tensor | None:
        """The memory; None while a parameter, or a user, holds the gradient of an earlier step in it."""
        if self._master.grads or uses_of_memory(self.tensor) != self._uses_if_free:
            return None
        return self.tensor
