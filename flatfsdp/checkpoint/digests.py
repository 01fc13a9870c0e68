"""Digests of files, computed by several threads while a file is written, or from an existing file.

In:   the data that is written, piece by piece; or a file.
Out:  the number of bytes, and their digest.
Next: `manifest.py` stores digests; `opening.py` compares them.

A file's digest is the SHA-256 of the SHA-256s of its pieces of 1 MiB, so that threads share one file:

    file     | piece 0 | piece 1 | piece 2 |.. piece 3 |
    sha256       d0        d1        d2         d3          digest = sha256(d0 d1 d2 d3)
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

PIECE = 1 << 20
"""Bytes of a file that are hashed together."""
THREADS = max(1, min(4, (os.cpu_count() or 1) // 8))
"""Threads on each rank.  hashlib releases the GIL; one core hashes 1 to 2 GB/s, and more slow the writing."""


class FileDigest(NamedTuple):
    """The length of a file in bytes, and its digest in hexadecimal digits; None if it was not hashed."""

    bytes: int
    sha256: str | None


def digest_of(data: bytes) -> FileDigest:
    """Returns the digest of a file that holds `data`."""
    return joined(len(data), [hashes_of(data)])


def hashes_of(data: bytes) -> bytes:
    """The SHA-256s of all pieces of `data`, one after the other."""
    view = memoryview(data)
    starts = range(0, len(data), PIECE)
    return b"".join(hashlib.sha256(view[start : start + PIECE]).digest() for start in starts)


def joined(size: int, hashes: Iterable[bytes]) -> FileDigest:
    """The digest of a file with `size` bytes, from the SHA-256s of its pieces in their order."""
    return FileDigest(size, hashlib.sha256(b"".join(hashes)).hexdigest())


def digest_of_file(path: Path, pool: Executor, is_stopped: Callable[[], bool]) -> FileDigest:
    """Reads and hashes a file, a piece in each thread of `pool`.

    Args:
        path: file to read.
        pool: executor whose threads read and hash.
        is_stopped: asked before each piece; once it returns True, the result is not the file's digest.

    Raises:
        OSError: if the file cannot be read, or becomes shorter meanwhile.
    """
    with open(path, "rb", buffering=0) as file:
        number, size = file.fileno(), os.fstat(file.fileno()).st_size

        def piece(start: int) -> bytes:
            return b"" if is_stopped() else _hashed(number, start, min(start + PIECE, size))

        return joined(size, pool.map(piece, range(0, size, PIECE)))


_BUFFERS = threading.local()
"""Buffer of one piece for each thread.  Allocating one a piece would cost more than hashing it, because the
system unmaps the memory in all threads' address space again."""


def _buffer() -> memoryview:
    if not hasattr(_BUFFERS, "view"):
        _BUFFERS.view = memoryview(bytearray(PIECE))
    return _BUFFERS.view


def _hashed(number: int, start: int, end: int) -> bytes:
    """The SHA-256 of bytes [start, end) of an open file, which other threads read and write, too."""
    hashed, buffer = hashlib.sha256(), _buffer()
    while start < end:
        length = os.preadv(number, [buffer[: end - start]], start)
        if not length:
            raise OSError(errno.EIO, "the file has become shorter")
        hashed.update(buffer[:length])
        start += length
    return hashed.digest()


class DigestingFile:
    """A new file, open for writing, that computes the digest of what is written.

    Threads follow the writing: they read each piece back as soon as it is complete in the file, and hash it.

    Args:
        path: path of a file that does not exist yet.
        is_hashed: if False, only bytes are counted.

    Attributes:
        digest: digest of the whole file, once it is closed.
        error: first error of a write; torch's writer replaces it by another one on its way out.

    Raises:
        FileExistsError: if the file exists.
    """

    def __init__(self, path: Path, *, is_hashed: bool = True) -> None:
        self.path = path
        self._is_hashed = is_hashed
        self.digest: FileDigest | None = None
        self.error: OSError | None = None
        # Unbuffered, so that written data can be read back at once.
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 - closed by `close`
        self._length = 0
        self._pieces: list[Future[bytes]] = []
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")

    def write(self, data: Any) -> int:
        """Writes to the file, and has complete pieces hashed."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while written < len(view):
                # The system may write less than asked.
                written += self._file.write(view[written:])
        except OSError as error:
            self.error = self.error or error
            raise
        self._length += len(view)
        if self._is_hashed:
            self._hash(self._length - self._length % PIECE)
        return len(view)

    def flush(self) -> None:
        """Does nothing: the file is unbuffered."""

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._length

    def fileno(self) -> int:
        """File descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Waits for the digest; a second call does nothing."""
        if self._file.closed:
            return
        try:
            if self._is_hashed:
                self._hash(self._length)
                self.digest = joined(self._length, (piece.result() for piece in self._pieces))
            else:
                self.digest = FileDigest(self._length, None)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._file.close()

    def _hash(self, end: int) -> None:
        """Submits all pieces that begin before `end` for hashing."""
        number = self._file.fileno()
        for start in range(len(self._pieces) * PIECE, end, PIECE):
            stop = min(start + PIECE, self._length)
            self._pieces.append(self._pool.submit(_hashed, number, start, stop))
