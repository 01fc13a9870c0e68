"""Ranks, side streams and collectives: all that differs between gloo and NCCL, or torch 2.11 and 2.13.

Next: `flat_group.py` gathers and `reduce.py` reduces through these few functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

# Every optimizer imports it, and for good it keeps the default group, if there is one by then, in default
# arguments; see `Ranks`.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed these and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, init=False)
class Ranks:
    """One process group and this process's place in it; `group` None is a world of one."""

    _group: ReferenceType[dist.ProcessGroup] | None
    size: int
    rank: int

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        # Weak: a model may be alive when the program ends.  A group that it kept would outlive
        # destroy_process_group(), and gloo's threads, which may still have tensors to let go of, the
        # interpreter; they abort the process then.
        weak = None if group is None else ref(group)
        hash(weak)  # which a reference keeps: ranks stay keys, as in `optim/clip.py`, once the group is gone
        vars(self).update(_group=weak, size=size, rank=rank)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """
        Raises:
            RuntimeError: once it is destroyed.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of a model or layer is gone; call dist.destroy_process_group() after its "
                "last use"
            )
        return group

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Ranks:
        """
        Raises:
            TypeError: for something else, such as a DeviceMesh.
            ValueError: for a group that this rank is not in.
        """
        if isinstance(group, DeviceMesh):
            raise TypeError("a process group is needed, not a DeviceMesh; pass mesh['tp'].get_group()")
        if group is None:
            return Ranks(None, 1, 0)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this rank is not in the process group that it passes; of several that new_group has made, "
                "pass the one with this rank"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"a process group is needed, not {group!r}; pass what dist.new_group returns")
        return Ranks(group, dist.get_world_size(group), dist.get_rank(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Copies of a layer are shared by the same ranks."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """
        Raises:
            TypeError: if they are pickled, for ranks of a group.
        """
        if vars(self).get("_group") is not None:
            raise TypeError(
                "what several ranks share cannot be pickled, as their process group means nothing to another "
                "process; save state_dict(), and build the layer anew"
            )
        return vars(self)

    @property
    def name(self) -> str:
        """Of the process group, the same on all its ranks; empty for a world of one."""
        return "" if self.group is None else self.group.group_name

    @property
    def global_ranks(self) -> list[int]:
        """In the default process group."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    def require_apart(self, data_parallel: Ranks) -> None:
        """
        Raises:
            ValueError: if some rank besides this one is in both.
        """
        both = sorted(set(self.global_ranks) & set(data_parallel.global_ranks))
        if len(both) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, both))} are in tp_group and in the group that FlatFSDP shards or "
                "replicates over; pass mesh= or process_group= of the data-parallel ranks, which have the "
                "same part of each layer"
            )

    def own_communicator(self) -> Ranks:
        """The same ranks over a second communicator, so that two collectives can be under way at once.

        Collective over these ranks, the first time.
        """
        if self.group is None or self.size == 1:
            return self
        if self.group not in _second_communicators:
            second = dist.new_group(
                dist.get_process_group_ranks(self.group),
                backend=dist.get_backend(self.group),
                use_local_synchronization=True,
            )
            _second_communicators[self.group] = second
            _first_communicators[second] = self
        return Ranks(_second_communicators[self.group], self.size, self.rank)

    def first_communicator(self) -> Ranks:
        """The communicator that `own_communicator` has made this one beside, or this one."""
        return self if self.group is None else _first_communicators.get(self.group, self)


_second_communicators: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Shared by all models over a group: NCCL takes seconds and hundreds of megabytes to make one, and frees none
before the group is destroyed."""

_first_communicators: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


ALONE = Ranks(None, 1, 0)


def default_group() -> dist.ProcessGroup | None:
    """All ranks; None where torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@dataclass(frozen=True)
class Grid:
    """Parameters are sharded over `shard` and replicated over `replicate`: together, the data-parallel ranks.

    `tensor` are the ranks that have other parts of the same parameters (tensor parallelism).
    """

    shard: Ranks
    replicate: Ranks
    tensor: Ranks = ALONE

    @property
    def num_ranks(self) -> int:
        """That the parameters of this tensor-parallel rank are spread over."""
        return self.shard.size * self.replicate.size

    @property
    def dimensions(self) -> tuple[Ranks, ...]:
        return self.shard, self.replicate, self.tensor

    def make_group(self, device: torch.device) -> dist.ProcessGroup | None:
        """A group of all ranks of the grid; None if that is one.  Collective.

        Args:
            device: where to communicate.
        """
        several = [ranks for ranks in self.dimensions if ranks.size > 1]
        if len(several) < 2:
            return several[0].group if several else None
        members = [dist.get_rank()]
        for ranks in several:
            members = [each for theirs in all_gather_object(members, ranks, device) for each in theirs]
        backend = dist.get_backend(several[0].group)
        return dist.new_group(sorted(members), backend=backend, use_local_synchronization=True)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one in all dimensions."""
        return all(ranks.rank == 0 for ranks in self.dimensions)

    @staticmethod
    def of(
        process_group: dist.ProcessGroup | None,
        mesh: DeviceMesh | None,
        shard: bool,
        tp_group: dist.ProcessGroup | None = None,
    ) -> Grid:
        """Resolves the constructor's arguments.

        `mesh` is 1-D (shard) or 2-D (replicate, shard).  With neither argument it is the default process
        group, or one rank where torch.distributed is not initialised.  `shard=False` replicates over all.

        Raises:
            ValueError: for both a mesh and a process group, or a mesh of another number of dimensions; if
                other ranks are in tp_group and data-parallel, too.
        """
        if isinstance(process_group, DeviceMesh):
            raise TypeError("process_group is a DeviceMesh; pass it as mesh=")
        if isinstance(tp_group, DeviceMesh):
            raise TypeError("tp_group is a DeviceMesh; pass its process group, mesh['tp'].get_group()")
        shard_ranks, replicate_ranks = _data_parallel(process_group, mesh, shard)
        grid = Grid(shard_ranks, replicate_ranks, Ranks.of(tp_group))
        grid.tensor.require_apart(shard_ranks)
        grid.tensor.require_apart(replicate_ranks)
        return grid


def _data_parallel(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, shard: bool
) -> tuple[Ranks, Ranks]:
    """The ranks to shard over, and those to replicate over."""
    if mesh is not None and process_group is not None:
        raise ValueError("pass either process_group or mesh, not both: a mesh brings its own groups")
    if mesh is not None and mesh.ndim == 2:
        if not shard:
            raise ValueError("shard=False replicates over one group; pass a 1-D mesh, not (replicate, shard)")
        return Ranks.of(mesh.get_group(1)), Ranks.of(mesh.get_group(0))
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(f"mesh has {mesh.ndim} dimensions; pass (shard,) or (replicate, shard)")
        process_group = mesh.get_group()
    every = Ranks.of(default_group() if process_group is None else process_group)
    return (every, ALONE) if shard else (ALONE, every)


class Lane:
    """A CUDA stream beside the compute stream; on CPU the calling thread itself, where all is in order.

    A lane's work starts after the compute stream's work so far (`after_compute`), and the compute stream
    waits for the lane's event before it uses or frees what the lane touched.  So memory may be allocated on
    either stream and freed on the other, nothing needs `record_stream`, and the host never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def after_compute(self) -> AbstractContextManager[Any]:
        """Kernels inside run on this lane, after everything the compute stream was given before this call."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Makes the host wait for the lane's work so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> torch.cuda.Event | None:
        """An event after the lane's work so far."""
        return None if self._stream is None else self._stream.record_event()


def compute_waits_for(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Makes the device's current stream, not the host, wait; the current device may be another one."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


ABORT_SECONDS = 10.0
"""How long the main thread waits for NCCL to end what is under way."""


def indexed(device: torch.device) -> torch.device:
    """The device with its number: without one, the current one is meant."""
    is_open = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_open else device


def uses_nccl(ranks: Ranks, device: torch.device) -> bool:
    """Whether collectives over these ranks, of tensors on `device`, are NCCL's."""
    return ranks.group is not None and ranks.group._get_backend(device).name() == "nccl"


def one_launch(ranks: Ranks, collectives: int) -> AbstractContextManager[None]:
    """Collectives of one kind inside become one launch with NCCL; gloo does one after the other."""
    if collectives < 2 or ranks.group is None or str(dist.get_backend(ranks.group)) != "nccl":
        return nullcontext()
    return dist._coalescing_manager(ranks.group)


def abort(communicators: Iterable[Ranks], device: torch.device) -> None:
    """Ends what is under way over these ranks with NCCL; nobody can use their process groups any more.

    All at once: NCCL gives memory back, for which CUDA waits for all kernels, another communicator's, too.
    """
    aborts = [ranks.group._get_backend(device).abort for ranks in communicators if ranks.group is not None]
    threads = [threading.Thread(target=each, daemon=True) for each in aborts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def on_gpu(pinned: Tensor, device: torch.device) -> Tensor:
    """The same memory, of the host, as a tensor on `device`; int64, contiguous.

    NCCL reads and writes there, so that the host sees what arrives without waiting for the device.

    Raises:
        RuntimeError: if it would be a copy.
    """
    alias = torch.as_tensor(_CudaArray(pinned), device=device)
    if alias.data_ptr() != pinned.data_ptr():
        raise RuntimeError(
            f"pinned host memory is not addressable on {device}, where collectives say what they are for; "
            "pass check_collectives=False to FlatFSDP"
        )
    return alias


class _CudaArray:
    """Numba's protocol: PyTorch asks the driver what memory it is."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "<i8",
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def all_gather(full: Tensor, shard: Tensor, ranks: Ranks) -> None:
    """full[r * len(shard) : (r + 1) * len(shard)] = rank r's shard, both 1-D and of one dtype."""
    # As bytes: gloo knows no FP8, and one launch gathers several dtypes.
    _all_gather(full.view(torch.uint8), shard.view(torch.uint8), group=ranks.group)


def all_gather_numbers(everyones: Tensor, own: Tensor, ranks: Ranks) -> None:
    """As `all_gather`, of int64, which no backend has to take for bytes."""
    _all_gather(everyones, own, group=ranks.group)


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that a collective may still be writing."""

    tensor: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The tensor, for which the compute stream waits (with gloo, the host)."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def start_all_gather(part: Tensor, ranks: Ranks) -> Pending:
    """Every rank's `part`, contiguous and of one shape, along dimension 0, in rank order."""
    whole = part.new_empty(part.shape[0] * ranks.size, *part.shape[1:])
    if whole.numel() == 0:
        return Pending(whole, None)
    # As bytes: gloo knows no FP8.
    work = _all_gather(whole.view(torch.uint8), part.view(torch.uint8), group=ranks.group, async_op=True)
    return Pending(whole, work)


def start_reduce_scatter(addend: Tensor, ranks: Ranks) -> Pending:
    """This rank's part, along dimension 0, of the sum over the ranks; `addend` is contiguous."""
    part = addend.new_empty(addend.shape[0] // ranks.size, *addend.shape[1:])
    if part.numel() == 0:
        return Pending(part, None)
    return Pending(part, _reduce_scatter(part, addend, group=ranks.group, async_op=True))


def start_all_reduce(addend: Tensor, ranks: Ranks) -> Pending:
    """In place: the sum over the ranks."""
    if addend.numel() == 0:
        return Pending(addend, None)
    return Pending(addend, dist.all_reduce(addend, group=ranks.group, async_op=True))


def gather(full: Tensor | None, shard: Tensor, ranks: Ranks) -> None:
    """As `all_gather`, on the first rank only; the others pass None."""
    parts = None if full is None else list(full.chunk(ranks.size))
    dist.gather(shard, parts, group=ranks.group, group_dst=0)


def scatter(shard: Tensor, full: Tensor | None, ranks: Ranks) -> None:
    """The reverse of `gather`: shard = this rank's part of the first rank's `full`."""
    if ranks.size == 1:
        assert full is not None
        shard.copy_(full)
        return
    parts = None if full is None else list(full.chunk(ranks.size))
    dist.scatter(shard, parts, group=ranks.group, group_src=0)


def reduce_scatter(shard: Tensor, full: Tensor, ranks: Ranks, *, mean: bool) -> None:
    """shard = this rank's part of the sum, or mean, of `full` over the ranks."""
    _reduce_scatter(shard, full, op=_operation(mean), group=ranks.group)


def all_reduce(tensor: Tensor, ranks: Ranks, *, mean: bool) -> None:
    """In place: the sum, or mean, of `tensor` over the ranks."""
    dist.all_reduce(tensor, op=_operation(mean), group=ranks.group)


def raise_to_largest(amax: Tensor, ranks: Ranks) -> None:
    """In place: the largest over the ranks of numbers that are not negative, FP32; NaN wins."""
    # As integers, because the order of the bits puts NaN above infinity on every backend.
    dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=ranks.group)


def _operation(mean: bool) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM


def broadcast(tensor: Tensor, ranks: Ranks) -> None:
    """In place: the tensor of the group's first rank."""
    if ranks.size > 1:
        dist.broadcast(tensor, group=ranks.group, group_src=0)


def broadcast_object(value: Any, dimensions: Sequence[Ranks], device: torch.device) -> Any:
    """What the first rank of a grid of these dimensions passes, which has to be picklable.  Collective."""
    box = [value]
    with on_device(device):
        # Along the first rank's line, then from each rank of that.
        for ranks in dimensions:
            if ranks.size > 1:
                dist.broadcast_object_list(box, group=ranks.group, group_src=0)
    return box[0]


def all_gather_object(value: Any, ranks: Ranks, device: torch.device) -> list[Any]:
    """What each rank passes, which has to be picklable, in rank order."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    with on_device(device):
        dist.all_gather_object(found, value, group=ranks.group)
    return found


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes `device` the current one: collectives of Python objects travel through that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
