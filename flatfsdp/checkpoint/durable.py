"""Brings what was written to the disk, so that it is there after a loss of power, too."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Writes a file, and flushes it to disk; its name is flushed by `sync_folder`."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents, and flushes their names to disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk; files are flushed separately."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        # The parent may belong to another user, who lets us pass through but not read it.
        return
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems do not support this.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
