"""`Ranks`: a process group and this process's place in it, held so that the group can end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.distributed as dist

# Import it early: every optimizer does, and its default arguments then keep the default group, if there is
# one, for good; see `Ranks`.
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.torch_private import call_before_shutdown, new_group, timeout_of


@dataclass(frozen=True, init=False)
class Ranks:
    """One process group and this process's place in it; `group` None is a world of one."""

    _group: ReferenceType[dist.ProcessGroup] | None
    size: int
    rank: int

    def __init__(self, group: dist.ProcessGroup | None, size: int, rank: int) -> None:
        # Weak: a model may be alive when the program ends.  If it kept its group, the group would outlive
        # destroy_process_group(), and gloo's threads, which may still hold tensors, would outlive the
        # interpreter and abort the process.
        weak = None if group is None else ref(group)
        hash(weak)  # a weak reference keeps its hash: ranks stay usable as keys once the group is gone
        vars(self).update(_group=weak, size=size, rank=rank)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for a world of one.

        Raises:
            RuntimeError: once it is destroyed.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of a model or layer is gone; destroy it after its last use")
        return group

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Ranks:
        """This process's place in `group`.

        Raises:
            TypeError: for something else, such as a DeviceMesh.
            ValueError: for a group that this rank is not in.
        """
        if isinstance(group, DeviceMesh):
            raise TypeError("a process group is needed, not a DeviceMesh; pass mesh['tp'].get_group()")
        if group is None:
            return Ranks(None, 1, 0)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the process group that it passes; pass its own")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"a process group is needed, not {group!r}; pass what dist.new_group returns")
        return Ranks(group, dist.get_world_size(group), dist.get_rank(group))

    @staticmethod
    def among(global_ranks: tuple[int, ...]) -> Ranks:
        """This process's place among ranks given by their numbers in the default process group.

        Collective over these ranks, the first time.
        """
        everyone = default_group()
        assert everyone is not None
        # By default group: if a program ends it and makes a new one, the numbers mean other ranks.
        known = _by_numbers.setdefault(everyone, {})
        if global_ranks not in known:
            known[global_ranks] = new_group(global_ranks, "by numbers", timeout=timeout_of(everyone))
        return Ranks.of(known[global_ranks])

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Returns itself: the same ranks share a copied layer."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Refuses to be pickled with a group.

        Raises:
            TypeError: if they are pickled, for ranks of a group.
        """
        if vars(self).get("_group") is not None:
            raise TypeError("process groups cannot be pickled; save state_dict(), and build the layer anew")
        return vars(self)

    @property
    def name(self) -> str:
        """Name of the process group, the same on all its ranks; empty for a world of one."""
        return "" if self.group is None else self.group.group_name

    @property
    def global_ranks(self) -> list[int]:
        """Numbers of these ranks in the default process group."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def span_hosts(self) -> bool:
        """Whether they are on several hosts, by what torchrun has told them; without it they are on one."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
        return local > 0 and len({rank // local for rank in self.global_ranks}) > 1

    def require_apart(self, data_parallel: Ranks) -> None:
        """Checks that these ranks and the data-parallel ones have only this rank in common.

        Raises:
            ValueError: if they share another one.
        """
        both = sorted(set(self.global_ranks) & set(data_parallel.global_ranks))
        if len(both) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, both))} are in tp_group and in the group that FlatFSDP shards or "
                "replicates over; pass mesh= of the data-parallel ranks"
            )

    def own_communicator(self) -> Ranks:
        """The same ranks over a second communicator, so that two collectives can be under way at once.

        Collective over these ranks, the first time.
        """
        if self.group is None or self.size == 1:
            return self
        if self.group not in _second_communicators:
            _second_communicators[self.group] = _SecondCommunicator(self)
        return _second_communicators[self.group].ranks

    def first_communicator(self) -> Ranks:
        """The communicator that `own_communicator` made this one from; this one, if it made none."""
        return self if self.group is None else _first_communicators.get(self.group, self)


class _SecondCommunicator:
    """A communicator beside another one, destroyed just before that one.

    It is not destroyed when the other is garbage-collected: that happens at another time on each rank, and
    with NCCL ranks wait for each other when a communicator ends.
    """

    def __init__(self, first: Ranks) -> None:
        group, everyone = first.group, default_group()
        assert group is not None and everyone is not None
        made, ranks = _second_ones_made.setdefault(everyone, Counter()), tuple(first.global_ranks)
        made[ranks] += 1
        self._group: dist.ProcessGroup | None = new_group(
            ranks,
            # Named by a count, as all these ranks come here.  The group's own name may differ between ranks
            # if NCCL has split it off another one.
            f"second {made[ranks]}",
            backend=dist.get_backend(group),
            timeout=timeout_of(group),
        )
        self.ranks = Ranks(self._group, first.size, first.rank)
        _first_communicators[self._group] = first
        call_before_shutdown(group, self._destroy, also_at_exit=False)
        call_before_shutdown(self._group, self._forget, also_at_exit=False)

    def _destroy(self) -> None:
        if self._group is not None:  # otherwise all groups are being destroyed
            dist.destroy_process_group(self._group)

    def _forget(self) -> None:
        self._group = None


_second_communicators: WeakKeyDictionary[dist.ProcessGroup, _SecondCommunicator] = WeakKeyDictionary()
"""Shared by all models over a group: NCCL takes seconds and hundreds of megabytes to make one, and frees none
before the group is destroyed."""


_second_ones_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many second communicators each default group has had, by their ranks."""

_first_communicators: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()

_by_numbers = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]()
"""Groups that `Ranks.among` has made, by default group."""


ALONE = Ranks(None, 1, 0)


def several(dimensions: Iterable[Ranks]) -> list[Ranks]:
    """Those with more than one rank, each once."""
    return [ranks for ranks in dict.fromkeys(dimensions) if ranks.size > 1]


def default_group() -> dist.ProcessGroup | None:
    """Default process group, of all ranks; None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class LateRanks(Ranks):
    """Ranks of which only the number is known until a layer is given their group.

    Raises:
        RuntimeError: when group or rank are read before.
    """

    def __init__(self, layer: str, size: int) -> None:
        # Through `vars`, as the class is frozen; only `find` changes it.
        vars(self).update(size=size, _layer=layer, _found=None)

    @property
    def found(self) -> Ranks | None:
        """The ranks, if they are known by now; otherwise None."""
        found: Ranks | None = vars(self)["_found"]
        return found

    @property
    def _group(self) -> ReferenceType[dist.ProcessGroup] | None:
        return self._required()._group

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self._required().rank

    def _required(self) -> Ranks:
        if self.found is None:
            raise RuntimeError(
                f"{vars(self)['_layer']}: tp_size is {self.size}, of no group; call set_tensor_parallel_group"
            )
        return self.found

    def find(self, ranks: Ranks) -> None:
        """Sets the ranks."""
        vars(self)["_found"] = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> LateRanks:
        """Copies as unknown ranks: a copied layer is given its own group."""
        other = memo[id(self)] = LateRanks(vars(self)["_layer"], self.size)
        vars(other).update(vars(self))
        return other
