"""The table of tiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatfsdp.kernels.shared import tiles as _tiles
from flatfsdp.kernels.shared.tiles import TILES, Tile, find, power_of_two


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiles = {
        ("some", 2, 4096): Tile(1, 2, 4),
        ("some", 2, 8192): Tile(3, 4, 8),
        ("some", 4, 64): Tile(5, 6, 1),
    }
    monkeypatch.setattr(_tiles, "TILES", tiles)
    find.cache_clear()
    yield
    find.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("dtype", "cols", "rows"),
    [
        *((torch.bfloat16, 1, 1), (torch.float16, 4096, 1), (torch.bfloat16, 4097, 3)),
        *((torch.bfloat16, 100_000, 3), (torch.float32, 4096, 5), (torch.float8_e5m2, 4096, 1)),
    ],
)
def test_the_narrowest_class_that_holds_the_columns(dtype: torch.dtype, cols: int, rows: int) -> None:
    assert find("some", dtype, cols).rows == rows


def test_tiles_are_what_triton_can_have() -> None:
    for kernel, size, cols in TILES:
        tile = TILES[kernel, size, cols]
        assert size in (1, 2, 4) and find(
            kernel, {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[size], cols
        )
        assert all(power_of_two(value) == value for value in (tile.rows, tile.cols, tile.warps))
        assert tile.options == {"num_warps": tile.warps, "maxnreg": tile.registers}
