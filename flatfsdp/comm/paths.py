"""Paths as users pass them: local ones or URLs, the same on all ranks; names that stay inside a folder.

In:   a path, or a name that a file of somebody else gives to another file.
Out:  a `pathlib.Path`, or an error before anything is read or written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks

_SCHEME = re.compile(r"[^/]{2,}:/")
"""Beginning of a URL; with one slash, as `pathlib` joins two, and with more letters than Windows' drives."""

P = TypeVar("P", bound=os.PathLike[str])


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL, such as s3://bucket/run, that a path is, also after `pathlib` has changed it; None if none."""
    text = os.fspath(path)
    relative = text
    if os.path.isabs(text) and _SCHEME.search(text):
        # What abspath or resolve make of a URL.
        relative = text.removeprefix(f"{os.getcwd()}/")
    if not _SCHEME.match(relative):
        return None
    # `pathlib` has joined the two slashes.
    return relative if "://" in relative else relative.replace(":/", "://", 1)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a local file or folder.

    Raises:
        ValueError: if it is a URL, such as s3://bucket/run: the system would take that for a local folder.
    """
    url = url_of(path)
    if url is not None:
        instead = (
            f"pass it without the scheme: /{url.removeprefix('file:').lstrip('/')}"
            if url.startswith("file:")
            else "write to a disk, or mount the storage as a folder that all ranks see, and pass that "
            "folder; only CheckpointManager, and save and load of flatfsdp.checkpoint, take URLs"
        )
        raise ValueError(f"{url} is a URL, and a file or folder of the system is needed; {instead}")
    return Path(path)


def path_of_all_ranks(
    path: str | os.PathLike[str], dimensions: Sequence[Ranks], device: torch.device
) -> Path:
    """The local path that all ranks pass; see `same_on_all_ranks`.  Collective."""
    return same_on_all_ranks(local_path, path, dimensions, device)


def same_on_all_ranks(
    parse: Callable[[str | os.PathLike[str]], P],
    path: str | os.PathLike[str],
    dimensions: Sequence[Ranks],
    device: torch.device,
) -> P:
    """What `parse` makes of the path that all ranks pass.  Collective.

    Args:
        parse: makes a path, or raises for one that is none, such as `local_path` for a URL.
        path: the path on this rank.
        dimensions: dimensions of the grid of ranks that have to pass the same.
        device: device to communicate on.

    Raises:
        ValueError: on every rank, if ranks pass different paths.
        Exception: on every rank, what `parse` raises on one of them.
    """
    # An error is told like a path.  Raised here, it would leave the other ranks waiting in the exchange
    # below.
    told: tuple[str, Exception | None]
    parsed: P | None = None
    try:
        parsed = parse(path)
        told = os.path.normpath(parsed) if isinstance(parsed, Path) else os.fspath(parsed), None
    except (ValueError, TypeError, OSError, ImportError) as error:
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
    assert parsed is not None
    return parsed


def is_inside(name: Any) -> bool:
    """Whether `name` is that of a file in a folder, or in a folder in it, and does not lead out of it."""
    return isinstance(name, str) and not PurePath(name).is_absolute() and ".." not in PurePath(name).parts
