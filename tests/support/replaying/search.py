"""Random trainings, eager and replayed: the same bits, whatever happens between their steps.

CI runs some of them (`dist/engine/test_replayed.py`), on a tape; `gpu/test_replayed_at_random.py` runs 200 on
GPUs.  For more:

    python -m tests.support.replaying --examples 200 --seed 1
"""

from __future__ import annotations

import random
import time
from typing import Annotated

import typer

from tests.support.ranks import run_ranks
from tests.support.replaying.cases import CASES
from tests.support.replaying.steps import random_steps, trained
from tests.support.tape import taped

AT_ONCE = 10
"""Trainings between two lines of output."""


def replays_of(rank: int, seed: int, device: str = "cpu") -> int:
    """How many microbatches of training number `seed` were replayed.

    Raises:
        AssertionError: if its bits are not those of the same training without replays.
    """
    case, steps = random.Random(seed).choice(CASES), random_steps(seed)
    expected = trained(case, rank, False, steps, device)
    found = trained(case, rank, True, steps, device)
    assert found.has_bits_of(expected), f"training {seed}: {case}, {steps}"
    return found.step.replays


def _on_rank(rank: int, _world_size: int, first: int, last: int) -> int:
    with taped():
        return sum(replays_of(rank, seed) for seed in range(first, last))


def main(
    examples: Annotated[int, typer.Option(min=1, help="Trainings to compare.")] = 200,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Number of the first training.")] = 0,
) -> None:
    """Compare random trainings bit by bit, eager and replayed on a tape that stands for CUDA graphs.

    Stops at the first one that differs, and says which it is.

    Examples:

    python -m tests.support.replaying --examples 200 --seed 1

    python -m tests.support.replaying --examples 1 --seed 17
    """
    began, replays = time.monotonic(), 0
    for first in range(seed, seed + examples, AT_ONCE):
        last = min(first + AT_ONCE, seed + examples)
        replays += run_ranks(ranks, _on_rank, first, last, timeout=600.0)[0]
        seconds = time.monotonic() - began
        print(f"{last - seed} equal, {replays} microbatches replayed ({seconds:.0f} s)", flush=True)
