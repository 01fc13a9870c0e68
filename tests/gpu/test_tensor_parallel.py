"""Tensor-parallel layers, over NCCL and over symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from tests.dist.layers.test_tensor_parallel import same_as_one_process
from tests.support.gpu.marks import NEEDS_GPU, one_gpu_each
from tests.support.gpu.models import WORLD_SIZES
from tests.support.ranks import run_ranks
from tests.support.split_layers import assert_all_close, complete_grad, make_pair, step

pytestmark = NEEDS_GPU

SHORT = DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": SHORT, "current": CurrentScaling(), "block": BlockScaling()}


def on_gpus(rank: int, world_size: int, names: list[str], recipe: Any, dtype: Any, error: float) -> None:
    tolerances = {"steps": 2, "tolerance": error, "grad_tolerance": 2 * error}
    same_as_one_process(rank, world_size, names, recipe, tolerances, params_dtype=dtype, device="cuda")


def run(world_size: int, case: Callable[..., None], *args: Any) -> None:
    """Runs a case with time to compile kernels for many shapes."""
    run_ranks(world_size, case, *args, backend="nccl", timeout=400.0)


@pytest.mark.parametrize(
    ("dtype", "names", "error"),
    [
        (torch.float32, ["column", "row", "several", "recomputed"], 1e-5),
        # Logits are in the hundreds here; the errors of torch's efficient attention grow with them.
        (torch.float32, ["apart", "post"], 2e-4),
        (torch.bfloat16, ["pack", "mlp", "groups"], 2e-2),
    ],
    ids=["fp32", "fp32-attention", "bf16"],
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_numbers_of_one_gpu(world_size: int, dtype: torch.dtype, names: list[str], error: float) -> None:
    run(world_size, on_gpus, names, None, dtype, error)


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_of_one_gpu_in_fp8(recipe: str) -> None:
    # Sizes that FP8 GEMMs support on two ranks, not on four.
    run(2, on_gpus, ["column", "row", "recomputed", "layer"], RECIPES[recipe], torch.float32, 2e-2)


HIDDEN, FFN = 1024, 2048
OVERLAPPED = {
    "column": (partial(Linear, HIDDEN, FFN, parallel_mode="column"), "column", (HIDDEN, FFN)),
    "row": (partial(Linear, FFN, HIDDEN, parallel_mode="row"), "row", (FFN, HIDDEN)),
    "norm": (partial(LayerNormLinear, HIDDEN, FFN, parallel_mode="column"), "column", (HIDDEN, FFN)),
    "mlp": (
        partial(LayerNormMLP, HIDDEN, FFN, activation="swiglu", set_parallel_mode=True),
        "both",
        (HIDDEN, HIDDEN),
    ),
    "layer": (
        partial(
            TransformerLayer,
            HIDDEN,
            FFN,
            16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            set_parallel_mode=True,
        ),
        "both",
        (HIDDEN, HIDDEN),
    ),
}


def in_chunks(rank: int, world_size: int, recipe: Any, error: float) -> None:
    """Compares with the same layer without chunks, and two runs with each other."""
    dtype = {"params_dtype": torch.bfloat16, "device": "cuda"}
    for name, (make, kind, widths) in OVERLAPPED.items():
        found = []
        for overlap in (False, True, True):
            options = {"tp_overlap": overlap}
            pair = make_pair(make, kind, widths, True, split_options=options, **dtype)
            with torch.no_grad():
                for parameter in pair.split.parameters():
                    parameter *= 0.1
            generator = torch.Generator().manual_seed(4)
            x, dy = (
                torch.randn(256, 4, width, generator=generator).to("cuda", torch.bfloat16) for width in widths
            )
            results = []
            for _ in range(2):
                pair.split.zero_grad()
                results += step(pair.split, pair.input(x), pair.output(dy), recipe)
            results += [complete_grad(parameter) for parameter in pair.split.parameters()]
            found.append(results)
        apart, together, again = found
        pairs = enumerate(zip(together, apart, strict=True))
        assert_all_close([(a, b, error, f"{name}, result {index}") for index, (a, b) in pairs])
        assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True)), name


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@one_gpu_each(2, 4)
def test_overlapped_products(world_size: int, recipe: str | None) -> None:
    scaling = None if recipe is None else RECIPES[recipe]
    run(world_size, in_chunks, scaling, 1e-2 if recipe is None else 5e-2)
