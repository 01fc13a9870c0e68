"""Data files against the manifest, in other threads, while this one reads; one verdict for all ranks.

In:   an `OpenCheckpoint`.
Out:  nothing, or `DamagedCheckpoint` on every rank.
Next: `loading.py` asks before it changes anything.
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
    """Runs from construction until `verdict`, or until the end of a `with` block.

    Each file is read by one rank, that of the same number as has written it, by several threads.

    Args:
        world: all ranks.
        device: where they communicate.
        compares_digests: also the contents of files, not only whether they are there and long enough; a
            checkpoint of plain torch.distributed.checkpoint has no digests.
    """

    def __init__(
        self, opened: OpenCheckpoint, world: Ranks, device: torch.device, *, compares_digests: bool
    ) -> None:
        self._opened, self._world, self._device = opened, world, device
        self._problem: CheckpointError | None = None
        self._is_stopped = threading.Event()
        needed = data_files(opened.metadata)
        recorded = opened.manifest.files if opened.manifest is not None else {}
        # If as many ranks read as wrote, each has read its own file's bytes.
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
            DamagedCheckpoint: if a file is missing, or not what was written.
            CheckpointError: if one cannot be read.
            Both on every rank.
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
