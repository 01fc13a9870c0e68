"""A URL never becomes a local folder, and a name in a file of somebody else never leads out of its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flatfsdp.comm.paths import is_inside, local_path

URLS = ["s3://bucket/run", "gs://bucket/run", "simplecache::s3://bucket/run", "dbfs:/bucket/run"]


@pytest.mark.parametrize("made_by", [str, Path, os.path.abspath, Path.absolute], ids=lambda by: by.__name__)
@pytest.mark.parametrize("url", URLS)
def test_urls_are_refused(url: str, made_by: Callable[..., str | Path]) -> None:
    given = made_by(Path(url) if made_by is Path.absolute else url)
    scheme = url.partition(":/")[0]
    with pytest.raises(ValueError, match=rf"^{scheme}:/.*bucket/run is a URL, .*; write to a disk, or mount"):
        local_path(given)


def test_the_path_in_a_file_url_is_named() -> None:
    for given in ("file:///data/run", Path("file:///data/run"), os.path.realpath("file:///data/run")):
        with pytest.raises(ValueError, match=r"^file:/.* is a URL.*; pass it without the scheme: /data/run$"):
            local_path(given)


@pytest.mark.parametrize("path", ["run", "run:1/step", "/data/10:30/a", "C:/data", "/data/run:/a", "ü:ß"])
def test_local_paths_stay_what_they_are(path: str) -> None:
    assert local_path(path) == local_path(Path(path)) == Path(path)


def test_names_inside_a_folder() -> None:
    assert is_inside("a.safetensors") and is_inside("below/..a")
    assert not any(map(is_inside, ["../a", "below/../../a", "/a", None, 3]))
