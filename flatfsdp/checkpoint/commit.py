"""Commits a save: brings everything to the disk before one rename makes it the checkpoint.

In:   what the ranks have written, and their digests.
Out:  a folder whose `.metadata` is the new save's, with nothing left of earlier ones.
Next: `opening.py` reads it.

    extra-<id>.pt, .metadata.tmp, manifest-<id>.json      written and flushed to disk, like data files before
    .metadata.tmp -> .metadata                            the commit: until then the old checkpoint loads
    files of other saves                                  removed
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flatfsdp.checkpoint.digests import digest_of
from flatfsdp.checkpoint.errors import CheckpointError, reason
from flatfsdp.checkpoint.manifest import (
    COORDINATOR,
    METADATA,
    TEMPORARY,
    FileRecord,
    Manifest,
    data_prefix,
    extra_name,
    is_ours,
)


def commit(
    folder: Path, save_id: str, data_files: Mapping[str, FileRecord], metadata: bytes, extra: bytes | None
) -> None:
    """Makes a save the folder's checkpoint; runs on one rank, after all have written.

    Raises:
        OSError: if something cannot be written.
        CheckpointError: if a data file is not here, or has another length than its rank has written.
        In both cases the old checkpoint, if any, remains the folder's.
    """
    _check_lengths(folder, save_id, data_files)
    contents = {METADATA: metadata}
    if extra is not None:
        contents[extra_name(save_id)] = extra
    records = {name: FileRecord(COORDINATOR, digest_of(data)) for name, data in contents.items()}
    manifest = Manifest(save_id, {**data_files, **records})
    contents[manifest.name] = manifest.to_bytes()
    temporary = folder / TEMPORARY
    places = {name: temporary if name == METADATA else folder / name for name in contents}
    try:
        for name, data in contents.items():
            write_file(places[name], data)
        sync_folder(folder)
        os.replace(temporary, folder / METADATA)
    except BaseException:
        for place in places.values():
            with suppress(OSError):
                place.unlink(missing_ok=True)
        raise
    # From here on it is the folder's checkpoint, even if the rest fails.
    try:
        sync_folder(folder)
        _remove_leftovers(folder, manifest)
    except OSError as error:
        warnings.warn(f"{folder} is saved, but not tidied: {reason(error)}", stacklevel=2)


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


def _check_lengths(folder: Path, save_id: str, files: Mapping[str, FileRecord]) -> None:
    for name, (rank, digest) in files.items():
        path = folder / name
        if not name.startswith(data_prefix(rank, save_id)):
            raise CheckpointError(f"{path} is not of this save ({save_id}); give each save a plan of its own")
        if not path.exists():
            raise CheckpointError(
                f"rank {rank} wrote {path}, which rank {COORDINATOR} does not see; save to storage that all "
                "ranks share"
            )
        length = path.stat().st_size
        if length != digest.bytes:
            raise CheckpointError(f"rank {rank} wrote {digest.bytes} bytes to {path}, which has {length}")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file, and flushes it to disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(folder: Path, manifest: Manifest) -> None:
    """Removes files of overwritten or unfinished saves; what stays is removed by the next save."""
    for name in os.listdir(folder):
        if is_ours(name) and name not in manifest.files and name != manifest.name:
            with suppress(OSError):
                (folder / name).unlink()
