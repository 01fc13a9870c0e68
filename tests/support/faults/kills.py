"""Kills ranks while they save: afterwards the old checkpoint or the new one is there, whole.

In:   where a save is killed: after which operation on a file, or after how many seconds, and on which ranks.
Out:  a `Count` of what fresh ranks could load then.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from flatfsdp.checkpoint import DamagedCheckpoint
from tests.support.faults.operations import watched
from tests.support.faults.training import WAYS, Run
from tests.support.ranks import Pool, RankFailure

ALL = -1
"""In place of a rank: every rank."""


class Kill(NamedTuple):
    """One save that is killed.

    Attributes:
        way: which of `WAYS` to save.
        is_same_folder: whether the old checkpoint is overwritten, or another folder is written to.
        victim: the rank that is killed, or `ALL`: the first rank's operations count then.
        after: so many of its operations.
        slow: a rank whose writes take longer, if any.
    """

    way: str
    is_same_folder: bool
    victim: int
    after: int
    slow: int | None = None


@dataclass
class Count:
    """What could be loaded after faults.

    Attributes:
        wrong: each trial that was not as it has to be, with what was found.
    """

    tried: int = 0
    old: int = 0
    new: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.tried} kills: {self.old} load the old, {self.new} the new, {len(self.wrong)} wrong"


def old_and_new(folder: Path, is_same_folder: bool) -> tuple[Path, Path]:
    return folder / "old", folder / ("old" if is_same_folder else "new")


def _saves(
    rank: int, world_size: int, folder: Path, kill: Kill | None, plan: Kill
) -> tuple[list[str], list[str]]:
    """Saves twice; returns all operations of this rank in the second save, and both digests.

    Args:
        kill: None to do without.
        plan: how to save.
    """
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    old, new = old_and_new(folder, plan.is_same_folder)
    events: list[str] = []
    lead = 0 if kill is None or kill.victim == ALL else kill.victim

    def event(name: str) -> None:
        events.append(name)
        if kill is not None and rank == lead and len(events) == kill.after:
            others = [pid for pid in pids if pid != os.getpid()] if kill.victim == ALL else []
            for pid in [*others, os.getpid()]:
                os.kill(pid, signal.SIGKILL)
        if rank == plan.slow and name.startswith("half"):
            time.sleep(0.002)

    run, way = Run(), WAYS[plan.way]
    run.train()
    digests = [run.digest()]
    way.save(run, old)
    if way.end is not None:
        way.end(run)
    run.train()
    digests.append(run.digest())
    with watched(folder, event):
        way.save(run, new)
        if way.end is not None:
            # Nothing of this step may get into what is being written.
            run.train()
            way.end(run)
    return events, digests


def load_newest(rank: int, world_size: int, way: str, folders: list[Path]) -> tuple[str, list[str]]:
    """A digest of what the last folder holds that can be loaded; and what is left there after a save.

    The next save to the last folder has to succeed, and leaves nothing there but itself.
    """
    digest, next_step = "nothing", 0
    for folder in reversed(folders):
        run = Run(seed=1)
        try:
            WAYS[way].load(run, folder)
        except (DamagedCheckpoint, FileNotFoundError):
            continue
        digest, next_step = run.digest(), run.step + 1
        break
    run, to_save = Run(), WAYS["manager" if way == "resume" else way]
    run.step = next_step
    to_save.save(run, folders[-1])
    if to_save.end is not None:
        to_save.end(run)
    dist.barrier()
    return digest, WAYS[way].left(folders[-1])


class Kills:
    """Kills saves, one after the other, and counts.

    Args:
        world_size: of the ranks that save, and of those that load.
    """

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.count = Count()
        self._loaders = Pool(world_size, "gloo", 20.0)

    def __enter__(self) -> Kills:
        return self

    def __exit__(self, *_: object) -> None:
        self._loaders.stop()

    def operations(self, plan: Kill) -> tuple[list[list[str]], list[str]]:
        """All operations of each rank in a save that is not killed; the digests of the old and the new."""
        with tempfile.TemporaryDirectory(prefix="flatfsdp-faults-") as folder:
            found = self._run_once(plan, None, Path(folder))
        assert found is not None
        return [events for events, _ in found], found[0][1]

    def kill(self, kill: Kill, digests: list[str]) -> None:
        """One trial.

        Args:
            digests: of the old and the new state.
        """
        with tempfile.TemporaryDirectory(prefix="flatfsdp-faults-") as name:
            folder = Path(name)
            self._run_once(kill, kill, folder)
            folders = list(dict.fromkeys(old_and_new(folder, kill.is_same_folder)))
            self.judge(str(kill), kill.way, folders, digests)

    def judge(self, what: str, way: str, folders: list[Path], digests: list[str]) -> None:
        """Counts what fresh ranks load.

        Args:
            what: was done, for messages.
            way: which of `WAYS` to load.
            digests: of the old state and the new one, or of several that are new.
        """
        self.count.tried += 1
        try:
            found = self._loaders.run(load_newest, (way, folders), 60.0)
        except RankFailure as failure:
            self.count.wrong.append(f"{what}: {failure}")
            self._loaders.stop()
            self._loaders = Pool(self.world_size, "gloo", 20.0)
            return
        of_ranks = {digest for digest, _ in found}
        left = found[0][1]
        if of_ranks == {digests[0]}:
            self.count.old += 1
        elif any(of_ranks == {digest} for digest in digests[1:]):
            self.count.new += 1
        else:
            self.count.wrong.append(f"{what}: neither the old nor the new, but {of_ranks}")
        if left:
            self.count.wrong.append(f"{what}: left behind {left}")

    def _run_once(
        self, plan: Kill, kill: Kill | None, folder: Path
    ) -> list[tuple[list[str], list[str]]] | None:
        """What each rank returns; None, if ranks were killed."""
        pool = Pool(self.world_size, "gloo", 20.0)
        try:
            return pool.run(_saves, (folder, kill, plan), 60.0)
        except RankFailure as failure:
            if kill is None or not any("died" in (error or "") for error in failure.errors):
                raise
            return None
        finally:
            pool.stop()


def enumerated(kills: Kills, plan: Kill, victims: list[int], every: int) -> Iterator[tuple[Kill, list[str]]]:
    """A kill after each operation of each victim, and the digests to expect.

    Args:
        every: of the many writes to one data file all but each such are left out.
    """
    events, digests = kills.operations(plan)
    for victim in victims:
        previous = ""
        run = 0
        for number, name in enumerate(events[max(victim, 0)], 1):
            what, _, file = name.partition(" ")
            is_write = what in ("half", "write", "flush") and file == previous
            run = run + 1 if is_write else 0
            previous = file
            if not is_write or run % every == 0:
                yield plan._replace(victim=victim, after=number), digests


# ---- at random times ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Training that saves after each step to one folder, and is killed after so many seconds.

    Attributes:
        victim: the rank that is killed, or `ALL`.
        slow: as of `Kill`.
    """

    way: str
    victim: int
    seconds: float
    slow: int | None


STEPS = 100


def _trains(rank: int, world_size: int, folder: Path, timed: Timed) -> None:
    run, way = Run(), WAYS[timed.way]
    run.train()
    way.save(run, folder / "checkpoint")
    if way.end is not None:
        way.end(run)
    dist.barrier()
    if timed.victim in (rank, ALL):
        # The system's own way to end a process: no handler of Python's.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timed.seconds)

    def event(name: str) -> None:
        if rank == timed.slow and name.startswith("half"):
            time.sleep(0.001)

    with watched(folder / "checkpoint", event):
        while run.step < STEPS:
            run.train()
            way.save(run, folder / "checkpoint")
            if rank == 0:
                # One that goes on while the run trains ends at the latest before the next one begins.
                (folder / "saving").write_text(str(run.step if way.end is None else run.step - 1))
                (folder / "saving").replace(folder / "saved")
        if way.end is not None:
            way.end(run)


def _digests(rank: int, world_size: int) -> list[str]:
    """Digests after each step, from the first on."""
    run, digests = Run(), []
    for _ in range(STEPS):
        run.train()
        digests.append(run.digest())
    return digests


def random_kills(kills: Kills, count: int, seed: int, ways: list[str]) -> Iterator[Count]:
    """Kills at random times; the count after each."""
    chance = random.Random(seed)
    digests = kills._loaders.run(_digests, (), 120.0)[0]
    for _ in range(count):
        timed = Timed(
            chance.choice(ways),
            chance.choice([ALL, *range(kills.world_size)]),
            chance.uniform(0.001, 0.4),
            chance.choice([None, *range(kills.world_size)]),
        )
        folder = Path(tempfile.mkdtemp(prefix="flatfsdp-faults-"))
        try:
            pool = Pool(kills.world_size, "gloo", 20.0)
            with suppress(RankFailure):
                pool.run(_trains, (folder, timed), 60.0)
            pool.stop()
            saved = folder / "saved"
            last = int(saved.read_text()) if saved.exists() else 1
            # The last that was complete, or the one that was being saved.  In the background that may be the
            # second one: the first has ended then, and is not noted down yet.
            newer = 1 if WAYS[timed.way].end is None else 2
            kills.judge(str(timed), timed.way, [folder / "checkpoint"], digests[last - 1 : last + newer])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        yield kills.count
