"""Verifies data files in background threads while the main thread reads; one verdict for all ranks.

In:   an `OpenCheckpoint`.
Out:  nothing, or `DamagedCheckpoint` on every rank.
Next: `loading.py` asks for the verdict before it changes anything.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from flatfsdp.checkpoint.digests import THREADS, FileDigest, digest_of_file
from flatfsdp.checkpoint.errors import CheckpointError, damaged, reason, unreadable
from flatfsdp.checkpoint.opening import OpenCheckpoint, data_files, difference
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks


class Verification:
    """Verification of data files, from construction until `verdict`, or the end of a `with` block.

    Each file is read by one rank, with several threads: the rank of the same number as its writer.

    Args:
        world: all ranks.
        device: device to communicate on.
        compares_digests: whether to compare contents, not only presence and lengths; a checkpoint of plain
            torch.distributed.checkpoint has no digests.
    """

    def __init__(
        self, opened: OpenCheckpoint, world: Ranks, device: torch.device, *, compares_digests: bool
    ) -> None:
        self._opened, self._world, self._device = opened, world, device
        self._problem: CheckpointError | None = None
        self._is_stopped = threading.Event()
        needed = data_files(opened.metadata)
        recorded = opened.manifest.files if opened.manifest is not None else {}
        # If as many ranks read as wrote, each has its own file's bytes in the page cache already.
        writers = {
            name: recorded[name].rank if name in recorded else number
            for number, name in enumerate(sorted(needed))
        }
        self._own = {name: needed[name] for name, rank in writers.items() if rank % world.size == world.rank}
        self._thread = threading.Thread(target=self._run, args=(compares_digests,), name="verification")
        self._thread.start()

    def verdict(self) -> None:
        """Waits for all ranks' files.  Collective over all ranks.

        Raises:
            DamagedCheckpoint: if a file is missing or damaged.
            CheckpointError: if a file cannot be read.
            Both are raised on every rank.
        """
        self._thread.join()
        problems = all_gather_object(self._problem, self._world, self._device)
        for problem in problems:
            if problem is not None:
                raise problem

    def __enter__(self) -> Verification:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self, compares_digests: bool) -> None:
        try:
            with ThreadPoolExecutor(THREADS, thread_name_prefix="verification") as pool:
                for name, needed in self._own.items():
                    self._check(name, needed, pool if compares_digests else None)
        except CheckpointError as problem:
            self._problem = problem
        except Exception as error:
            self._problem = CheckpointError(f"{self._opened.folder} cannot be verified: {reason(error)}")

    def _check(self, name: str, needed: int, pool: ThreadPoolExecutor | None) -> None:
        path = self._opened.folder / name
        record = self._opened.manifest.files[name] if self._opened.manifest is not None else None
        rank = None if record is None else record.rank
        try:
            found = FileDigest(path.stat().st_size, "" if record is None else record.digest.sha256)
            if pool is not None and record is not None and found.bytes == record.digest.bytes:
                found = digest_of_file(path, pool, self._is_stopped.is_set)
        except FileNotFoundError:
            raise damaged(path, "is missing", rank) from None
        except OSError as error:
            raise unreadable(path, error, rank) from None
        if record is None:
            if found.bytes < needed:
                raise damaged(path, f"has {found.bytes} bytes, and at least {needed} were written")
        elif found != record.digest and not self._is_stopped.is_set():
            raise damaged(path, difference(record.digest, found), rank)
