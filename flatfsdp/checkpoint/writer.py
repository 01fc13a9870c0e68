"""`Writer`: torch.distributed.checkpoint's storage of files, but a save is there whole or not at all.

In:   the plans and tensors of `dcp.save` or `dcp.async_save`.
Out:  each rank's data file, named after the save, and its digest, which travels to the coordinator with the
      results of the write.
Next: `commit.py` makes them a checkpoint.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatfsdp.checkpoint.commit import commit, sync_folder
from flatfsdp.checkpoint.digests import DigestingFile, FileDigest
from flatfsdp.checkpoint.manifest import METADATA, FileRecord, data_prefix


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint that is there whole or not at all, with a digest of every file.

        dcp.save(state, storage_writer=Writer("out/step-100"))
        dcp.async_save(state, storage_writer=Writer("out/step-100"), process_group=gloo_group)

    An older checkpoint in the folder stays the one that is loaded until the new one is complete; then it is
    removed.  Plain `dcp.load` reads the new one, too.  One Writer may save several times.

    Args:
        path: the folder, which is made if it does not exist.
        overwrite: whether to replace a checkpoint that the folder holds.
        extra: what is neither model nor optimizer, for `load` to return; pickled here and now, so that it may
            change while an asynchronous save goes on.  The first rank's is written.

    Raises:
        FileExistsError: by `dcp.save`, inside its CheckpointException, if the folder holds a checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path, overwrite=overwrite)
        self.fs = _DigestingFileSystem()
        self._extra = _pickled(dict(extra)) if extra else None
        self._is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: for a save without collectives, which has no end that all ranks agree on.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "Writer needs use_collectives=True: a checkpoint is complete on all ranks or none"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        folder = Path(self.path)
        if self._is_coordinator and not self.overwrite and (folder / METADATA).exists():
            raise FileExistsError(
                f"{folder} holds a checkpoint; save to another folder, or replace it with overwrite=True"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.save_id = uuid.uuid4().hex[:12]
        return [
            replace(plan, storage_data=_Prefix(data_prefix(rank, self.save_id)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        if not plan.items:
            written.set_result([])
            return written
        files = cast(_DigestingFileSystem, self.fs).written
        try:
            results = super().write_data(plan, planner).wait()
            sync_folder(Path(self.path))
            digests = {file.path.name: file.digest.result for file in files}
        except BaseException:
            refusal = next((file.error for file in files if file.error), None)
            for file in files:
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)
            if refusal is not None:
                # Without what torch's writer makes of it, which is about positions in an archive.
                raise OSError(refusal.errno, refusal.strerror, str(self.path)) from None
            raise
        finally:
            files.clear()
        first, *rest = results
        written.set_result(
            [_DigestedResult(first.index, first.size_in_bytes, first.storage_data, digests), *rest]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        metadata.storage_meta = self.storage_meta()
        files = {
            name: FileRecord(rank, digest)
            for rank, of_rank in enumerate(results)
            for each in of_rank
            if isinstance(each, _DigestedResult)
            for name, digest in each.digests.items()
        }
        commit(Path(self.path), self.save_id, files, pickle.dumps(metadata), self._extra)


class _Prefix(NamedTuple):
    """What a rank's data files are to be called, up to their number."""

    prefix: str


@dataclass(frozen=True)
class _DigestedResult(WriteResult):
    """A rank's first result, which also says what the files are that all its results are about."""

    digests: dict[str, FileDigest] = field(default_factory=dict)


class _DigestingFileSystem(FileSystem):
    """The files of a disk, but those that are written are new ones, and have digests.

    Attributes:
        written: the files of the save in progress.
    """

    def __init__(self) -> None:
        self.written: list[DigestingFile] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DigestingFile(Path(path)) as file:
            self.written.append(file)
            yield cast(io.IOBase, file)


def _pickled(extra: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(extra, file)
    return file.getvalue()
