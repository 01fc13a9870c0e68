"""Digests of files, computed by several threads while a file is written, or from a file that is there.

In:   what is written, view by view; or a file.
Out:  the number of bytes, and their digest.
Next: `manifest.py` keeps them; `verification.py` compares.

A file's digest is the SHA-256 of the SHA-256s of its pieces of 1 MiB, so that threads share one file:

    file     | piece 0 | piece 1 | piece 2 |.. piece 3 |
    sha256       d0        d1        d2         d3          digest = sha256(d0 d1 d2 d3)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

PIECE = 1 << 20
"""Bytes that are hashed by themselves."""
SMALL = 1 << 20
"""Fewer bytes than this are hashed without asking another thread."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
"""On each rank.  hashlib lets other threads run; one core hashes 1 to 2 GB/s."""


class FileDigest(NamedTuple):
    """The length of a file in bytes, and its digest in hexadecimal digits."""

    bytes: int
    sha256: str


class RunningDigest:
    """The digest of a file of which the beginning is known.

    Attributes:
        bytes: that have come so far.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._pieces: list[Any] = []

    def jobs(self, data: memoryview) -> Iterator[Callable[[], None]]:
        """What is left to compute for the next bytes, in any order and any thread, before `result`.

        No two of one call are about the same piece; the jobs of a call are done before the next call.
        """
        while data:
            filled = self.bytes % PIECE
            if filled == 0:
                self._pieces.append(hashlib.sha256())
            part = data[: PIECE - filled]
            yield partial(self._pieces[-1].update, part)
            self.bytes += len(part)
            data = data[len(part) :]

    @property
    def result(self) -> FileDigest:
        return FileDigest(self.bytes, _joined(piece.digest() for piece in self._pieces))


def digest_of(data: bytes) -> FileDigest:
    """The digest of a file that holds `data`."""
    running = RunningDigest()
    for job in running.jobs(memoryview(data)):
        job()
    return running.result


def digest_of_file(path: Path, pool: Executor, is_stopped: Callable[[], bool]) -> FileDigest:
    """Reads and hashes a file, a piece in each thread of `pool`.

    Args:
        is_stopped: asked before each piece; where it says so, the digest is not the file's.

    Raises:
        OSError: if it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        number, size = file.fileno(), os.fstat(file.fileno()).st_size

        def piece(start: int) -> bytes:
            hashed, end = hashlib.sha256(), start + PIECE
            # Threads share the file, so that each says from where it reads.
            while not is_stopped() and (data := os.pread(number, end - start, start)):
                hashed.update(data)
                start += len(data)
            return hashed.digest()

        return FileDigest(size, _joined(pool.map(piece, range(0, size, PIECE))))


def _joined(pieces: Iterator[bytes]) -> str:
    return hashlib.sha256(b"".join(pieces)).hexdigest()


class DigestingFile:
    """A new file, opened for writing, that knows the digest of what was written.

    A view is hashed by other threads while this one writes it; it may change as soon as `write` returns.

    Args:
        path: of a file that does not exist yet.

    Attributes:
        digest: of what has been written so far.
        error: the system's first refusal, which torch's writer replaces by another error on its way out.

    Raises:
        FileExistsError: if the file exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest = RunningDigest()
        self.error: OSError | None = None
        self._file = open(path, "xb")  # noqa: SIM115 - closed by `close`
        self._pool: Executor | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        jobs = list(self.digest.jobs(view))
        try:
            if len(view) < SMALL or THREADS == 1:
                for job in jobs:
                    job()
                self._file.write(view)
                return len(view)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
            running = [self._pool.submit(job) for job in jobs]
            try:
                self._file.write(view)
            finally:
                for each in running:
                    each.result()
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = self.error or error
            raise

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._file.close()

    def __enter__(self) -> DigestingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as refusal:
            # A file whose buffer cannot be flushed; the first error is the one to report.
            self.error = self.error or refusal
            if error is None:
                raise
