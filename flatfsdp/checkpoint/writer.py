"""`Writer`: torch.distributed.checkpoint's file storage, with saves that are complete or absent.

In:   the plans and tensors of `dcp.save` or `dcp.async_save`.
Out:  each rank's data file, named after the save; its digest travels to the coordinator with the results of
      the write.
Next: `manifest.py` makes a checkpoint of the files.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flatfsdp.checkpoint.digests import DigestingFile, FileDigest
from flatfsdp.checkpoint.errors import CheckpointError, reason
from flatfsdp.checkpoint.manifest import METADATA, FileRecord, commit, data_prefix
from flatfsdp.checkpoint.media import medium_of
from flatfsdp.checkpoint.store import Place, Places, StorePath, Upload


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint that is complete or absent, by default with a digest of every file.

        dcp.save(state, storage_writer=Writer("out/step-100"))
        dcp.async_save(state, storage_writer=Writer("out/step-100"), process_group=gloo_group)

    An older checkpoint in the folder stays loadable until the new one is complete, and is then removed.
    Plain `dcp.load` reads the new one, too.  One Writer may save several times.

    Args:
        path: folder of the checkpoint, made if it does not exist; or its URL.
        overwrite: whether to replace a checkpoint in the folder.
        extra: further data for `load` to return; pickled here and now, so that it may change during an
            asynchronous save.  The first rank's is written.
        weights_only: whether to refuse an `extra` that `torch.load(weights_only=True)`, and so `load`,
            refuses.
        digests: whether to hash data files while they are written, the same on all ranks, see
            `checkpoint.save`; other files are small, and always have a digest.

    Raises:
        ValueError: if the path is a URL that fsspec does not know.
        ModuleNotFoundError: if the URL's library is not installed.
        FileExistsError: by `dcp.save`, inside its CheckpointException, if the folder holds a checkpoint.
        TypeError: likewise, if `extra` is refused.
        CheckpointError: likewise, before anything is written, if ranks pass different `digests`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        extra: Mapping[str, Any] | None = None,
        weights_only: bool = True,
        digests: bool = True,
    ) -> None:
        super().__init__(path, overwrite=overwrite)
        self.fs = _DigestingFileSystem(digests)
        self.path = self.fs.init_path(path)
        self._digests = digests
        self._is_coordinator = False
        self._written: list[Place] = []
        self._extra: bytes | None = None
        self._problem: TypeError | None = None
        try:
            if extra:
                self._extra = pickled(dict(extra), "extra", weights_only)
        except TypeError as error:
            # The save raises it, on all ranks.
            self._problem = error

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save.

        Raises:
            ValueError: for a save without collectives, in which ranks cannot agree on its end.
        """
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.sync_files = medium_of(self._folder).is_flushed
        self._is_coordinator = is_coordinator
        self._written.clear()
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "Writer needs use_collectives=True: a checkpoint is complete on all ranks or none"
            )

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder as metadata have it: a path, or a URL as a string."""
        return os.fspath(self._folder) if isinstance(self._folder, StorePath) else self._folder

    @property
    def _folder(self) -> Place:
        return cast(Place, self.path)

    def require_extra(self) -> None:
        """Raises TypeError if `extra` is refused; otherwise the save does."""
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuses a save that cannot succeed, before anything is written."""
        self.require_extra()
        if self._is_coordinator and not self.overwrite and (self._folder / METADATA).exists():
            raise FileExistsError(
                f"{self.path} holds a checkpoint; save to another folder, or replace it with overwrite=True"
            )
        return replace(plan, storage_data=self._digests)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives the save an id, and each rank's files their names."""
        digests = [plan.storage_data for plan in plans]
        if True in digests and False in digests:
            # Otherwise one rank's files would go unverified while another believes that all are.
            raise CheckpointError(
                f"ranks were given different values of digests: rank {digests.index(True)} True, "
                f"rank {digests.index(False)} False; pass one"
            )
        self.save_id = uuid.uuid4().hex[:12]
        medium_of(self._folder).make()
        return [
            replace(plan, storage_data=_StoragePrefix(data_prefix(rank, self.save_id)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and takes their digests."""
        written: Future[list[WriteResult]] = Future()
        # Without shared storage, which the commit finds out, this rank has another folder.
        medium_of(self._folder).make()
        if not plan.items:
            written.set_result([])
            return written
        files = cast(_DigestingFileSystem, self.fs).files
        try:
            try:
                results = super().write_data(plan, planner).wait()
            finally:
                self._written += [file.path for file in files]
            medium_of(self._folder).flush()
            digests = {file.path.name: file.digest for file in files if file.digest is not None}
        except BaseException as error:
            self._delete_written()
            # Instead of torch's own error, which is about positions in an archive.
            refusal = next((file.error for file in files if file.error), error)
            if isinstance(refusal, OSError) and refusal.errno is not None:
                raise OSError(refusal.errno, refusal.strerror, refusal.filename or str(self.path)) from None
            raise
        finally:
            files.clear()
        first, *rest = results
        written.set_result(
            [_DigestedResult(first.index, first.size_in_bytes, first.storage_data, digests), *rest]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the files of all ranks as a checkpoint; the coordinator alone calls it."""
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
        commit(self._folder, self.save_id, files, pickle.dumps(metadata), self._extra)

    def discard(self) -> None:
        """Removes this rank's files after a save that failed on any rank."""
        if self._written and not medium_of(self._folder).may_name(self._written[0].name, METADATA):
            self._delete_written()

    def _delete_written(self) -> None:
        for path in self._written:
            with suppress(OSError):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _DigestedResult(WriteResult):
    """A rank's first result, which also carries the digests of the files of all its results."""

    digests: dict[str, FileDigest] = field(default_factory=dict)


class _DigestingFileSystem(Places):
    """File system in which each written file is a new one and gets a digest.

    Args:
        is_hashed: if False, digests have lengths alone.

    Attributes:
        files: files of the save in progress.
    """

    def __init__(self, is_hashed: bool) -> None:
        self._is_hashed = is_hashed
        self.files: list[DigestingFile | Upload] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        # The first error is the one that the save reports, also if this one cannot be closed afterwards.
        with closing(medium_of(path.parent).create(path.name, self._is_hashed)) as file:
            self.files.append(file)
            yield cast(io.IOBase, file)


def pickled(value: Any, what: str, weights_only: bool = True) -> bytes:
    """The bytes that `torch.save` writes for a value that is no tensor of the model.

    Args:
        what: the value is, for messages.
        weights_only: whether `torch.load(weights_only=True)` has to be able to read it.

    Raises:
        TypeError: if it cannot be pickled, or not be read; names the part of the value that is to blame.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        if weights_only:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        for key, part in _parts(value):
            pickled(part, f"{what}[{key!r}]", weights_only)
        if isinstance(error, pickle.UnpicklingError):
            raise TypeError(
                f"{what} ({type(value).__name__}) is more than tensors, numbers, strings, lists and dicts: "
                "reading it could run code, and `load` refuses it; save plain values, or its state_dict()"
            ) from None
        # Pickling runs methods of what is pickled, which raise what they like.
        raise TypeError(f"{what} cannot be saved: {reason(error)}") from None
    return file.getvalue()


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Items of a dict or list, by key or index; nothing for other values."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()
