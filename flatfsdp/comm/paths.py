"""Paths as users pass them: local ones, the same on all ranks, and names that stay inside a folder.

In:   a path, or a name that a file of somebody else gives to another file.
Out:  a `pathlib.Path`, or an error before anything is read or written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist

from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks

_SCHEME = re.compile(r"[^/]{2,}:/")
"""Beginning of a URL; with one slash, as `pathlib` joins two, and with more letters than Windows' drives."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a local file or folder.

    Raises:
        ValueError: if it is a URL, such as s3://bucket/run: the system would take that for a local folder.
    """
    text = os.fspath(path)
    relative = text
    if os.path.isabs(text) and _SCHEME.search(text):
        # What abspath or resolve make of a URL.
        relative = text.removeprefix(f"{os.getcwd()}/")
    if _SCHEME.match(relative):
        # `pathlib` has joined the two slashes.
        url = relative if "://" in relative else relative.replace(":/", "://", 1)
        instead = (
            f"pass it without the scheme: /{url.removeprefix('file:').lstrip('/')}"
            if url.startswith("file:")
            else "write to a disk, or mount the storage as a folder that all ranks see, and pass that folder"
        )
        raise ValueError(f"{url} is a URL, and FlatFSDP reads and writes files of the system; {instead}")
    return Path(path)


def path_of_all_ranks(
    path: str | os.PathLike[str], dimensions: Sequence[Ranks], device: torch.device
) -> Path:
    """The local path that all ranks pass.  Collective.

    Args:
        path: the path on this rank.
        dimensions: dimensions of the grid of ranks that have to pass the same.
        device: device to communicate on.

    Raises:
        ValueError: on every rank, if ranks pass different paths, or one of them passes a URL.
    """
    # An error is told like a path.  Raised here, it would leave the other ranks waiting in the exchange
    # below.
    told: tuple[str, Exception | None]
    try:
        told = os.path.normpath(local_path(path)), None
    except (ValueError, TypeError, OSError) as error:
        told = str(path), error
    said = {dist.get_rank() if dist.is_initialized() else 0: told}
    for ranks in dimensions:
        for theirs in all_gather_object(said, ranks, device):
            said.update(theirs)
    (first, (expected, _)), *_ = sorted(said.items())
    # In the order of ranks, so that all raise the same error.
    for rank, (found, refusal) in sorted(said.items()):
        if refusal is not None:
            raise refusal
        if found != expected:
            raise ValueError(
                f"ranks were given different paths: rank {first} {expected}, rank {rank} {found}; pass one"
            )
    return Path(path)


def is_inside(name: Any) -> bool:
    """Whether `name` is that of a file in a folder, or in a folder in it, and does not lead out of it."""
    return isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
