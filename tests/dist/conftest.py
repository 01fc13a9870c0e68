"""Each file has ranks of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import stop_pools


@pytest.fixture(scope="module", autouse=True)
def _own_ranks() -> Iterator[None]:
    yield
    stop_pools()
