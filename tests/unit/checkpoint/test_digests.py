"""Digests are the same however a file is written or read, and a manifest says whether it is whole itself."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from torch import Tensor, arange

from flatfsdp.checkpoint import digests
from flatfsdp.checkpoint.digests import DigestingFile, FileDigest, digest_of, digest_of_file
from flatfsdp.checkpoint.manifest import FileRecord, Manifest, is_ours, parse_manifest


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 12345])
def test_a_digest_does_not_depend_on_the_way_of_writing(
    size: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces here, so that views end inside of them, at their ends, and span several."""
    monkeypatch.setattr(digests, "PIECE", 100)
    monkeypatch.setattr(digests, "THREADS", threads)
    chance = random.Random(size)
    data = chance.randbytes(size)
    with closing(DigestingFile(tmp_path / "file")) as file:
        start = 0
        while start < size:
            length = chance.choice([1, 39, 50, 100, 450])
            assert file.write(data[start : start + length]) == len(data[start : start + length])
            start += length
    assert (tmp_path / "file").read_bytes() == data
    assert file.digest == digest_of(data) == FileDigest(size, digest_of(data).sha256)
    with ThreadPoolExecutor(threads) as pool:
        assert digest_of_file(tmp_path / "file", pool, lambda: False) == digest_of(data)


def test_a_view_may_change_after_it_was_written(tmp_path: Path) -> None:
    values: Tensor = arange(3 * digests.PIECE // 8)
    with closing(DigestingFile(tmp_path / "file")) as file:
        file.write(memoryview(values.numpy()))
        values.zero_()
    assert file.digest == digest_of((tmp_path / "file").read_bytes())


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError):
        DigestingFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


MANIFEST = Manifest(
    "0123456789ab",
    {
        ".metadata": FileRecord(0, digest_of(b"x")),
        "a": FileRecord(3, digest_of(b"")),
        "b": FileRecord(1, FileDigest(7, None)),
    },
)


def test_a_manifest_comes_back() -> None:
    assert parse_manifest(MANIFEST.name, MANIFEST.to_bytes()) == MANIFEST
    with pytest.raises(ValueError, match="is of another save, 0123456789ab"):
        parse_manifest("manifest-ba9876543210.json", MANIFEST.to_bytes())


def test_every_bit_of_a_manifest_counts() -> None:
    data = MANIFEST.to_bytes()
    for number in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[number // 8] ^= 1 << number % 8
        with pytest.raises(ValueError, match=r"does not hold what was written|has format"):
            parse_manifest(MANIFEST.name, bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(ValueError, match="does not hold what was written"):
            parse_manifest(MANIFEST.name, data[:length])


def test_only_our_names_are_ours() -> None:
    assert all(map(is_ours, [MANIFEST.name, "extra-0123456789ab.pt", "__17_0123456789ab_0.distcp"]))
    others = [
        ".metadata",
        "__0_0.distcp",
        "extra-1.pt",
        "manifest.json",
        "model.pt",
        "__0_0123456789ab_0.distcp.bak",
    ]
    assert not any(map(is_ours, others))
