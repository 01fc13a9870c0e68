"""Linear layers that ranks share: the numbers of one process, what is sent, and when."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.dist.ranks import run_ranks
from tests.dist.split_layers import Kind, compare, make_pair

WIDTH, OUT, FFN = 64, 96, 128
JOINT = (32, 16, 16)
"""Queries, keys and values of a joint projection."""

LAYERS: dict[str, tuple[Any, Kind, tuple[int, int], Any]] = {
    "column": (partial(Linear, WIDTH, OUT, parallel_mode="column"), "column", (WIDTH, OUT), None),
    "row": (partial(Linear, WIDTH, OUT, parallel_mode="row"), "row", (WIDTH, OUT), None),
    "joint": (
        partial(Linear, WIDTH, 64, parallel_mode="column", partition_sizes=JOINT),
        "column",
        (WIDTH, 64),
        JOINT,
    ),
    "several": (
        partial(
            Linear,
            WIDTH,
            64,
            parallel_mode="column",
            parameters_split={"q": 32, "k": 16, "v": 16},
            bias=False,
        ),
        "column",
        (WIDTH, 64),
        JOINT,
    ),
    "norm": (partial(LayerNormLinear, WIDTH, OUT, parallel_mode="column"), "column", (WIDTH, OUT), None),
    "mlp": (partial(LayerNormMLP, WIDTH, FFN, set_parallel_mode=True), "both", (WIDTH, WIDTH), None),
    "swiglu": (
        partial(
            LayerNormMLP, WIDTH, FFN, activation="swiglu", normalization="RMSNorm", set_parallel_mode=True
        ),
        "both",
        (WIDTH, WIDTH),
        None,
    ),
    "recomputed": (
        partial(LayerNormMLP, WIDTH, FFN, checkpoint=True, set_parallel_mode=True),
        "both",
        (WIDTH, WIDTH),
        None,
    ),
}


def same_as_one_process(
    rank: int, world_size: int, names: list[str], recipe: Any, dtype: torch.dtype, **options: Any
) -> None:
    for name in names:
        make, kind, widths, sizes = LAYERS[name]
        for sequence_parallel in (False, True):
            pair = make_pair(make, kind, widths, sequence_parallel, dtype=dtype, sizes=sizes)
            try:
                compare(pair, recipe, **options)
            except AssertionError as error:
                raise AssertionError(f"{name}, sequence_parallel={sequence_parallel}: {error}") from error


@pytest.mark.parametrize("world_size", [2, 4])
def test_numbers_of_one_process(world_size: int) -> None:
    run_ranks(world_size, same_as_one_process, list(LAYERS), None, torch.float32)


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
    "block": BlockScaling(),
}


def in_fp8(rank: int, world_size: int, recipe: Any, dtype: torch.dtype) -> None:
    tolerances = {"tolerance": 2e-2, "grad_tolerance": 2e-2}
    same_as_one_process(rank, world_size, list(LAYERS), recipe, dtype, steps=3, **tolerances)


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_one_process_in_fp8(recipe: str) -> None:
    run_ranks(2, in_fp8, RECIPES[recipe], torch.bfloat16)
