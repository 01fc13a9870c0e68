"""The preferred tile is the fastest of those measured on an H200."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.kernels.gemm.cublas_lt import Product
from flatfsdp.kernels.gemm.tiles import preferred_tile

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


def forward(*sizes: int, **options: Any) -> str | None:
    return preferred_tile(Product(*sizes, E4M3, E4M3, BF16, **options))


@pytest.mark.parametrize(
    ("sizes", "tile"),
    [
        *(((8192, 12288, 4096), "TILE_176x128"), ((8192, 16384, 4096), "TILE_168x128")),
        *(((4096, 12288, 4096), "TILE_176x128"), ((4096, 6144, 4096), "TILE_168x128")),
        *(((2048, 12288, 4096), "TILE_168x128"), ((16384, 4096, 14336), "TILE_128x160")),
        *(((2048, 4096, 16384), None), ((2048, 7168, 8192), "TILE_176x128")),
        *(((8192, 4096, 4096), "TILE_128x160"), ((8192, 4096, 14336), None)),
    ],
)
def test_forward_products_take_the_shortest_waves(sizes: tuple[int, int, int], tile: str | None) -> None:
    assert forward(*sizes) == tile


def test_others_than_large_fp8_forward_products_take_the_first_choice() -> None:
    assert forward(8192, 12288, 4096) is not None
    assert forward(1024, 12288, 4096) is None
    assert forward(8192, 12288, 4096, split_accumulator=True) is None
    assert preferred_tile(Product(8192, 12288, 4096, BF16, BF16, BF16)) is None


@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("sizes", "dtype", "tile"),
    [
        *(((12288, 4096, 8192), BF16, "TILE_128x160"), ((4096, 4096, 8192), BF16, "TILE_128x128")),
        *(((1024, 1024, 8192), BF16, None), ((12288, 4096, 8192), E5M2, None)),
        ((12288, 4096, 1024), E5M2, "TILE_128x128"),
    ],
)
def test_weight_gradients(
    sizes: tuple[int, int, int], dtype: torch.dtype, tile: str | None, out_dtype: torch.dtype
) -> None:
    assert preferred_tile(Product(*sizes, dtype, dtype, out_dtype, sums_once=True)) == tile
