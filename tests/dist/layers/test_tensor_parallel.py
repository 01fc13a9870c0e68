"""Linear layers that ranks share: the numbers of one process, what is sent, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, TransformerLayer
from tests.support.ranks import on_ranks, run_ranks
from tests.support.split_layers import (
    BATCH,
    SEQUENCE,
    SHORT,
    Kind,
    Pair,
    compare,
    make_pair,
    step,
    whole_group,
)

WIDTH, OUT, FFN = 64, 96, 128
HEADS = 8
JOINT = (32, 16, 16)
"""Queries, keys and values of a packed projection."""
PARAMETERS = {"query": 32, "key": 16, "value": 16}


class Case(NamedTuple):
    """A layer for `make_pair`.

    Attributes:
        widths: of the whole input and output.
        sizes: of the parts of a split output.
    """

    make: Callable[..., nn.Module]
    kind: Kind
    widths: tuple[int, int]
    sizes: tuple[int, ...] | None = None


def inside(layer: type[nn.Module], *sizes: int, **options: Any) -> Case:
    """A layer whose output has the form of its input."""
    return Case(partial(layer, *sizes, set_parallel_mode=True, **options), "both", (WIDTH, WIDTH))


RMS = {"normalization": "RMSNorm"}
MAPS = {
    "column": Case(partial(Linear, WIDTH, OUT, parallel_mode="column"), "column", (WIDTH, OUT)),
    "row": Case(partial(Linear, WIDTH, OUT, parallel_mode="row"), "row", (WIDTH, OUT)),
    "pack": Case(
        partial(Linear, WIDTH, sum(JOINT), parallel_mode="column", partition_sizes=JOINT),
        "column",
        (WIDTH, sum(JOINT)),
        JOINT,
    ),
    "several": Case(
        partial(Linear, WIDTH, sum(JOINT), parallel_mode="column", parameters_split=PARAMETERS),
        "column",
        (WIDTH, sum(JOINT)),
        JOINT,
    ),
    "norm": Case(partial(LayerNormLinear, WIDTH, OUT, parallel_mode="column"), "column", (WIDTH, OUT)),
    "mlp": inside(LayerNormMLP, WIDTH, FFN),
    "swiglu": inside(
        LayerNormMLP, WIDTH, FFN, activation="swiglu", bias=False, zero_centered_gamma=True, **RMS
    ),
    "recomputed": inside(LayerNormMLP, WIDTH, FFN, checkpoint=True),
}
GQA = {"num_gqa_groups": 4, "attention_dropout": 0.0}
ATTENTION = {
    "heads": inside(MultiheadAttention, WIDTH, HEADS, attention_dropout=0.0, qk_norm_type="RMSNorm"),
    "groups": inside(MultiheadAttention, WIDTH, HEADS, fuse_qkv_params=True, window_size=(3, 0), **GQA),
    "apart": inside(
        MultiheadAttention, WIDTH, HEADS, fuse_qkv_params=True, qkv_weight_interleaved=False, **GQA
    ),
    # Separate keys have a bias whose gradient is zero, and would be compared to nothing.
    "layer": inside(
        TransformerLayer,
        WIDTH,
        FFN,
        HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fuse_qkv_params=True,
        zero_centered_gamma=True,
    ),
    "post": inside(
        TransformerLayer,
        WIDTH,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        output_layernorm=True,
        bias=False,
        rotary_base=10000.0,
        qk_norm_type="RMSNorm",
        activation="swiglu",
        **GQA,
        **RMS,
    ),
    "parallel": inside(
        TransformerLayer,
        WIDTH,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        parallel_attention_mlp=True,
        bias=False,
        **GQA,
    ),
}
CASES = {**MAPS, **ATTENTION}


def same_as_one_process(
    rank: int, world_size: int, names: list[str], recipe: Any, tolerances: dict[str, Any], **options: Any
) -> None:
    """
    Args:
        tolerances: and other arguments of `compare`.
        options: of the layers.
    """
    for name in names:
        make, kind, widths, sizes = CASES[name]
        for sequence_parallel in (False, True):
            pair = make_pair(make, kind, widths, sequence_parallel, sizes=sizes, **options)
            try:
                compare(pair, recipe, **tolerances)
            except AssertionError as error:
                raise AssertionError(f"{name}, sequence_parallel={sequence_parallel}: {error}") from error


@pytest.mark.parametrize(("world_size", "names"), [(2, list(CASES)), (4, ["pack", "mlp", "groups", "post"])])
def test_numbers_of_one_process(world_size: int, names: list[str]) -> None:
    run_ranks(world_size, same_as_one_process, names, None, {})


@on_ranks(2)
def test_numbers_of_one_process_in_16_bits(rank: int, world_size: int) -> None:
    """Tolerance for sums over ranks of results that each rank has rounded."""
    for dtype, tolerance in ((torch.bfloat16, 0.016), (torch.float16, 0.002)):
        tolerances = {"tolerance": tolerance, "grad_tolerance": 2 * tolerance}
        same_as_one_process(rank, world_size, list(CASES), None, tolerances, params_dtype=dtype)


RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
    "block": BlockScaling(),
}
IN_FP8 = {
    "delayed": [*MAPS, "layer"],
    "current": ["column", "row", "mlp", "groups"],
    "block": ["column", "row", "recomputed"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_one_process_in_fp8(recipe: str) -> None:
    """With activations in FP32, of which few round to FP8 the other way because of another order of sums."""
    tolerances = {"steps": 3, "tolerance": 1e-3, "grad_tolerance": 2e-3}
    run_ranks(2, same_as_one_process, IN_FP8[recipe], RECIPES[recipe], tolerances)


@on_ranks(2)
def test_weight_gradients_that_wait() -> None:
    names, recipes = ("column", "row", "norm", "mlp", "layer"), (None, SHORT)
    for name, sequence_parallel, recipe in product(names, (False, True), recipes):
        make, kind, widths, _ = CASES[name]
        make = partial(make, fuse_wgrad_accumulation=True, **whole_group(sequence_parallel))
        found = []
        for delays in (False, True):
            torch.manual_seed(5)
            layer = make(delay_wgrad_compute=delays)
            weights = [p for p in layer.parameters() if p.dim() == 2]
            for weight in weights:
                weight.main_grad = torch.zeros_like(weight)
            pair = Pair(layer, layer, kind, widths, sequence_parallel, None)
            x, dy = (torch.randn(SEQUENCE, BATCH, width) for width in widths)
            results = step(layer, pair.input(x), pair.output(dy), recipe)
            assert delays != any(weight.main_grad.any() for weight in weights)
            layer.backward_dw()
            found.append([*results, *(weight.main_grad for weight in weights)])
        assert all(map(torch.equal, *found)), (name, sequence_parallel, recipe)
