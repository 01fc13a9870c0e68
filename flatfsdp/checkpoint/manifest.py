"""The manifest of a checkpoint: the files of one save, each with its rank, length and digest.

In:   `manifest-<save id>.json`.
Out:  a `Manifest`, if the file is undamaged: it contains its own digest.
Next: `commit.py` writes it just before the rename; `opening.py` finds the one that belongs to `.metadata`.

    .metadata                  torch.distributed.checkpoint's own; its rename makes the checkpoint
    __<rank>_<id>_<n>.distcp   data of a rank
    extra-<id>.pt              the `extra` of the save
    manifest-<id>.json         the list of all these

Each save has an id, which is part of its file names, so files of two saves never replace each other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flatfsdp.checkpoint.digests import FileDigest

METADATA = ".metadata"
"""File that torch.distributed.checkpoint looks for first."""
TEMPORARY = ".metadata.tmp"
"""Its name until the save ends."""
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
                name: {"rank": rank, "bytes": digest.bytes, "sha256": digest.sha256}
                for name, (rank, digest) in self.files.items()
            },
        }
        own = hashlib.sha256(_json(contents)).hexdigest()
        return _json({**contents, "sha256": own})


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
