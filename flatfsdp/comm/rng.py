"""Random numbers that do not depend on a layer's rank or position: for initial values, and for dropout.

In:   torch's default generators, of the CPU and of the current CUDA device.
Out:  `seeded`: values that depend on a seed and names alone, however many layers were built before;
      `RNGTracker`: numbers that differ between tensor-parallel ranks, amid numbers that are the same on all.

Neither keeps a state, so code that saves and restores torch's generators, such as torch.utils.checkpoint,
gets the same numbers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flatfsdp.comm.ranks import Ranks

CUDA_STEP = 4
"""Step by which a CUDA generator advances; its offsets are multiples of 4."""


@contextmanager
def seeded(seed: int, *names: str) -> Iterator[None]:
    """Context in which the default generators start from `seed` and `names`; restored afterwards.

        with seeded(0, f"layers.{number}"):
            layer = TransformerLayer(...)

    A layer then starts with the same values in every pipeline stage that has it.
    """
    key = _hash(seed, *names)
    with _reseeded(key, _cuda_generator(initialize=True), key):
        yield


class Tracker(Protocol):
    """Interface for random numbers that differ between tensor-parallel ranks, such as `RNGTracker`."""

    def fork(self) -> AbstractContextManager[Any]:
        """Context in which this rank draws numbers of its own."""


GetTracker = Callable[[], Tracker]


class RNGTracker:
    """Draws other random numbers on each tensor-parallel rank, for tensors that each has a part of.

        with tracker.fork():
            context = attention(query, key, value)  # other heads on each rank, and other dropout

    Seed the default generators alike on all ranks.  Outside of `fork` they stay alike, for dropout of tensors
    that all ranks have.

    Args:
        tp_group: tensor-parallel ranks; with a single one, or None, `fork` does nothing.
    """

    def __init__(self, tp_group: dist.ProcessGroup | None = None) -> None:
        self._ranks = Ranks.of(tp_group)

    @classmethod
    def over(cls, ranks: Ranks) -> RNGTracker:
        """Makes a tracker of ranks that may get their group later."""
        tracker = cls()
        tracker._ranks = ranks
        return tracker

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Context in which the default generators differ from rank to rank.

        Afterwards they have advanced by one step, whatever was drawn inside.  The host never waits for a GPU.
        """
        if self._ranks.size == 1:
            yield
            return
        # This draw is both the common part of the seed and the step by which the generator advances, on all
        # ranks alike.  The state to go back to is the one after it.
        common = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        cuda, rank = _cuda_generator(initialize=False), self._ranks.rank
        # Nothing is drawn on the GPU, which the host would wait for: seed and offset, known to the host, take
        # the place of a draw.
        key = 0 if cuda is None else _hash(cuda.initial_seed(), cuda.get_offset(), rank)
        with _reseeded(_hash(common, rank), cuda, key, step=CUDA_STEP):
            yield


@contextmanager
def _reseeded(
    cpu_seed: int, cuda: torch.Generator | None, cuda_seed: int, *, step: int = 0
) -> Iterator[None]:
    """Context whose generators start from these seeds; afterwards that of CUDA has advanced by `step`."""
    cpu = torch.default_generator
    cpu_state = cpu.get_state()
    before = None if cuda is None else (cuda.initial_seed(), cuda.get_offset())
    cpu.manual_seed(cpu_seed)
    if cuda is not None:
        cuda.manual_seed(cuda_seed)
    try:
        yield
    finally:
        cpu.set_state(cpu_state)
        if cuda is not None and before is not None:
            # Without the tensor copies of `get_state` and `set_state`.
            cuda.manual_seed(before[0])
            cuda.set_offset(before[1] + step)


def _cuda_generator(*, initialize: bool) -> torch.Generator | None:
    """Generator of the current CUDA device; None if there is none, or if CUDA has not been used yet.

    Args:
        initialize: initialise CUDA if needed, because the code that follows may use it.
    """
    if initialize and torch.cuda.is_available():
        torch.cuda.init()
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _hash(*parts: int | str) -> int:
    """Hash from 0 to 2^63 - 1, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
