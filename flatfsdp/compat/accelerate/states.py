"""The folder that `FlatAccelerator.save_state` writes.

flatfsdp.json           names the save that is the folder's; replaced by one rename when a save is complete
save-<id>/              everything of one save: Accelerate's own files, and
save-<id>/flatfsdp-0/   the first sharded model and its optimizer, as `flatfsdp.checkpoint` writes them

The one before is removed after the rename, so that the folder holds a whole save at any moment.  Other files
in it are left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flatfsdp.checkpoint.durable import make_folder, sync_folder, write

_MARK = "flatfsdp.json"
_SAVE = re.compile("save-[0-9a-f]{12}")


class Mark(NamedTuple):
    """Metadata of a complete save.

    Attributes:
        save: name of its folder.
        models: number of sharded models.
        ranks: number of ranks that saved.
        step: Accelerate's count of microbatches, from which it derives the last one of a step.
    """

    save: str
    models: int
    ranks: int
    step: int


def begin_save(folder: Path, is_named: bool) -> str:
    """Makes the folder of a new save; returns its name.

    Raises:
        ValueError: if the folder was named automatically, and holds a checkpoint.
    """
    if is_named and _is_marked(folder):
        raise ValueError(
            f"{folder} holds a checkpoint; set project_configuration.iteration to the number of the next one"
        )
    name = f"save-{uuid.uuid4().hex[:12]}"
    make_folder(folder / name)
    return name


def end_save(folder: Path, mark: Mark) -> None:
    """Makes a complete save the folder's.

    Raises:
        OSError: if it cannot; `is_current` tells which save is the folder's then.
    """
    # Accelerate's own files; `flatfsdp.checkpoint` has brought its own to the disk.
    for path in (folder / mark.save).iterdir():
        if path.is_file():
            with open(path, "rb") as written:
                os.fsync(written.fileno())
    sync_folder(folder / mark.save)
    temporary = folder / f"{_MARK}.tmp"
    write(temporary, json.dumps(mark._asdict()).encode())
    os.replace(temporary, folder / _MARK)
    sync_folder(folder)


def is_current(folder: Path, name: str) -> bool:
    """Whether this save is the folder's."""
    with suppress(OSError):
        found = _read_mark(folder)
        return found is not None and found.save == name
    return False


def remove_earlier(folder: Path, name: str, limit: int | None) -> None:
    """Removes what a new save replaces.

    These are the other saves of its folder, and what killed ones have left; and automatically named
    checkpoints beside it until `limit` are left: first those whose save did not complete, then the oldest.
    """
    for path in folder.iterdir():
        if _SAVE.fullmatch(path.name) and path.name != name:
            # What stays is removed by the next save.
            shutil.rmtree(path, ignore_errors=True)
    if limit:
        numbered = _numbered(folder.parent)
        others = sorted((_is_marked(path), number, path) for number, path in numbered if path != folder)
        for _, _, path in others[: max(0, len(others) + 1 - limit)]:
            # First of all, so that an interruption leaves none that looks complete.
            (path / _MARK).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def mark_of(folder: Path, models: int) -> Mark:
    """The metadata of the folder's save.

    Args:
        folder: the folder.
        models: expected number of sharded models.

    Raises:
        ValueError: if no save of FlatAccelerator has completed there, or the number of models differs.
    """
    if not _is_marked(folder):
        raise ValueError(
            f"{folder} has no {_MARK}: no save_state wrote it, or one was stopped before its end"
        )
    found = _read_mark(folder)
    if found is None:
        raise ValueError(f"{folder / _MARK} does not hold what was written there; load another checkpoint")
    if found.models != models:
        raise ValueError(f"{folder} has {found.models} sharded models, and {models} have been prepared")
    return found


def _read_mark(folder: Path) -> Mark | None:
    """The metadata that a save has left; None if the file holds anything else."""
    try:
        found = Mark(**json.loads((folder / _MARK).read_text()))
        return found if _SAVE.fullmatch(found.save) else None
    except (ValueError, TypeError):
        return None


def newest(folder: Path) -> Path:
    """The newest complete one of the automatically named checkpoints.

    Raises:
        ValueError: if there is none.
    """
    ended = [(number, path) for number, path in _numbered(folder) if _is_marked(path)]
    if not ended:
        raise ValueError(f"{folder} has no checkpoint that FlatAccelerator.save_state has completed")
    return max(ended)[1]


def _is_marked(folder: Path) -> bool:
    """Whether a save into the folder has completed."""
    return (folder / _MARK).is_file()


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    named = ((re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.glob("checkpoint_*"))
    return [(int(match[1]), path) for match, path in named if match]
