"""`ComputeShard`: the shard of a group that is gathered, and the master version that it was cast from.

In:   the master shard, which optimizers and loads write to.
Out:  this rank's part in the dtype that the model computes in, or FP8 bytes with one scale a weight.
Next: `group.py` gathers it into the flat buffer.

    version of the master    changes with every in-place write
    measured                 the version whose amaxes have been taken (FP8 weights)
    scaled                   the version whose scales have been set (FP8 weights)
    cast                     the version that the compute shard holds

An optimizer that writes the compute shard, or takes the amaxes, along with the master calls `portion_done`;
otherwise both are done before the next gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.byte_ledger import ByteLedger, span
from flatfsdp.engine.storage.changes import Changes
from flatfsdp.engine.storage.fp8_weights import FP8Weights
from flatfsdp.engine.storage.master import MasterShard, Version
from flatfsdp.kernels.cast.scaling import Scales
from flatfsdp.torch_private import shares_memory


def compute_tensor(master: MasterShard, dtype: torch.dtype) -> Tensor:
    """Memory for a compute shard, 1-D: the master shard's own if no cast is needed."""
    flat = master.flat
    if dtype == flat.dtype and not master.is_offloaded:
        return flat.data
    return torch.zeros(flat.shape, dtype=dtype, device=master.device)


class ComputeShard:
    """This rank's part of a group's parameters, in the form that the model computes with.

    Args:
        master: master shard that the values come from.
        tensor: memory of the shard, 1-D, as long as the master shard.
        fp8: scales and casts of weights that are stored in FP8; None for others.
        built_frozen: whether the group was frozen when it was wrapped.

    Attributes:
        changes: raised whenever the versions in the picture change, except the master's.
    """

    def __init__(
        self, master: MasterShard, tensor: Tensor, fp8: FP8Weights | None, *, built_frozen: bool
    ) -> None:
        self.tensor = tensor
        self.fp8 = fp8
        self._master = master
        self._is_cast_once_a_load = fp8 is not None and built_frozen
        self._measured: Version | None = None
        self._scaled: Version | None = None
        self._cast: Version | None = None
        self._done: dict[tuple[int, int], Version] = {}
        self.changes = Changes()

    @property
    def version(self) -> Version:
        """Version of the master shard; every in-place write changes it, as an optimizer step or a load does.

        For FP8 weights that were built frozen it counts loads only, which all ranks make.  If it counted
        other writes, a rank whose shard was written to would ask for new scales alone.
        """
        master = self._master  # `master.version` is inlined: asked for often
        return master.generation, -1 if self._is_cast_once_a_load else master.flat._version

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the master shard's."""
        storage = self._master.flat.untyped_storage()
        return self.tensor.numel() > 0 and not shares_memory(self.tensor, storage)

    @property
    def is_current(self) -> bool:
        """Whether it, and a buffer gathered from it, still match the master shard."""
        return self._cast == self.version

    @property
    def has_scales(self) -> bool:
        """Whether the scales of FP8 weights fit the master's current values."""
        return self._scaled == self.version

    @property
    def done(self) -> tuple[bool, bool, bool]:
        """Whether amaxes are taken, scales set, and values cast, for the master's current values."""
        version = self.version
        return (self._measured == version, self._scaled == version, self._cast == version)

    def skip_to(self, done: tuple[bool, bool, bool]) -> None:
        """Notes that something else has done exactly this; see `done`."""
        self.changes.count += 1
        version = self.version
        self._measured, self._scaled, self._cast = (version if each else None for each in done)

    def expire(self) -> None:
        """Marks its values as stale, even if no in-place write to the master was counted.

        FP8 weights that were built frozen stay valid: they are cast once a load.
        """
        if not self._is_cast_once_a_load:
            self.changes.count += 1
            self._cast = self._scaled = self._measured = None

    def measure(self, ledger: ByteLedger) -> None:
        """Takes the amaxes of this rank's pieces of FP8 weights, unless the optimizer has done it."""
        assert self.fp8 is not None
        if self._measured != self.version:
            self.changes.count += 1
            ledger.add("measure", self.fp8.measure(self._master))
            self._measured = self.version

    def set_scales(self, scales: Scales) -> None:
        """Sets the scales of the FP8 weights for the master's current values."""
        assert self.fp8 is not None
        self.changes.count += 1
        self.fp8.set_scales(scales)
        self._scaled = self.version
        self._cast = None

    def amaxes_of(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Runs in [start, stop) whose amaxes an optimizer takes as it updates them; see `FlatShard.runs`."""
        assert self.fp8 is not None
        self.changes.count += 1
        self._measured = None
        return self.fp8.runs(start, stop)

    def portion_done(self, start: int, stop: int) -> None:
        """Notes that an optimizer has updated a portion of the master shard, and written what goes with it.

        It may be several neighbouring portions together.
        """
        self.changes.count += 1
        version = self.version
        self._done[start, stop] = version
        done = [part for part, of_part in self._done.items() if of_part == version]
        if all(
            any(a <= p.start and p.stop <= b for a, b in done)
            for p in self._master.portions
            if p.start < p.stop
        ):
            if self.fp8 is None:
                self._cast = version
            else:
                self._measured = version

    def cast(self, ledger: ByteLedger, unit: str, microbatch: int) -> None:
        """Casts the master shard, even if the compute shard is current.

        Args:
            ledger: counts the bytes moved.
            unit: name of the unit, for labels of the profiler.
            microbatch: index of the microbatch, for these labels.
        """
        self.changes.count += 1
        master, shard = self._master.flat.detach(), self.tensor
        if self._master.is_offloaded:
            nbytes = master.numel() * master.element_size()
            with span("upload", unit, microbatch, nbytes):
                master = master.to(shard.device, non_blocking=True)
            ledger.add("offload", nbytes)
        if self.has_own_memory:
            nbytes = master.numel() * (master.element_size() + shard.element_size())
            with span("cast", unit, microbatch, nbytes):
                if self.fp8 is None:
                    shard.copy_(master)
                else:
                    self.fp8.cast(master, shard)
            ledger.add("cast", nbytes)
        self._cast = self.version
