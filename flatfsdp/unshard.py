"""Parameters on their way from the master shard to the module, and back.

In:   the parameters of one unit that train alike (`FlatGroup`), already packed by `layout.py`.
Out:  `module.weight` aliases the gathered flat buffer from `unshard` to `reshard`.
Next: the layers compute; gradients land in `MainGrad`; `reduce.py` reduces them.

    master shard --cast, once a step--> compute shard --all-gather--> flat buffer <--alias-- module.weight

A group's parameters are in one of three states:

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
                         GATHERING (prefetched, then not needed) --reshard--> SHARDED
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch
from torch import Tensor, nn

from flatfsdp.binding import Binding
from flatfsdp.buffers import FlatBuffer, MainGrad
from flatfsdp.comm import Grid, Lane, all_gather, broadcast, compute_waits_for
from flatfsdp.master import MasterShard
from flatfsdp.microbatch import Microbatch
from flatfsdp.observe import ByteLedger, span
from flatfsdp.params import Leaves, Views
from flatfsdp.policy import Division, Policy


class ShardState(Enum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class FlatGroup:
    """The trained, or the frozen, parameters of one unit: one layout, one master shard, one flat buffer.

    Args:
        binding: of parameters that are registered in the module, all trained or all frozen.
        landed: called when a gradient of this backward is in `main_grad`, with its slot's index, or with
            None when all slots landed at once.

    Attributes:
        prefix: of the parameters' original names, such as "blocks.0."; set by the root.
        master: the shard that the optimizer updates.
        main_grad: None if frozen.
        division: None for the mean over ranks.
        params: what the module sees.
    """

    def __init__(
        self,
        binding: Binding,
        grid: Grid,
        device: torch.device,
        policy: Policy,
        microbatch: Microbatch,
        ledger: ByteLedger,
        landed: Callable[[int | None], None],
    ) -> None:
        self.prefix = ""
        self.grid = self.reduce_grid = grid
        self.policy = policy
        self.microbatch = microbatch
        self.ledger = ledger
        self.binding = binding
        self.layout = binding.layout
        parameters = binding.parameters()
        self.trainable = parameters[0].requires_grad
        self.state = ShardState.SHARDED
        self.division: Division | None = None
        self._partial_grad: Tensor | None = None
        self._partial_step = -1
        self._cast_version: tuple[int, int] | None = None

        precision, num_shards = policy.precision, grid.shard.size
        self.master = MasterShard(
            self.layout,
            grid,
            precision.param,
            device,
            grad_dtype=precision.grad or precision.param,
            cpu_offload=policy.cpu_offload,
            trainable=self.trainable,
        )
        for slot, parameter in zip(self.layout.slots, parameters, strict=True):
            self.master.load(slot, parameter.detach())

        self._compute_shard = self.master.flat.data
        if precision.compute != precision.param or self.master.is_offloaded:
            self._compute_shard = self._compute_shard.new_empty(
                self._compute_shard.shape, dtype=precision.compute, device=device
            )
        # One rank holds everything: the compute shard already is the unsharded buffer.
        self._buffer: FlatBuffer | None = None
        unsharded = self._compute_shard.data
        if num_shards > 1:
            numel = self.layout.padded_numel(num_shards)
            self._buffer = FlatBuffer(numel, precision.compute, device, poison=policy.poison_on_free)
            unsharded = self._buffer.alias()
        self._gathered: torch.cuda.Event | None = None

        self.main_grad: MainGrad | None = None
        if self.trainable:
            self.main_grad = MainGrad(
                self.layout,
                num_shards,
                precision.accumulate,
                device,
                microbatch,
                ledger,
                poison=policy.poison_on_free,
            )
        self.params: Leaves | Views
        if self.main_grad is None or policy.optimize_backward_concat:
            self.params = Leaves(binding, unsharded, self.main_grad, landed)
        else:
            self.params = Views(binding, unsharded, self.main_grad, landed)
        if self._buffer is not None:
            self._free(self._buffer)
        else:
            self._cast()

    def attach(self, microbatch: Microbatch, ledger: ByteLedger) -> None:
        """Joins a root: its microbatch and its ledger from now on.  Collective: replicas become equal."""
        self.microbatch, self.ledger = microbatch, ledger
        if self.main_grad is not None:
            self.main_grad.microbatch, self.main_grad.ledger = microbatch, ledger
        self.reduce_grid = Grid(self.grid.shard.own_communicator(), self.grid.replicate.own_communicator())
        if self.grid.replicate.size > 1:
            replica = self.master.flat.detach().to(self.master.device)
            broadcast(replica, self.grid.replicate)
            self.master.flat.data.copy_(replica)

    @property
    def name(self) -> str:
        """Of the unit, for labels and messages."""
        return self.prefix.rstrip(".") or "root"

    # ---- master shard -> flat buffer --------------------------------------------------------------------

    @property
    def _is_current(self) -> bool:
        """Whether the compute shard, and a buffer gathered from it, still say what the master says.

        In-place writes raise the master's version, so an optimizer step, or a load, in between is noticed.
        """
        return self._cast_version == self.master.version

    def expire(self) -> None:
        """Casts and gathers anew next time, even if no in-place write to the master was counted."""
        self._cast_version = None

    def unshard(self, lane: Lane) -> None:
        """Starts to gather the parameters; nothing if they are there, or on their way, and up to date."""
        if self.state is not ShardState.SHARDED:
            if self._is_current:
                return
            self.wait()
        if self._buffer is not None:
            self._buffer.allocate()
        with lane.after_compute():
            if not self._is_current:
                self._cast()
            if self._buffer is not None:
                self._gather(self._buffer.tensor)
        self._gathered = lane.mark()
        self.state = ShardState.GATHERING

    def _cast(self) -> None:
        master, shard = self.master.flat.detach(), self._compute_shard
        if self.master.is_offloaded:
            nbytes = master.numel() * master.element_size()
            with span("upload", self.name, self.microbatch.index, nbytes):
                master = master.to(shard.device, non_blocking=True)
            self.ledger.add("offload", nbytes)
        if shard.data_ptr() != master.data_ptr():
            nbytes = master.numel() * (master.element_size() + shard.element_size())
            with span("cast", self.name, self.microbatch.index, nbytes):
                shard.copy_(master)
            self.ledger.add("cast", nbytes)
        self._cast_version = self.master.version

    def _gather(self, full: Tensor) -> None:
        ranks = self.grid.shard
        nbytes = full.numel() * full.element_size() * (ranks.size - 1) // ranks.size
        with span("all_gather", self.name, self.microbatch.index, nbytes):
            all_gather(full, self._compute_shard, ranks)
        self.ledger.add("gather", nbytes)

    def wait(self) -> None:
        """Makes the compute stream wait until the parameters are there."""
        if self.state is ShardState.GATHERING:
            compute_waits_for(self._gathered, self.master.device)
            self.state = ShardState.UNSHARDED

    def reshard(self) -> None:
        """Frees the flat buffer; what autograd saved of it becomes valid again with the next unshard."""
        self.wait()
        if self.state is ShardState.UNSHARDED and self._buffer is not None:
            self._free(self._buffer)
            self.state = ShardState.SHARDED

    def _free(self, buffer: FlatBuffer) -> None:
        self.params.conceal()
        buffer.free()

    # ---- gradients and whole parameters -----------------------------------------------------------------

    @property
    def partial_grad(self) -> Tensor | None:
        """What this step's earlier backwards have reduce-scattered, as long as the master shard; None if
        nothing.  The last backward's joins it, and it is then reduced across replicas."""
        return self._partial_grad if self._partial_step == self.microbatch.step else None

    @partial_grad.setter
    def partial_grad(self, value: Tensor | None) -> None:
        self._partial_grad, self._partial_step = value, self.microbatch.step

    def drop_unreduced(self) -> None:
        """Drops what was accumulated and has not reached the master's gradient."""
        self.partial_grad = None
        if self.main_grad is not None:
            self.main_grad.drop()

    def whole_parameters(self, full: Tensor) -> list[nn.Parameter]:
        """Parameters of the original shapes that alias a whole buffer, in slot order."""
        return [nn.Parameter(view, requires_grad=self.trainable) for view in self.layout.views(full)]

    def describe(self) -> Iterable[str]:
        """The geometry, one line a parameter, equal on all ranks of a sound model."""
        kind = "trained" if self.trainable else "frozen"
        for slot in self.layout.slots:
            yield f"{self.name}: {kind} {slot.name} {list(slot.shape)} at {slot.offset}"
        yield f"{self.name}: {self.policy}"
