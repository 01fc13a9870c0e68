"""Bytes that tensors on the meta device would take, as PyTorch's allocator on a GPU counts them.

In:   the results of each operator, by `observer.py`.
Out:  what was held, and for what, at the fullest moment of each part of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from weakref import ref

from torch import Tensor, UntypedStorage

BLOCK = 512
"""PyTorch's allocator on GPUs hands out multiples of so many bytes."""


class Allocation:
    """Memory of one storage.

    Attributes:
        label: what it is for; it may be found out later than the memory.
    """

    __slots__ = ("label", "nbytes")

    def __init__(self, nbytes: int, label: Hashable) -> None:
        self.nbytes = nbytes
        self.label = label


def key_of(tensor: Tensor) -> int:
    """Address of the storage object: tensors in one memory have the same, as long as it lives."""
    return tensor.untyped_storage()._cdata


def allocated(nbytes: int) -> int:
    """Bytes that the allocator takes for so many, in whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class LiveMemory:
    """Counts storages from the operator that returns them to the end of their last tensor.

    Attributes:
        part: the part of a step that runs now; whoever knows sets it.
    """

    def __init__(self) -> None:
        self.part: Hashable = None
        self._found: dict[int, tuple[ref[UntypedStorage], Allocation]] = {}
        self._watched: dict[int, tuple[UntypedStorage, Allocation]] = {}
        self._changes: list[tuple[Allocation, int]] = []
        self._moments: list[tuple[Hashable, int]] = []

    @property
    def live(self) -> int:
        """Bytes that are allocated now."""
        self._look()
        return sum(each.nbytes for _, each in (*self._found.values(), *self._watched.values()))

    def begin(self) -> None:
        """Forgets what was held before."""
        self._look()
        now = (each for _, each in (*self._found.values(), *self._watched.values()))
        self._changes = [(allocation, allocation.nbytes) for allocation in now]
        self._moments = []

    def watch(self, label: Hashable, tensors: Iterable[Tensor]) -> None:
        """From now on, follows the memory of these, which comes and goes while they stay."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._end(storage._cdata, None)
            self._watched[storage._cdata] = storage, Allocation(0, label)

    def see(self, tensors: Sequence[Tensor], label: Hashable) -> None:
        """Books what these tensors hold and nobody has seen, and notes the moment."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._found and key not in self._watched:
                allocation = Allocation(allocated(storage.nbytes()), label)
                self._found[key] = ref(storage, partial(self._end, key)), allocation
                self._changes.append((allocation, allocation.nbytes))
        self.note(self.part)

    def note(self, part: Hashable) -> None:
        """Notes this moment as one of a part of the step."""
        self._look()
        self._moments.append((part, len(self._changes)))

    def name(self, tensor: Tensor, use: str) -> None:
        """Says what the memory of a tensor is for now; and since it was allocated, if nobody has said yet."""
        storage, allocation = self._found.get(key_of(tensor), (None, None))
        if storage is None or allocation is None or allocation.label == use:
            return
        if not isinstance(allocation.label, str):
            allocation.label = use
            return
        now = Allocation(allocation.nbytes, use)
        self._found[key_of(tensor)] = storage, now
        self._changes += [(allocation, -now.nbytes), (now, now.nbytes)]

    def fullest(self) -> dict[Hashable, Counter[Hashable]]:
        """Bytes by label at the fullest moment of each part of what ran since `begin`."""
        totals = list(accumulate((change for _, change in self._changes), initial=0))
        best: dict[Hashable, int] = {}
        for part, moment in self._moments:
            if part not in best or totals[moment] > totals[best[part]]:
                best[part] = moment
        found: dict[Hashable, Counter[Hashable]] = {}
        held: Counter[Hashable] = Counter()
        done = 0
        for part, moment in sorted(best.items(), key=itemgetter(1)):
            for allocation, change in self._changes[done:moment]:
                held[allocation.label] += change
            done = moment
            found[part] = +held
        return found

    def _look(self) -> None:
        """Whether memory of those that are watched has come or gone."""
        for storage, allocation in self._watched.values():
            nbytes = allocated(storage.nbytes())
            if nbytes != allocation.nbytes:
                self._changes.append((allocation, nbytes - allocation.nbytes))
                allocation.nbytes = nbytes

    def _end(self, key: int, _: object) -> None:
        if key in self._found:
            allocation = self._found.pop(key)[1]
            self._changes.append((allocation, -allocation.nbytes))
