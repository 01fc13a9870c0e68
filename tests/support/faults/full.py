"""Disks that are full: a save raises on all ranks, and what was there before is still there."""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from flatfsdp.checkpoint import CheckpointError
from tests.support.faults.operations import watched
from tests.support.faults.training import WAYS, Run, left_behind
from tests.support.ranks import Pool


def save_on_a_full_disk(rank: int, world_size: int, folder: Path, victim: int, writes: int) -> str:
    """What is wrong with a save over an old one, for which one rank finds no room; "" if nothing is.

    Args:
        writes: that succeed on that rank.
    """
    run = Run()
    run.train()
    before = run.digest()
    WAYS["plain"].save(run, folder)
    run.train()
    done = 0

    def event(name: str) -> None:
        nonlocal done
        if name.startswith("half"):
            done += 1
            if rank == victim and done > writes:
                raise OSError(errno.ENOSPC, "No space left on device")

    try:
        with watched(folder, event):
            WAYS["plain"].save(run, folder)
    except CheckpointError as error:
        if f"rank {victim}" not in str(error) or "No space left" not in str(error):
            return f"does not name rank and reason: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "saves without a word"
    other = Run(seed=1)
    other.load(folder)
    if other.digest() != before:
        return "the old checkpoint is not what it was"
    # There is room again.
    WAYS["plain"].save(run, folder)
    dist.barrier()
    return f"left behind: {left_behind(folder)}" if left_behind(folder) else ""


def random_full_disks(count: int, seed: int, world_size: int = 2) -> Iterator[list[str]]:
    """What was wrong so far, after each trial."""
    chance = random.Random(seed)
    wrong: list[str] = []
    pool = Pool(world_size, "gloo", 20.0)
    for _ in range(count):
        victim, writes = chance.randrange(world_size), chance.randrange(3)
        with tempfile.TemporaryDirectory(prefix="flatfsdp-faults-") as folder:
            arguments = (Path(folder) / "checkpoint", victim, writes)
            for said in sorted(set(pool.run(save_on_a_full_disk, arguments, 60.0)) - {""}):
                wrong.append(f"a full disk of rank {victim} after {writes} writes: {said}")
        yield wrong
    pool.stop()
