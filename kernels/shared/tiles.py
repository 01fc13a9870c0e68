"""Tiles of memory-bound kernels: one table, found by measuring on an H200.

It is a table without autotuning at run time: every run and every rank launches the same kernels, so that sums
over rows are bit-equal and no rank waits for one that still searches.  `benchmarks/tune.py` measures
candidates and rewrites the table.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

MULTIPROCESSORS = 132
"""Streaming multiprocessors (SMs) of an H100 or H200."""


class Tile(NamedTuple):
    """The part of a tensor that one program works on.

    Attributes:
        rows, cols: size of a tile; a kernel for whole rows keeps to rows * cols and chooses `cols` itself.
        warps: number of warps in a program.
        stages: tiles in flight from memory at a time, in kernels that loop over several.
        steps: tiles that a program takes, one below the other.
        registers: largest number of registers of a thread; None leaves it to the compiler.
    """

    rows: int
    cols: int
    warps: int
    stages: int = 1
    steps: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Launch options of Triton."""
        return {"num_warps": self.warps, "maxnreg": self.registers}


TILES: dict[tuple[str, int, int], Tile] = {
    # kernel, bytes of an element, largest number of columns
    ("cast", 2, 16384): Tile(128, 64, 4),
    ("cast", 4, 16384): Tile(64, 64, 4),
    ("cast, sum", 2, 16384): Tile(128, 64, 4),
    ("cast, sum", 4, 16384): Tile(64, 64, 4),
    ("column_sum", 2, 6144): Tile(256, 32, 4, 4),
    ("column_sum", 2, 16384): Tile(128, 64, 8, 4),
    ("max_abs", 2, 16384): Tile(1, 16384, 8),
    ("activation_forward", 2, 16384): Tile(16, 256, 4),
    ("activation_forward, transpose", 2, 16384): Tile(64, 128, 8),
    ("activation_forward, gated", 2, 16384): Tile(16, 256, 4),
    ("activation_forward, gated, transpose", 2, 16384): Tile(64, 64, 8),
    ("activation_backward", 2, 16384): Tile(16, 256, 4),
    ("activation_backward, transpose", 2, 16384): Tile(64, 64, 4),
    ("activation_backward, sum", 2, 16384): Tile(64, 64, 8, 3, 4, 64),
    ("activation_backward, gated", 2, 16384): Tile(16, 256, 8),
    ("activation_backward, gated, transpose", 2, 16384): Tile(64, 64, 8),
    ("activation_backward, gated, sum", 2, 16384): Tile(64, 64, 8),
    ("max_abs_many", 4, 65536): Tile(1, 16384, 8),
    ("cast_many", 4, 65536): Tile(1, 4096, 8),
    ("dropout_forward", 2, 16384): Tile(8, 256, 4),
    ("dropout_backward", 2, 16384): Tile(8, 256, 4),
    ("dropout_backward, sum", 2, 16384): Tile(8, 128, 2, 1, 16),
    ("accumulate_many", 2, 65536): Tile(1, 4096, 8),
    ("adamw", 4, 65536): Tile(1, 1024, 8),
    ("sgd", 4, 65536): Tile(1, 1024, 8),
    ("embedding_grad", 2, 16384): Tile(1, 2048, 4, 6),
    ("embedding_grad, sort", 2, 16384): Tile(16, 128, 4, steps=8),
    ("cross_entropy_statistics", 2, 131072): Tile(1, 4096, 8),
    ("cross_entropy_grad", 2, 131072): Tile(1, 2048, 4),
    ("rope", 2, 16384): Tile(1, 2048, 4),
    ("join_heads", 2, 16384): Tile(1, 4096, 4),
    ("layer_norm", 2, 4096): Tile(1, 4096, 4, 3),
    ("layer_norm", 2, 8192): Tile(1, 8192, 8, 3, 8),
    ("layer_norm", 2, 16384): Tile(1, 16384, 16),
    ("rms_norm", 2, 8192): Tile(1, 8192, 8),
    ("rms_norm", 2, 16384): Tile(1, 16384, 16),
    ("layer_norm, transpose", 2, 4096): Tile(1, 4096, 4, 3, 4),
    ("layer_norm, transpose", 2, 8192): Tile(2, 8192, 8),
    ("layer_norm, transpose", 2, 16384): Tile(1, 16384, 16),
    ("rms_norm, transpose", 2, 4096): Tile(2, 4096, 8, registers=64),
    ("rms_norm, transpose", 2, 8192): Tile(1, 8192, 8, registers=64),
    ("rms_norm, transpose", 2, 16384): Tile(1, 16384, 8),
    ("wide_norm", 2, 65536): Tile(32, 128, 8, 4),
    ("norm_backward", 2, 4096): Tile(1, 4096, 8, 3),
    ("norm_backward", 2, 16384): Tile(1, 8192, 16, 3),
    ("norm_backward, sum", 2, 65536): Tile(32, 128, 4, 3),
    ("sum_bands", 4, 4096): Tile(256, 32, 8),
    ("sum_bands", 4, 8192): Tile(128, 64, 8),
    ("sum_bands", 4, 16384): Tile(128, 128, 8),
    ("transpose", 1, 16384): Tile(256, 128, 8),
}


@cache
def find(kernel: str, dtype: torch.dtype, cols: int) -> Tile:
    """The tile of the narrowest class that holds `cols` columns, or else of the widest.

    A kernel without tiles for elements of this size uses those for 2 bytes.
    """
    of_kernel = [at for at in TILES if at[0] == kernel]
    classes = [at for at in of_kernel if at[1] == dtype.itemsize] or [at for at in of_kernel if at[1] == 2]
    return TILES[min(classes, key=lambda at: (at[2] < cols, abs(at[2] - cols)))]


def power_of_two(value: int) -> int:
    """Smallest power of two not below `value`; at least 1."""
    return 1 << max(0, value - 1).bit_length()
