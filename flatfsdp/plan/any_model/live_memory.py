"""Bytes that tensors on the meta device would take, as PyTorch's allocator on a GPU counts them.

In:   the results of each operator, by `observer.py`.
Out:  what is allocated now and at most, and what of it was allocated where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import ref

from torch import Tensor, UntypedStorage

from flatfsdp.plan.any_model.places import StepPlace

BLOCK = 512
"""PyTorch's allocator on GPUs hands out multiples of so many bytes."""


class Allocation(NamedTuple):
    """Memory that is there now.

    Attributes:
        key: of its storage, see `key_of`.
    """

    key: int
    nbytes: int
    place: StepPlace


def key_of(tensor: Tensor) -> int:
    """Address of the storage object: tensors in one memory have the same, as long as it lives."""
    return tensor.untyped_storage()._cdata


def allocated(nbytes: int) -> int:
    """Bytes that the allocator takes for so many, in whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class LiveMemory:
    """Counts storages from the operator that returns them to the end of their last tensor.

    Attributes:
        peak: the largest that `live` has been since `begin`.
        peak_at: which call of `see` that was.
    """

    def __init__(self) -> None:
        self._live = self.peak = 0
        self.peak_at = -1
        self._calls = 0
        self._found: dict[int, tuple[ref[UntypedStorage], Allocation]] = {}
        self._come_and_go: list[tuple[UntypedStorage, int]] = []
        self._watched: set[int] = set()
        self._at: tuple[int, Callable[[], None]] | None = None

    @property
    def live(self) -> int:
        """Bytes that are allocated now."""
        self._look()
        return self._live

    def begin(self, at: int = -1, call: Callable[[], None] = lambda: None) -> None:
        """Looks for a new peak, from now on.

        Args:
            call: is called when `see` has been called `at` times more, if that is not negative.
        """
        self.peak, self.peak_at, self._calls = self.live, -1, 0
        self._at = (at, call)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """From now on, follows the memory of these, which comes and goes while they stay."""
        self._live -= sum(held for _, held in self._come_and_go)
        storages = [tensor.untyped_storage() for tensor in tensors]
        for storage in storages:
            self._forget(storage._cdata)
        self._come_and_go = [(storage, 0) for storage in storages]
        self._watched = {storage._cdata for storage in storages}
        self._look()

    def see(self, tensors: Sequence[Tensor], place: StepPlace) -> None:
        """Books what these tensors hold and nobody has seen."""
        self._look()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._found and key not in self._watched:
                allocation = Allocation(key, allocated(storage.nbytes()), place)
                self._found[key] = ref(storage, partial(self._end, key)), allocation
                self._live += allocation.nbytes
        if self._live > self.peak:
            self.peak, self.peak_at = self._live, self._calls
        if self._at is not None and self._calls == self._at[0]:
            self._at[1]()
        self._calls += 1

    def allocations(self) -> list[Allocation]:
        """All that is there, but for what is watched."""
        return [allocation for _, allocation in self._found.values()]

    def _look(self) -> None:
        """Whether memory of those that are watched has come or gone."""
        for index, (storage, held) in enumerate(self._come_and_go):
            nbytes = allocated(storage.nbytes())
            if nbytes != held:
                self._come_and_go[index] = storage, nbytes
                self._live += nbytes - held

    def _end(self, key: int, _: object) -> None:
        self._forget(key)

    def _forget(self, key: int) -> None:
        if key in self._found:
            self._live -= self._found.pop(key)[1].nbytes
