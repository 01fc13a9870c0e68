"""Ranks live for the whole folder: importing the libraries takes longer than using them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import stop_pools


@pytest.fixture(scope="package", autouse=True)
def _ranks_of_the_folder() -> Iterator[None]:
    yield
    stop_pools()
