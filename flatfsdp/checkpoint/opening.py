"""Opens a checkpoint's folder: reads and verifies everything except data files, and then these, too.

In:   a folder.
Out:  an `OpenCheckpoint`, the same on all ranks: one rank reads, and each decodes what that one has read.
Next: `fit.py` compares it with the model; `loading.py` reads while other threads verify the data files.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from flatfsdp.checkpoint.digests import THREADS, FileDigest, digest_of
from flatfsdp.checkpoint.errors import CheckpointError, asked_for, damaged, reason, unreadable
from flatfsdp.checkpoint.manifest import (
    COORDINATOR,
    METADATA,
    Manifest,
    extra_name,
    is_ours,
    manifest_name,
    parse_manifest,
    save_id_of_manifest,
    save_ids_in,
)
from flatfsdp.checkpoint.media import medium_of
from flatfsdp.checkpoint.reader import unpickled_metadata
from flatfsdp.checkpoint.store import Place, place
from flatfsdp.comm.objects import all_gather_object, broadcast_object
from flatfsdp.comm.paths import same_on_all_ranks
from flatfsdp.comm.ranks import Ranks


@dataclass
class OpenCheckpoint:
    """A checkpoint of which everything except data files has been read and verified.

    Attributes:
        folder: the checkpoint's folder.
        data: contents of `.metadata`.
        extra_data: contents of the file with `extra`; None if there is none.
        manifest: the save's manifest; None if plain torch.distributed.checkpoint has written it.
        is_beside_manifests: whether the folder has any manifest.
        metadata: what `data` says.

    Raises:
        DamagedCheckpoint: if that is not a checkpoint's.
    """

    folder: Place
    data: bytes
    extra_data: bytes | None
    manifest: Manifest | None
    is_beside_manifests: bool
    metadata: Metadata = field(init=False)

    def __post_init__(self) -> None:
        path = self.folder / METADATA
        try:
            self.metadata = unpickled_metadata(self.data)
        except pickle.UnpicklingError as error:
            writer = COORDINATOR if self.is_beside_manifests else None
            raise damaged(path, f"is refused: {error}", writer) from None
        if self.manifest is not None:
            unknown = sorted(self.data_files.keys() - self.manifest.files.keys())
            if unknown:
                raise damaged(path, f"names {unknown[0]}, which {self.manifest.name} does not", COORDINATOR)

    @property
    def data_files(self) -> dict[str, int]:
        """The files that the metadata names, with the bytes that each must have at least."""
        files: dict[str, int] = {}
        for about in self.metadata.storage_data.values():
            end = about.offset + about.length
            files[about.relative_path] = max(end, files.get(about.relative_path, 0))
        return files

    def entries(self, *section: str) -> dict[tuple[Any, ...], Any]:
        """Metadata of what was saved under these keys, by the keys that follow them."""
        paths, found = self.metadata.planner_data or {}, self.metadata.state_dict_metadata
        # In the order of `planner_data`, which is that of the saved dicts.
        inside = {path: found[name] for name, path in paths.items() if name in found}
        length = len(section)
        return {path[length:]: about for path, about in inside.items() if path[:length] == section != path}

    def extra(self, weights_only: bool = True) -> dict[str, Any]:
        """The `extra` of the save; {} if there was none.

        Args:
            weights_only: restrict unpickling to data, see `torch.load`; if False, reading can run code.

        Raises:
            CheckpointError: if `weights_only` does not allow the contents.
        """
        if self.extra_data is None or self.manifest is None:
            return {}
        try:
            return torch.load(io.BytesIO(self.extra_data), map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            file = self.folder / extra_name(self.manifest.save_id)
            raise CheckpointError(
                f"{file} is refused, because reading it could run code: {asked_for(error)}"
            ) from None

    @contextmanager
    def verified(
        self, world: Ranks, device: torch.device, *, compares_digests: bool
    ) -> Iterator[Callable[[], None]]:
        """Context in which other threads verify the data files.

        Each file is read by one rank: the rank of the same number as its writer.

        Args:
            world: all ranks.
            device: device to communicate on.
            compares_digests: whether to compare contents, not only presence and lengths; a checkpoint of
                plain torch.distributed.checkpoint has no digests, nor has one that was saved without.

        Yields:
            A function that waits for all ranks' files.  Collective over all ranks.  It raises
            DamagedCheckpoint, on every rank, if a file is missing or damaged, and CheckpointError if one
            cannot be read.
        """
        stopped = threading.Event()

        def verdict() -> None:
            problem = checking.exception()
            if problem is not None and not isinstance(problem, CheckpointError):
                problem = CheckpointError(f"{self.folder} cannot be verified: {reason(problem)}")
            for theirs in all_gather_object(problem, world, device):
                if theirs is not None:
                    raise theirs

        # One more thread, which waits for the others.
        with ThreadPoolExecutor(THREADS + 1, thread_name_prefix="verification") as pool:
            digest = partial(medium_of(self.folder).digest, pool=pool, is_stopped=stopped.is_set)
            checking = pool.submit(self._verify, world, digest if compares_digests else None)
            try:
                yield verdict
            finally:
                # From here on nobody asks for the verdict.
                stopped.set()

    def _verify(self, world: Ranks, digest: Callable[[str], FileDigest] | None) -> None:
        """Verifies this rank's share of the files; by their lengths, if `digest` is None."""
        recorded = self.manifest.files if self.manifest is not None else {}
        for number, (name, needed) in enumerate(sorted(self.data_files.items())):
            path, record = self.folder / name, recorded.get(name)
            rank = None if record is None else record.rank
            # If as many ranks read as wrote, each has its own file's bytes in the page cache already.
            if (number if rank is None else rank) % world.size != world.rank:
                continue
            try:
                length = path.stat().st_size
                if self.manifest is None or record is None:
                    if length < needed:
                        raise damaged(path, f"has {length} bytes, and at least {needed} were written")
                elif digest is None or record.digest.sha256 is None or length != record.digest.bytes:
                    self.manifest.require(path, record.digest._replace(bytes=length))
                else:
                    self.manifest.require(path, digest(name))
            except FileNotFoundError:
                raise damaged(path, "is missing", rank) from None
            except OSError as error:
                raise unreadable(path, error, rank) from None


_Contents = tuple[bytes, bytes | None, Manifest | None, bool]
"""What one rank reads for all: the fields of an `OpenCheckpoint` after its folder."""


def open_checkpoint(path: str | os.PathLike[str], world: Ranks, device: torch.device) -> OpenCheckpoint:
    """Reads everything except data files on one rank, for all.  Collective.

    Raises:
        ValueError: if fsspec does not know the URL, or ranks pass different paths.
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpoint: if something is missing or damaged there.
        CheckpointError: if something cannot be read, or a rank does not see the folder.
        All of them are raised on every rank.
    """
    folder = same_on_all_ranks(place, path, [world], device)
    sees = all_gather_object(_is_there(folder), world, device)
    for each in sees:
        if isinstance(each, CheckpointError):
            raise each
    if any(sees) and not all(sees):
        # Before anything is called damaged: on that rank, files of the others would be missing.
        raise CheckpointError(
            f"rank {sees.index(True)} sees {folder}, and rank {sees.index(False)} does not; load from "
            "storage that all ranks share"
        )
    contents: _Contents | Exception | None = None
    if world.rank == 0:
        try:
            contents = _read_contents(folder)
        except (FileNotFoundError, CheckpointError) as error:
            contents = error
        except Exception as error:
            # Whatever the error is: the other ranks wait for an answer.
            contents = unreadable(folder, error)
    # Send the raw bytes: their contents may not be picklable again.
    contents = broadcast_object(contents, [world], device)
    if isinstance(contents, Exception):
        raise contents
    assert contents is not None
    return OpenCheckpoint(folder, *contents)


def _is_there(folder: Place) -> bool | CheckpointError:
    try:
        return folder.exists()
    except OSError as error:
        return unreadable(folder, error)


def _read_contents(folder: Place) -> _Contents:
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise FileNotFoundError(f"no checkpoint at {folder}: {what}")
    names = sorted(path.name for path in folder.iterdir())
    # A string says what is wrong with a manifest.
    manifests: dict[str, Manifest | str] = {}
    for name in filter(save_id_of_manifest, names):
        try:
            manifests[name] = parse_manifest(name, (folder / name).read_bytes())
        except ValueError as error:
            manifests[name] = str(error)
    try:
        data = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        if not any(map(is_ours, names)):
            raise damaged(folder / METADATA, "is missing, so this is no checkpoint") from None
        why = "is missing: a save to this folder did not end, or the file was removed"
        raise damaged(folder / METADATA, why, COORDINATOR) from None
    found = digest_of(data)
    for manifest in manifests.values():
        if isinstance(manifest, Manifest) and manifest.files[METADATA].digest == found:
            extra = folder / extra_name(manifest.save_id)
            return data, manifest.read(extra) if extra.name in manifest.files else None, manifest, True
    _require_foreign(folder, data, found, manifests)
    return data, None, None, bool(manifests)


def _require_foreign(
    folder: Place, data: bytes, found: FileDigest, manifests: Mapping[str, Manifest | str]
) -> None:
    """Raises DamagedCheckpoint if `.metadata`, which no manifest knows, was written by `Writer`.

    It is not unpickled to find out, because it may contain anything.
    """
    for name, manifest in manifests.items():
        # The file has the id several times, so one damaged occurrence does not hide the others.
        if (save_id_of_manifest(name) or "").encode() in data:
            if isinstance(manifest, str):
                raise damaged(folder / name, manifest, COORDINATOR)
            manifest.require(folder / METADATA, found)
    named = sorted(save_ids_in(data))
    if named:
        others = "" if not manifests else f", or {METADATA} is another save's than {', '.join(manifests)}"
        raise damaged(folder / manifest_name(named[0]), f"is missing{others}", COORDINATOR)
