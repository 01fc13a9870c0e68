"""Real text as bytes: every byte is a token, so there is no tokenizer to train or download.

In:   nothing (the running Python's standard library), or a path to any file or folder.
Out:  its bytes (uint8), and a `Sampler` that cuts (tokens, targets) batches from them.
Next: `training/jobs.py` draws one batch for each step, microbatch and rank; `examples/pretrain_llama.py`
      draws windows by their number in the whole run.
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


@dataclass(frozen=True, eq=False)
class Sampler:
    """Random windows of `seq` bytes; a pure function of `seed` and of the call's arguments.

    Attributes:
        bytes_n: the text, uint8 [n], on the CPU.
    """

    bytes_n: Tensor
    batch: int
    seq: int
    seed: int

    def __post_init__(self) -> None:
        size = len(self.bytes_n)
        if size <= self.seq:
            raise ValueError(f"the text has {size} bytes, not {self.seq + 1}; choose another --data or --seq")

    def sample(self, step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
        """Draws tokens and targets, int64 [batch, seq] each; the targets are shifted by one byte."""
        return self._windows(self._starts(f"{step}/{microbatch}/{rank}", self.batch))

    def sample_from(self, number: int) -> tuple[Tensor, Tensor]:
        """Draws the windows `number`, `number` + 1, ... of an endless sequence: one batch, as `sample` does.

        A window depends on its number alone.  So a run that counts its windows, over all ranks, may go on
        with another batch or on other ranks, and leaves none out and draws none again.
        """
        starts = [self._starts(f"{each}", 1) for each in range(number, number + self.batch)]
        return self._windows(torch.cat(starts))

    def _starts(self, key: str, count: int) -> Tensor:
        """Positions of the first bytes of this many windows, int64 [count]."""
        # A hash instead of a sum: neighbouring ranks, microbatches and steps must not share a seed.
        digest = hashlib.blake2b(f"{self.seed}/{key}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randint(len(self.bytes_n) - self.seq, (count,), generator=generator)

    def _windows(self, starts_b: Tensor) -> tuple[Tensor, Tensor]:
        window_bt = self.bytes_n[starts_b[:, None] + torch.arange(self.seq + 1)].long()
        return window_bt[:, :-1].contiguous(), window_bt[:, 1:].contiguous()


def load_corpus(path: Path | None) -> Tensor:
    """Reads `path`, or the standard library's sources if there is none: uint8 [n], n > 0, on the CPU.

    A folder is read file by file in the order of the sorted paths, without hidden files.  At most
    `PATH_LIMIT` (standard library: `STDLIB_LIMIT`) bytes are read.

    Raises:
        ValueError: if there is nothing to read, or the path is a URL.
        OSError: if something cannot be read.
    """
    if path is None:
        limit = STDLIB_LIMIT
        found = _files(Path(sysconfig.get_path("stdlib")), _SKIPPED_FOLDERS)
        files: Iterator[Path] = (file for file in found if file.suffix == ".py")
    else:
        path, limit = local_path(path), PATH_LIMIT
        if not path.exists():
            raise ValueError(f"{path} does not exist; --data takes a file or a folder")
        files = _files(path, frozenset()) if path.is_dir() else iter([path])
    content = bytearray()
    for file in files:
        with file.open("rb") as stream:
            content += stream.read(limit - len(content))
        if len(content) == limit:
            break
    if not content:
        raise ValueError(f"{path} holds no bytes; choose another --data")
    return torch.frombuffer(content, dtype=torch.uint8)


def _files(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Every regular file below `folder`, in the same order on every rank."""
    for parent, folders, names in os.walk(folder):
        # os.walk descends in the order of this list.
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file
