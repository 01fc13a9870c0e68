"""The manifest of a checkpoint: the files of one save, each with its rank, length and digest.

In:   what the ranks have written, with its digests (`commit`), which data files may lack; or
      `manifest-<save id>.json`.
Out:  a folder whose checkpoint this save is; or a `Manifest`, which tells damaged files from whole ones.
Next: `opening.py` finds the manifest that belongs to `.metadata`, and reads the rest.

    .metadata                  torch.distributed.checkpoint's own; it makes the checkpoint
    __<rank>_<id>_<n>.distcp   data of a rank
    extra-<id>.pt              the `extra` of the save
    manifest-<id>.json         the list of all these

Each save has an id, which is part of its file names, so files of two saves never replace each other.
`commit` brings everything to the disk before one rename makes it the checkpoint:

    extra-<id>.pt, .metadata.tmp, manifest-<id>.json      written and flushed to disk, like data files before
    .metadata.tmp -> .metadata                            the commit: until then the old checkpoint loads
    files of other saves                                  removed

In an object store `.metadata` itself is put instead, after all others.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from flatfsdp.checkpoint.digests import FileDigest, digest_of
from flatfsdp.checkpoint.errors import CheckpointError, damaged, reason
from flatfsdp.checkpoint.media import medium_of
from flatfsdp.checkpoint.store import Place

METADATA = ".metadata"
"""File that torch.distributed.checkpoint looks for first."""
TEMPORARY = ".metadata.tmp"
"""Its name on a disk until the save ends."""
COORDINATOR = 0
"""The rank that writes everything but data files."""

_FORMAT = 1
_ID = "[0-9a-f]{12}"
_MANIFEST = re.compile(f"manifest-({_ID})\\.json")
_DATA = re.compile(f"__[0-9]+_({_ID})_[0-9]+\\.distcp")
_EXTRA = re.compile(f"extra-({_ID})\\.pt")
_DATA_IN_BYTES = re.compile(_DATA.pattern.encode())


def data_prefix(rank: int, save_id: str) -> str:
    """Beginning of the names of a rank's data files; their number in the save follows."""
    return f"__{rank}_{save_id}_"


def extra_name(save_id: str) -> str:
    """Name of the file with `extra`."""
    return f"extra-{save_id}.pt"


def manifest_name(save_id: str) -> str:
    """Name of a save's manifest."""
    return f"manifest-{save_id}.json"


def save_id_of_manifest(name: str) -> str | None:
    """Id of the save whose manifest has this file name; None if it is not a manifest."""
    found = _MANIFEST.fullmatch(name)
    return found[1] if found else None


def is_ours(name: str) -> bool:
    """Whether `Writer` gives files such names; `.metadata` does not count, as any writer makes it."""
    return any(pattern.fullmatch(name) for pattern in (_MANIFEST, _DATA, _EXTRA))


def save_ids_in(metadata: bytes) -> set[str]:
    """Ids of the saves whose data files `.metadata` names, found without unpickling it."""
    return {found[1].decode() for found in _DATA_IN_BYTES.finditer(metadata)}


class FileRecord(NamedTuple):
    """Entry of a manifest for one file.

    Attributes:
        rank: rank that wrote the file.
        digest: length and digest of the file.
    """

    rank: int
    digest: FileDigest


@dataclass(frozen=True)
class Manifest:
    """All files of one save except the manifest itself, by file name."""

    save_id: str
    files: Mapping[str, FileRecord]

    @property
    def name(self) -> str:
        """The manifest's file name."""
        return manifest_name(self.save_id)

    def to_bytes(self) -> bytes:
        """Contents of the file: JSON, with the same bytes for the same contents."""
        contents = {
            "format": _FORMAT,
            "save_id": self.save_id,
            "files": {
                name: {"rank": rank, **digest._asdict()} for name, (rank, digest) in self.files.items()
            },
        }
        own = hashlib.sha256(_json(contents)).hexdigest()
        return _json({**contents, "sha256": own})

    def read(self, path: Place) -> bytes:
        """Reads a file of the save whole; raises DamagedCheckpoint if it is not as it was written."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise damaged(path, "is missing", self.files[path.name].rank) from None
        self.require(path, digest_of(data))
        return data

    def require(self, path: Place, found: FileDigest) -> None:
        """Raises DamagedCheckpoint if a file of the save does not hold what was written there."""
        rank, written = self.files[path.name]
        if found.bytes != written.bytes:
            raise damaged(path, f"has {found.bytes} bytes, and {written.bytes} were written", rank)
        if written.sha256 is not None and found.sha256 != written.sha256:
            digests = f"its digest is {found.sha256:.12}..., and was {written.sha256:.12}..."
            raise damaged(path, f"does not hold what was written there: {digests}", rank)


def parse_manifest(name: str, data: bytes) -> Manifest:
    """Parses a manifest file.

    Raises:
        ValueError: with a description of the damage, unless every byte is as `Manifest.to_bytes` wrote it.
    """
    try:
        contents = json.loads(data)
        version, save_id = contents["format"], contents["save_id"]
        if version != _FORMAT:
            raise ValueError(f"has format {version!r}, and this version reads {_FORMAT}")
        files = {
            name: FileRecord(each["rank"], FileDigest(each["bytes"], each["sha256"]))
            for name, each in contents["files"].items()
        }
        manifest = Manifest(save_id, files)
        is_whole = manifest.to_bytes() == data and METADATA in files
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        is_whole = False
    if not is_whole:
        raise ValueError("does not hold what was written there: its own digest differs")
    if manifest.name != name:
        raise ValueError(f"is of another save, {save_id}")
    return manifest


def _json(contents: object) -> bytes:
    return (json.dumps(contents, indent=1, sort_keys=True) + "\n").encode()


def commit(
    folder: Place, save_id: str, data_files: Mapping[str, FileRecord], metadata: bytes, extra: bytes | None
) -> None:
    """Makes a save the folder's checkpoint; runs on one rank, after all have written.

    Raises:
        OSError: if something cannot be written.
        CheckpointError: if a data file is not here, or has another length than its rank has written.
        In both cases the old checkpoint, if any, remains the folder's.
    """
    _check_lengths(folder, save_id, data_files)
    contents = {METADATA: metadata}
    if extra is not None:
        contents[extra_name(save_id)] = extra
    records = {name: FileRecord(COORDINATOR, digest_of(data)) for name, data in contents.items()}
    manifest = Manifest(save_id, {**data_files, **records})
    contents[manifest.name] = manifest.to_bytes()
    medium_of(folder).commit(contents, METADATA)
    # From here on it is the folder's checkpoint, even if the rest fails.
    try:
        medium_of(folder).flush()
        # Files of overwritten or unfinished saves; what stays is removed by the next save.
        for path in folder.iterdir():
            if is_ours(path.name) and path.name not in manifest.files and path.name != manifest.name:
                with suppress(OSError):
                    path.unlink()
    except OSError as error:
        warnings.warn(f"{folder} is saved, but not tidied: {reason(error)}", stacklevel=2)


def _check_lengths(folder: Place, save_id: str, files: Mapping[str, FileRecord]) -> None:
    lengths = medium_of(folder).lengths(files)
    for name, (rank, digest) in files.items():
        path = folder / name
        if not name.startswith(data_prefix(rank, save_id)):
            raise CheckpointError(f"{path} is not of this save ({save_id}); give each save a plan of its own")
        if name not in lengths:
            raise CheckpointError(
                f"rank {rank} wrote {path}, which rank {COORDINATOR} does not see; save to storage that all "
                "ranks share"
            )
        if lengths[name] != digest.bytes:
            raise CheckpointError(
                f"rank {rank} wrote {digest.bytes} bytes to {path}, which has {lengths[name]}"
            )
