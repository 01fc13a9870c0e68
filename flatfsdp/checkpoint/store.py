"""`StorePath`: a name in an object store, with the methods of `pathlib.Path` that checkpoints use.

In:   a URL, such as s3://bucket/run, and the library that fsspec has for it.
Out:  objects, written and read whole or in ranges, listed and deleted; each failure is an OSError, as of a
      disk.
Next: `media.py` has what differs from a disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class, known_implementations
from torch.distributed.checkpoint.filesystem import FileSystem

from flatfsdp.checkpoint.digests import PIECE, FileDigest, hashes_of, joined
from flatfsdp.checkpoint.errors import reason
from flatfsdp.comm.paths import url_of

BLOCK = 32 * PIECE
"""Bytes that one request reads for a digest."""


@contextmanager
def _told(url: str) -> Iterator[None]:
    """Makes an OSError of whatever a library raises; what is not there remains a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        # Never EIO, as some have for what may pass: that would mean damage.
        raise OSError(errno.EPROTO, reason(error), url) from error


class Stat(NamedTuple):
    """What a store says of an object, as `os.stat_result` does of a file."""

    st_size: int


class StorePath(os.PathLike[str]):
    """The name of an object in a store, or what the names of several begin with: a folder.

    Args:
        url: URL of the object or folder.
        fs: fsspec's file system.
        key: its name there.
    """

    def __init__(self, url: str, fs: Any, key: str) -> None:
        self.url, self.fs, self.key = url, fs, key

    def __fspath__(self) -> str:
        return self.url

    __str__ = __fspath__

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}", self.fs, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The folder that it is in."""
        return StorePath(self.url.rpartition("/")[0], self.fs, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        """Another name in the same folder."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether there is an object of this name, or one in this folder."""
        try:
            self._info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether it is a folder with something in it; stores have no others."""
        try:
            return bool(self._info()["type"] == "directory")
        except FileNotFoundError:
            return False

    def stat(self) -> Stat:
        """The length of an object."""
        return Stat(self._info()["size"])

    def _info(self) -> dict[str, Any]:
        with _told(self.url):
            # Libraries remember lists of names, to which other ranks may have added.
            self.fs.invalidate_cache()
            # Not `exists`, which may take a store that cannot be reached for an empty one.
            found: dict[str, Any] = self.fs.info(self.key)
            return found

    def lengths(self) -> dict[str, int | None]:
        """The names in this folder, with the lengths of objects."""
        with _told(self.url):
            self.fs.invalidate_cache()
            listed = self.fs.ls(self.key, detail=True)
        # Some tools make an object for the folder itself.
        found = {each["name"].rstrip("/").rpartition("/")[2]: each["size"] for each in listed}
        return {name: size for name, size in found.items() if name not in ("", self.name)}

    def iterdir(self) -> Iterator[StorePath]:
        """What is in this folder."""
        return (self / name for name in self.lengths())

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """The contents of an object, or bytes [start, end) of them."""
        with _told(self.url):
            data: bytes = self.fs.cat_file(self.key, start=start, end=end)
            return data

    def write_bytes(self, data: bytes) -> None:
        """Puts a whole object: until it is there, one that was there before is."""
        with _told(self.url):
            self.fs.pipe_file(self.key, data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes an object."""
        try:
            with _told(self.url):
                self.fs.rm_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def delete(self, paths: Iterable[StorePath]) -> None:
        """Deletes several objects, in one request where the store has such a request."""
        keys = [path.key for path in paths]
        if keys:
            with _told(self.url):
                self.fs.rm(keys)

    def copy_to(self, other: StorePath, names: list[str]) -> None:
        """Copies objects to another folder; where the store can do that, without sending them here."""
        with _told(self.url):
            self.fs.copy([(self / name).key for name in names], [(other / name).key for name in names])


Place: TypeAlias = Path | StorePath


def place(path: str | os.PathLike[str]) -> Place:
    """The place that a path or a URL leads to; file:// leads to a disk.

    Raises:
        ValueError: if fsspec does not know the URL's protocol; if it names no folder, or has wildcards.
        ModuleNotFoundError: if the protocol's library is not installed.
        OSError: if it is, and does not take the URL.
    """
    url = url_of(path)
    if url is None:
        return Path(path)
    protocol, _, rest = url.partition("://")
    if protocol in ("file", "local"):
        return Path(rest)
    if set("*?[") & set(url):
        raise ValueError(f"{url} has a wildcard, of which libraries make several names; choose another name")
    if not rest.strip("/"):
        raise ValueError(f"{url} names a store and no folder in it; pass a URL such as s3://bucket/run")
    for each in protocol.split("::"):
        try:
            get_filesystem_class(each)
        except ImportError as error:
            library = known_implementations[each]["class"].partition(".")[0]
            what = str(error) if library == "fsspec" else f"pip install {library}"
            raise ModuleNotFoundError(f"{url} needs a library that is not installed: {what}") from None
        except ValueError as error:
            raise ValueError(
                f"{url} is no URL that fsspec knows ({error}); pass a folder, or a URL such as "
                "s3://bucket/run, with pip install s3fs, or gs://bucket/run, with pip install gcsfs"
            ) from None
    with _told(url):
        fs, key = url_to_fs(url.rstrip("/"))
    return StorePath(url.rstrip("/"), fs, key)


class Places(FileSystem):
    """torch.distributed.checkpoint's file system, on a disk or in a store."""

    def init_path(self, path: str | os.PathLike[str]) -> Any:
        """The folder of a checkpoint; `dcp.save` and `dcp.load` may pass another one than before."""
        return place(path)

    def concat_path(self, path: Any, suffix: str) -> Any:
        """A file in a folder."""
        return path / suffix

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """A file to read; of a store the name, of which `Reader` reads ranges."""
        if isinstance(path, StorePath):
            yield path
        else:
            with path.open(mode) as file:
                yield file


class Upload:
    """A new object, open for writing, that computes the digest of what is written; there once it is closed.

    Args:
        path: its name.
        is_hashed: if False, only bytes are counted.

    Attributes:
        path: its name.
        digest: digest of the whole object, once it is closed.
        error: first error of the store; torch's writer replaces it by another one on its way out.
    """

    def __init__(self, path: StorePath, *, is_hashed: bool = True) -> None:
        self.path = path
        self._is_hashed = is_hashed
        self.digest: FileDigest | None = None
        self.error: OSError | None = None
        with _told(path.url):
            self._file = path.fs.open(path.key, "wb")
        self._length = 0
        self._hash = hashlib.sha256()
        self._hashes = b""

    def write(self, data: Any) -> int:
        """Writes to the object, and hashes here: stores take longer than one core."""
        view = memoryview(data).cast("B")
        with self._noted():
            self._file.write(view)
        if not self._is_hashed:
            self._length += len(view)
            return len(view)
        rest = view
        while rest:
            now, rest = rest[: (room := PIECE - self._length % PIECE)], rest[room:]
            self._hash.update(now)
            self._length += len(now)
            if len(now) == room:
                self._end_piece()
        return len(view)

    def flush(self) -> None:
        """Does nothing: parts are sent as they become full."""

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._length

    def close(self) -> None:
        """Sends the rest; a second call does nothing."""
        if self.digest is None:
            if not self._is_hashed:
                self.digest = FileDigest(self._length, None)
            else:
                if self._length % PIECE:
                    self._end_piece()
                self.digest = joined(self._length, [self._hashes])
            with self._noted():
                self._file.close()

    def _end_piece(self) -> None:
        self._hashes += self._hash.digest()
        self._hash = hashlib.sha256()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            with _told(self.path.url):
                yield
        except OSError as error:
            self.error = self.error or error
            raise


def digest_of_object(path: StorePath, pool: Executor, is_stopped: Callable[[], bool]) -> FileDigest:
    """Reads and hashes an object, a block in each thread of `pool`; see `digest_of_file`."""
    size = path.stat().st_size

    def block(start: int) -> bytes:
        return b"" if is_stopped() else hashes_of(path.read_bytes(start, min(start + BLOCK, size)))

    return joined(size, pool.map(block, range(0, size, BLOCK)))
