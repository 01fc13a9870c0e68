"""Recorded microbatches that restore the state of the random generator, as activation checkpointing does.

In:   an eager microbatch, which may save the generator's state and restore it (`preserve_rng_state=True` of
      `torch.utils.checkpoint`, `torch.random.fork_rng`).
Out:  the same random numbers in a recording, although a capture forbids both.
Next: `graphs.py` records with it.

An eager microbatch tells how far the generator has got at each restore.  In a recording each restore begins a
state of its own, and before a replay all of them are put where the eager generator would be:

    eager      0 --draws--> 8 (saved) --draws--> 20 --restored--> 8 --draws--> 20 --restored--> 20 ...
    recorded   the generator's own state ----------> first, at 8 -----------> second, at 20 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flatfsdp.torch_private import random_states_by


@dataclass
class RandomMoves:
    """What a microbatch has done to the random state of its device.

    Attributes:
        restored: distance from the beginning of the microbatch after each restore.
        end: distance at its end.
        draws: whether it has drawn random numbers.
        reseeds: whether it has set a seed, or restored a state of another one, which no recording follows.
    """

    restored: list[int] = field(default_factory=list)
    end: int = 0
    draws: bool = False
    reseeds: bool = False


@contextmanager
def watched(generator: torch.Generator) -> Iterator[RandomMoves]:
    """Context of an eager microbatch; tells what it does to the generator's state."""
    moves = RandomMoves()
    begin, seed = generator.get_offset(), generator.initial_seed()

    def restore(state: Tensor) -> None:
        moves.draws |= generator.get_offset() - begin != moves.end
        generator.set_state(state)
        moves.end = generator.get_offset() - begin
        moves.reseeds |= generator.initial_seed() != seed
        moves.restored.append(moves.end)

    def reseeded() -> None:
        moves.reseeds = True

    with random_states_by(generator, generator.get_state, restore, reseeded):
        yield moves
    end = generator.get_offset() - begin
    moves.draws |= end != moves.end
    moves.end = end


class RecordedRandomStates:
    """States of the generator in one recording.

    Args:
        generator: the device's default generator, which the microbatch draws from.
        moves: what an eager microbatch of this kind does to its state.
    """

    def __init__(self, generator: torch.Generator, moves: RandomMoves) -> None:
        self._generator, self._moves = generator, moves
        # Where nothing is drawn, there is no state to restore.
        restored = moves.restored if moves.draws else []
        self.states: Sequence[torch.Generator] = [torch.Generator(generator.device) for _ in restored]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of the recording.

        Raises:
            RuntimeError: if it does not restore as often as the eager microbatch.
        """
        own, restores = self._generator.graphsafe_get_state(), 0

        def restore(_state: Tensor) -> None:
            nonlocal restores
            if restores < len(self.states):
                self._generator.graphsafe_set_state(self.states[restores])
            restores += 1

        try:
            # A saved state is not looked at: which one is restored is known from the eager microbatch.
            nothing = partial(torch.empty, 0, dtype=torch.uint8)
            with random_states_by(self._generator, nothing, restore, lambda: None):
                yield
        finally:
            self._generator.graphsafe_set_state(own)
        if restores != len(self._moves.restored):
            raise RuntimeError(
                f"it has restored the random state {restores} times, where an eager microbatch did so "
                f"{len(self._moves.restored)} times"
            )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Context of a replay, which leaves the generator where an eager microbatch would."""
        if not self.states:
            yield
            return
        begin, seed = self._generator.get_offset(), self._generator.initial_seed()
        for state, distance in zip(self.states, self._moves.restored, strict=True):
            state.manual_seed(seed)
            state.set_offset(begin + distance)
        yield
        self._generator.set_offset(begin + self._moves.end)
