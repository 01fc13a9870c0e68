"""Opens a checkpoint's folder: reads and verifies everything except data files.

In:   a folder.
Out:  an `OpenCheckpoint`, the same on all ranks: one rank reads, and each decodes what that one has read.
Next: `fit.py` compares it with the model; `verification.py` checks data files.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from flatfsdp.checkpoint.digests import FileDigest, digest_of
from flatfsdp.checkpoint.errors import CheckpointError, asked_for, damaged, unreadable
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
from flatfsdp.checkpoint.reader import unpickled_metadata
from flatfsdp.comm.objects import all_gather_object, broadcast_object
from flatfsdp.comm.paths import path_of_all_ranks
from flatfsdp.comm.ranks import Ranks


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of which everything except data files has been read and verified.

    Attributes:
        folder: the checkpoint's folder.
        metadata: contents of `.metadata`.
        manifest: the save's manifest; None if plain torch.distributed.checkpoint has written it.
        extra_data: contents of the file with `extra`; None if there is none.
    """

    folder: Path
    metadata: Metadata
    manifest: Manifest | None
    extra_data: bytes | None

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


def data_files(metadata: Metadata) -> dict[str, int]:
    """The files that the metadata names, with the bytes that each must have at least."""
    files: dict[str, int] = {}
    for about in metadata.storage_data.values():
        end = about.offset + about.length
        files[about.relative_path] = max(end, files.get(about.relative_path, 0))
    return files


def open_checkpoint(path: str | os.PathLike[str], world: Ranks, device: torch.device) -> OpenCheckpoint:
    """Reads everything except data files on one rank, for all.  Collective.

    Raises:
        ValueError: if the path is a URL, or ranks pass different ones.
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpoint: if something is missing or damaged there.
        CheckpointError: if something cannot be read, or a rank does not see the folder.
        All of them are raised on every rank.
    """
    folder = path_of_all_ranks(path, [world], device)
    sees = all_gather_object(folder.exists(), world, device)
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
    if not isinstance(contents, _Contents):
        assert contents is not None
        raise contents
    return _decoded(folder, contents)


def read_folder(folder: Path) -> OpenCheckpoint:
    """Reads the folder on this rank alone; raises like `open_checkpoint`."""
    return _decoded(folder, _read_contents(folder))


class _Contents(NamedTuple):
    """All files of a checkpoint except data files: raw, and verified if a digest is known.

    Attributes:
        manifest: manifest that belongs to `metadata`, if there is one.
        is_beside_manifests: whether the folder has any manifest.
    """

    metadata: bytes
    extra: bytes | None
    manifest: Manifest | None
    is_beside_manifests: bool


def _read_contents(folder: Path) -> _Contents:
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "there is no such folder"
        raise FileNotFoundError(f"no checkpoint at {folder}: {what}")
    manifests = _manifests(folder)
    valid = {name: each for name, each in manifests.items() if isinstance(each, Manifest)}
    try:
        data = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        if not any(is_ours(name) for name in os.listdir(folder)):
            raise damaged(folder / METADATA, "is missing, so this is no checkpoint") from None
        raise damaged(
            folder / METADATA,
            "is missing: a save to this folder did not end, or the file was removed",
            COORDINATOR,
        ) from None
    found = digest_of(data)
    manifest = next((each for each in valid.values() if each.files[METADATA].digest == found), None)
    if manifest is None:
        _check_is_not_ours(folder, data, found, manifests)
        return _Contents(data, None, None, bool(manifests))
    return _Contents(data, _read_extra(folder, manifest), manifest, True)


def _decoded(folder: Path, contents: _Contents) -> OpenCheckpoint:
    """Decodes what one rank has read.

    Raises:
        DamagedCheckpoint: on every rank alike, if the contents are not a checkpoint's.
    """
    try:
        metadata = unpickled_metadata(contents.metadata)
    except pickle.UnpicklingError as error:
        writer = COORDINATOR if contents.is_beside_manifests else None
        raise damaged(folder / METADATA, f"is refused: {error}", writer) from None
    manifest = contents.manifest
    if manifest is not None:
        unknown = sorted(data_files(metadata).keys() - manifest.files.keys())
        if unknown:
            raise damaged(
                folder / METADATA, f"names {unknown[0]}, which {manifest.name} does not", COORDINATOR
            )
    return OpenCheckpoint(folder, metadata, manifest, contents.extra)


def _manifests(folder: Path) -> dict[str, Manifest | str]:
    """All manifests in the folder, by file name; a string says what is wrong with one."""
    found: dict[str, Manifest | str] = {}
    for name in sorted(os.listdir(folder)):
        if save_id_of_manifest(name) is not None:
            try:
                found[name] = parse_manifest(name, (folder / name).read_bytes())
            except ValueError as error:
                found[name] = str(error)
    return found


def _check_is_not_ours(
    folder: Path, data: bytes, found: FileDigest, manifests: Mapping[str, Manifest | str]
) -> None:
    """Raises DamagedCheckpoint if `.metadata`, which no manifest knows, was written by `Writer`.

    It is not unpickled to find out, because it may contain anything.
    """
    # The file has the id several times, so one damaged occurrence does not hide the others.
    known = {name for name in manifests if (save_id_of_manifest(name) or "").encode() in data}
    for name in sorted(known):
        problem = manifests[name]
        if isinstance(problem, str):
            raise damaged(folder / name, problem, COORDINATOR)
        raise damaged(folder / METADATA, difference(problem.files[METADATA].digest, found), COORDINATOR)
    named = sorted(save_ids_in(data))
    if named:
        others = "" if not manifests else f", or {METADATA} is another save's than {', '.join(manifests)}"
        raise damaged(folder / manifest_name(named[0]), f"is missing{others}", COORDINATOR)


def _read_extra(folder: Path, manifest: Manifest) -> bytes | None:
    name = extra_name(manifest.save_id)
    record = manifest.files.get(name)
    if record is None:
        return None
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise damaged(folder / name, "is missing", record.rank) from None
    found = digest_of(data)
    if found != record.digest:
        raise damaged(folder / name, difference(record.digest, found), record.rank)
    return data


def difference(written: FileDigest, found: FileDigest) -> str:
    """Describes the difference between what was written and what was found."""
    if written.bytes != found.bytes:
        return f"has {found.bytes} bytes, and {written.bytes} were written"
    return (
        f"does not hold what was written there: its digest is {found.sha256[:12]}..., "
        f"and was {written.sha256[:12]}..."
    )
