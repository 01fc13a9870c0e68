"""Files that are damaged after the save: each load names the file, and leaves the model as it is.

In:   a checkpoint, what is to happen to which of its files, and a seed.
Out:  what each rank's load said, if it is not what it has to say.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flatfsdp.checkpoint import DamagedCheckpoint
from flatfsdp.checkpoint.manifest import COORDINATOR
from tests.support.faults.training import WAYS, Run
from tests.support.ranks import Pool

PAGE = 4096
KINDS = ("flipped bit", "zeroed page", "truncated", "another save's", "another rank's", "missing")


def inflict(kind: str, file: Path, chance: random.Random, others: Path) -> bool:
    """Damages a file.

    Args:
        kind: one of `KINDS`.
        others: another checkpoint of the same model.

    Returns:
        Whether the file differs now; there is no other rank's `.metadata`, for example.
    """
    before = file.read_bytes()
    data = bytearray(before)
    if kind == "missing":
        file.unlink()
        return True
    if kind == "flipped bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "zeroed page":
        start = chance.randrange(0, len(data), PAGE)
        length = len(data[start : start + PAGE])
        data[start : start + length] = bytes(length)
    elif kind == "truncated":
        del data[chance.randrange(len(data)) :]
    else:
        other = _counterpart(file, others, kind)
        if other is None:
            return False
        data[:] = other.read_bytes()
    file.write_bytes(data)
    return bytes(data) != before


def _counterpart(file: Path, others: Path, kind: str) -> Path | None:
    """The file of the same rank in another save, or of another rank in the same one."""
    start = file.name[:4]
    if kind == "another save's":
        return next(each for each in sorted(others.iterdir()) if each.name.startswith(start))
    ranks = [each for each in sorted(file.parent.iterdir()) if each.name.startswith("__")]
    return next((each for each in ranks if each != file), None) if file in ranks else None


def rank_of(name: str) -> int:
    """The rank that wrote the file of this name."""
    return int(name.split("_")[2]) if name.startswith("__") else COORDINATOR


def save_two(rank: int, world_size: int, folder: Path) -> None:
    """The checkpoint to damage, and another one."""
    run = Run()
    for name in ("good", "other"):
        run.train()
        WAYS["plain"].save(run, folder / name)


def load_damaged(rank: int, world_size: int, folder: Path, name: str) -> str:
    """What is wrong with how a damaged file is reported; "" if nothing is."""
    run = Run(seed=1)
    run.train()
    before = run.digest()
    try:
        run.load(folder)
    except DamagedCheckpoint as error:
        message = str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "loads without a word"
    if name not in message or f"rank {rank_of(name)}" not in message:
        return f"does not name file or rank: {message}"
    return "" if run.digest() == before else f"changed the model: {message}"


def random_damage(count: int, seed: int, world_size: int = 2) -> Iterator[tuple[Counter[str], list[str]]]:
    """How often each kind was tried, and what was not reported as it has to be; after each trial."""
    chance = random.Random(seed)
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    pool = Pool(world_size, "gloo", 20.0)
    with tempfile.TemporaryDirectory(prefix="flatfsdp-faults-") as temporary:
        folder = Path(temporary)
        pool.run(save_two, (folder,), 60.0)
        names = sorted(os.listdir(folder / "good"))
        while tried.total() < count:
            # In turn, so that a small number has every kind and every file.
            number = tried.total()
            kind = KINDS[number % len(KINDS)]
            name = names[(number // len(KINDS)) % len(names)]
            shutil.rmtree(folder / "damaged", ignore_errors=True)
            shutil.copytree(folder / "good", folder / "damaged")
            if not inflict(kind, folder / "damaged" / name, chance, folder / "other"):
                kind, is_damaged = "flipped bit", False
                while not is_damaged:
                    is_damaged = inflict(kind, folder / "damaged" / name, chance, folder / "other")
            tried[kind] += 1
            for said in sorted(set(pool.run(load_damaged, (folder / "damaged", name), 60.0)) - {""}):
                wrong.append(f"{kind}, {name}: {said}")
            yield tried, wrong
    pool.stop()
