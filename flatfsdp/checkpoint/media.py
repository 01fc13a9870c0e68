"""What saving, replacing and removing are on a disk, and in an object store.

In:   a folder, and the names and contents of files.
Out:  files, of which one makes the others a checkpoint: it comes last, and it goes first.
Next: `writer.py`, `manifest.py`, `opening.py` and `manager.py` ask `medium_of(folder)`.

                    a disk                                      an object store
    a file          may be written in part                      is there whole, or not at all
    the end         a rename, between flushes                   the last object is put
    replacing       a rename                                    a put
    removing        the folder is renamed, then deleted         the last object is deleted first
    putting aside   the folder is renamed                       objects are copied, the last one last
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from itertools import count
from pathlib import Path

from flatfsdp.checkpoint import durable
from flatfsdp.checkpoint.digests import DigestingFile, FileDigest, digest_of_file
from flatfsdp.checkpoint.store import Place, StorePath, Upload, digest_of_object


class Disk:
    """A folder of the system.

    Attributes:
        is_flushed: whether what was written has to be flushed.
    """

    is_flushed = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Makes the folder, if it is not there."""
        durable.make_folder(self.folder)

    def create(self, name: str, is_hashed: bool) -> DigestingFile:
        """A new file to write."""
        return DigestingFile(self.folder / name, is_hashed=is_hashed)

    def flush(self) -> None:
        """Flushes names of files to the disk."""
        durable.sync_folder(self.folder)

    def lengths(self, names: Collection[str]) -> Mapping[str, int | None]:
        """Lengths of those of the files that are there."""
        paths = [self.folder / name for name in names]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def digest(self, name: str, pool: Executor, is_stopped: Callable[[], bool]) -> FileDigest:
        """Reads and hashes a file, see `digest_of_file`."""
        return digest_of_file(self.folder / name, pool, is_stopped)

    def commit(self, contents: Mapping[str, bytes], last: str) -> None:
        """Writes files so that the one called `last` is there only if all are, and on the disk."""
        temporary = self.folder / f"{last}.tmp"
        places = {temporary if name == last else self.folder / name: data for name, data in contents.items()}
        try:
            for place, data in places.items():
                durable.write(place, data)
            self.flush()
            os.replace(temporary, self.folder / last)
        except BaseException:
            for place in places:
                with suppress(OSError):
                    place.unlink(missing_ok=True)
            raise

    def may_name(self, name: str, last: str) -> bool:
        """Whether the file called `last` may name this one of a save that failed: no, if it did."""
        return False

    def remove(self, last: str) -> None:
        """Removes a checkpoint; if interrupted, the rest is not taken for one."""
        going = self.folder.with_name(f"removed-{self.folder.name}")
        self.folder.rename(going)
        Disk(going).delete()

    def delete(self) -> None:
        """Deletes the folder, or a link to it: what that leads to may be somebody else's, and stays."""
        if self.folder.is_symlink():
            self.folder.unlink()
        else:
            shutil.rmtree(self.folder)

    def put_aside(self, why: str, last: str) -> Path:
        """Renames the folder, or a link to it; those of earlier times stay."""
        asides = (self.folder.with_name(name) for name in _names_aside(why, self.folder.name))
        return self.folder.rename(next(aside for aside in asides if not os.path.lexists(aside)))


class ObjectStore:
    """Objects with one beginning of their names; methods are those of `Disk`."""

    is_flushed = False

    def __init__(self, folder: StorePath) -> None:
        self.folder = folder

    def make(self) -> None:
        """Does nothing: objects need no folder."""

    flush = make

    def create(self, name: str, is_hashed: bool) -> Upload:
        """A new object to write."""
        return Upload(self.folder / name, is_hashed=is_hashed)

    def lengths(self, names: Collection[str]) -> Mapping[str, int | None]:
        """Lengths of all that is there: one request for many."""
        return self.folder.lengths() if self.folder.exists() else {}

    def digest(self, name: str, pool: Executor, is_stopped: Callable[[], bool]) -> FileDigest:
        """Reads and hashes an object."""
        return digest_of_object(self.folder / name, pool, is_stopped)

    def commit(self, contents: Mapping[str, bytes], last: str) -> None:
        """Puts objects, the one called `last` after all others."""
        for name in sorted(contents, key=lambda name: name == last):
            try:
                (self.folder / name).write_bytes(contents[name])
            except OSError:
                # The store may have taken it, though its answer was lost.
                with suppress(OSError):
                    if (self.folder / name).read_bytes() == contents[name]:
                        continue
                raise

    def may_name(self, name: str, last: str) -> bool:
        """Whether the object called `last` may name this one of a save that failed: if an answer was lost."""
        try:
            return name.encode() in (self.folder / last).read_bytes()
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def remove(self, last: str) -> None:
        """Removes a checkpoint."""
        (self.folder / last).unlink(missing_ok=True)
        self.delete()

    def delete(self) -> None:
        """Deletes all objects in the folder."""
        self.folder.delete(self.folder.iterdir())

    def put_aside(self, why: str, last: str) -> StorePath:
        """Copies a checkpoint to another folder, and removes it; those of earlier times stay."""
        asides = (self.folder.with_name(name) for name in _names_aside(why, self.folder.name))
        aside = next(aside for aside in asides if not (aside / last).exists())
        names = [name for name in self.folder.lengths() if name != last]
        self.folder.copy_to(aside, names)
        self.folder.copy_to(aside, [last])
        self.remove(last)
        return aside


def _names_aside(why: str, name: str) -> Iterator[str]:
    return (f"{why}-{name}{'' if number == 1 else f'.{number}'}" for number in count(1))


def medium_of(folder: Place) -> Disk | ObjectStore:
    """What a folder is on."""
    return ObjectStore(folder) if isinstance(folder, StorePath) else Disk(folder)
