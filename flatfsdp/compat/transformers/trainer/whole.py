"""Which checkpoints of a trainer's run are whole, whatever the moment at which a save was killed.

In:   the run's folder.
Out:  its newest whole checkpoint; at the begin and end of a save, a folder in which it is in nobody's way.

    checkpoint-100               whole once trainer_state.json is complete, and flatfsdp/, if it is there;
                                 one of the two is written last
    replaced-checkpoint-100      whole; the earlier one of this step, until the new one is whole
    unfinished-checkpoint-100    the rest of an interrupted save, put aside
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from flatfsdp.checkpoint.manifest import METADATA

logger = logging.getLogger(__name__)

STATE = "flatfsdp"
"""Folder in a checkpoint with shards and optimizer, as `flatfsdp.checkpoint` writes them."""


def is_whole(folder: Path) -> bool:
    """Whether a save into the folder has completed.

    Raises:
        OSError: if that cannot be found out.
    """
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # A kill may have cut it off.
        return False
    # A thread may write the shards after everything else, into a folder that is made before.
    return not (folder / STATE).exists() or (folder / STATE / METADATA).exists()


def whole_one(folder: Path) -> Path:
    """The folder of a checkpoint, or that of the earlier one of its step if only that is whole.

    Raises:
        ValueError: if neither is.
    """
    for each in (folder, _replaced(folder)):
        if is_whole(each):
            return each
    raise ValueError(
        f"{folder} has no complete {TRAINER_STATE_NAME} or {STATE}/, which a save writes last: it is no "
        "checkpoint, or its save was interrupted; resume_from_checkpoint=True finds the newest that is whole"
    )


def newest_whole(run: Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        ValueError: if there is none.
    """
    names = {path.name.removeprefix("replaced-") for path in _folders(run)}
    for name in sorted(names, key=lambda name: -int(name.rpartition("-")[2])):
        try:
            return whole_one(run / name)
        except ValueError:
            logger.warning("%s is the rest of an interrupted save, and an older one is taken", run / name)
    raise ValueError(f"{run} has no whole checkpoint to resume from")


def begin_save(run: Path, folder: Path) -> None:
    """Makes way for a checkpoint of the run: what is there stays whole until `end_save`.

    The rests of interrupted saves are put aside, as transformers would count them among the checkpoints to
    keep.
    """
    for path in _folders(run):
        own = run / path.name.removeprefix("replaced-")
        if not is_whole(own):
            _put_aside(own)
            if path != own:
                path.rename(own)
        elif path != own:
            _remove(path)
    if folder.exists():
        folder.rename(_replaced(folder))


def end_save(folder: Path) -> None:
    """Removes the earlier checkpoint of this step."""
    if _replaced(folder).exists():
        _remove(_replaced(folder))


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"replaced-{folder.name}")


def _remove(path: Path) -> None:
    # First of all, so that an interruption leaves nothing that looks whole.
    (path / TRAINER_STATE_NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _put_aside(folder: Path) -> None:
    if folder.exists():
        aside = folder.with_name(f"unfinished-{folder.name}")
        logger.warning("%s is the rest of an interrupted save, and is put aside as %s", folder, aside.name)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)


def _folders(run: Path) -> list[Path]:
    """The checkpoints of a run, whole or not, those that were replaced first."""
    found = [*run.iterdir()] if run.is_dir() else []
    named = (path for path in found if re.fullmatch(r"(replaced-)?checkpoint-\d+", path.name))
    return sorted((path for path in named if path.is_dir()), key=lambda path: path.name, reverse=True)
