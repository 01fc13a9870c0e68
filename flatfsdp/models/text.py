"""Real text as bytes: every byte is a token, so there is no tokenizer to train or download.

In:   nothing (the running Python's standard library), or a path to any file or folder.
Out:  a `Corpus` (uint8), and a `Sampler` that cuts (tokens, targets) batches from it.
Next: `training/jobs.py` draws one batch for each step, microbatch and rank.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatfsdp.comm.paths import local_path

STDLIB_LIMIT = 8 * 2**20
PATH_LIMIT = 64 * 2**20

# Tests repeat themselves and hold deliberately broken text; installed packages differ between machines.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class DataError(ValueError):
    """An error for unusable data; the message says why, and what to do."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes.

    Attributes:
        bytes_n: uint8 [n], n > 0, on the CPU.
        source: its origin, for messages and reports.
    """

    bytes_n: Tensor
    source: str

    def __post_init__(self) -> None:
        if not len(self.bytes_n):
            raise DataError(f"{self.source} holds no bytes; choose another --data")


@dataclass(frozen=True, eq=False)
class Sampler:
    """Random windows of `seq` bytes; a pure function of `seed` and of the call's arguments."""

    corpus: Corpus
    batch: int
    seq: int
    seed: int

    def __post_init__(self) -> None:
        size = len(self.corpus.bytes_n)
        if size < self.seq + 1:
            raise DataError(
                f"{self.corpus.source} holds {size} bytes, not {self.seq + 1}; choose another --data or --seq"
            )

    def sample(self, step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
        """Draws tokens and targets, int64 [batch, seq] each; the targets are shifted by one byte."""
        key = f"{self.seed}/{step}/{microbatch}/{rank}".encode()
        # A hash instead of a sum: neighbouring ranks, microbatches and steps must not share a seed.
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        starts_b = torch.randint(len(self.corpus.bytes_n) - self.seq, (self.batch,), generator=generator)
        window_bt = self.corpus.bytes_n[starts_b[:, None] + torch.arange(self.seq + 1)].long()
        return window_bt[:, :-1].contiguous(), window_bt[:, 1:].contiguous()


def load_corpus(path: Path | None) -> Corpus:
    """Reads `path`, or the standard library's sources if there is none.

    A folder is read file by file in the order of the sorted paths, without hidden files.  At most
    `PATH_LIMIT` (standard library: `STDLIB_LIMIT`) bytes are read.

    Raises:
        DataError: if there is nothing to read, or it cannot be read.
        ValueError: if the path is a URL.
    """
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = (file for file in _files(folder, _SKIPPED_FOLDERS) if file.suffix == ".py")
        return Corpus(_read(sources, STDLIB_LIMIT), "the Python standard library")
    path = local_path(path)
    if path.is_dir():
        return Corpus(_read(_files(path, frozenset()), PATH_LIMIT), str(path))
    if not path.exists():
        raise DataError(f"{path} does not exist; --data takes a file or a folder")
    return Corpus(_read(iter([path]), PATH_LIMIT), str(path))


def _files(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Every regular file below `folder`, in the same order on every rank."""
    for parent, folders, names in os.walk(folder):
        # os.walk descends in the order of this list.
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _read(files: Iterator[Path], limit: int) -> Tensor:
    """The concatenated bytes of the files, uint8 [n] with n <= limit."""
    content = bytearray()
    for file in files:
        try:
            with file.open("rb") as stream:
                content += stream.read(limit - len(content))
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        if len(content) == limit:
            break
    # torch.frombuffer refuses an empty buffer.
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
