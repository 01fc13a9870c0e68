"""Query, key and value joined from any strides that attention returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.attention import join
from flatfsdp.kernels.attention.join import join_heads
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator, garbage

BOTH = both(join.reference, join.launch)
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "interleaved"])
SHAPES = pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1), (1, 1)])
A, B = 5, 3


def strided(heads: int, dim: int, order: str, dtype: torch.dtype, device: str) -> Tensor:
    """[A, B, heads, dim] as slices of a larger tensor with another order of dimensions in memory."""
    sizes = {"a": A, "b": B, "h": heads, "d": dim}
    memory = torch.randn([sizes[name] for name in order] + [2 * dim], device=device).to(dtype)
    return memory[..., :dim].permute(*(order.index(name) for name in "abh"), 3)


def expected(parts: tuple[Tensor, ...], interleaved: bool) -> Tensor:
    """Joins head by head."""
    query, key, value = (part.unbind(2) for part in parts)
    each = len(query) // len(key)
    if interleaved:
        runs = [[*query[g * each : (g + 1) * each], key[g], value[g]] for g in range(len(key))]
        return torch.cat([head for run in runs for head in run], -1)
    return torch.cat([*query, *key, *value], -1)


def joined(run: Any, parts: tuple[Tensor, ...], interleaved: bool) -> Tensor:
    """Joins into garbage memory."""
    width = sum(part.shape[2] * part.shape[3] for part in parts)
    out = garbage(A, B, width, like=parts[0], dtype=parts[0].dtype)
    run(out, *parts, interleaved)
    return out


@BOTH
@LAYOUTS
@SHAPES
@pytest.mark.parametrize("dim", [8, 20])
def test_every_head_is_in_its_place(
    run: Any, interleaved: bool, heads: int, groups: int, dim: int, device: str
) -> None:
    orders = ("abh", "hba", "bah")
    sizes = (heads, groups, groups)
    parts = tuple(
        strided(size, dim, order, torch.bfloat16, device) for size, order in zip(sizes, orders, strict=True)
    )
    assert torch.equal(joined(run, parts, interleaved), expected(parts, interleaved))


@BOTH
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_heads_than_a_tile_holds(run: Any, interleaved: bool, dtype: torch.dtype, device: str) -> None:
    parts = tuple(strided(heads, 128, "hab", dtype, device) for heads in (64, 8, 8))
    assert join.tile(dtype, 80, 128).rows < 80
    assert torch.equal(joined(run, parts, interleaved), expected(parts, interleaved))


@BOTH
def test_an_expanded_gradient_is_read_by_its_strides(run: Any, device: str) -> None:
    row = torch.randn(1, 1, 1, 16, device=device)
    parts = (row.expand(A, B, 4, 16), row.expand(A, B, 2, 16), torch.randn(A, B, 2, 16, device=device))
    assert torch.equal(joined(run, parts, True), expected(parts, True))


def test_public_function_allocates_its_result(device: str) -> None:
    query, key, value = (torch.randn(A, B, heads, 16, device=device) for heads in (4, 2, 2))
    result = join_heads(query, key, value, interleaved=True)
    assert torch.equal(result, expected((query, key, value), True)) and result.is_contiguous()
    empty = join_heads(query[:0], key[:0], value[:0], interleaved=False)
    assert empty.shape == (0, B, 128)


def test_what_does_not_fit_is_named() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    for message, parts in (
        (r"query has shape \(2, 3, 4, 8\) and key \(2, 3, 3, 8\)", (query, torch.randn(2, 3, 3, 8), key)),
        (r"query has shape \(3, 4, 8\)", (query[0], key, key)),
        (r"value is torch\.float32 \(2, 2, 2, 8\)", (query, key, key[:, :2])),
        (r"key is torch\.bfloat16", (query, key.bfloat16(), key)),
        (r"key is .* strides \(48, 16, 1, 2\)", (query, torch.randn(2, 3, 8, 2).transpose(2, 3), key)),
    ):
        with pytest.raises(ValueError, match=message):
            join_heads(*parts, interleaved=False)


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    check_operator("join_heads_", torch.empty(2, 3, 64), query, key, key.clone(), True)


@LAYOUTS
@pytest.mark.parametrize("dim", [128, 80])
def test_compiles_for_hopper_with_wide_accesses(interleaved: bool, dim: int) -> None:
    strides = [f"{part}_{of}_stride" for part in ("query", "key", "value") for of in ("seq", "batch", "head")]
    tile = join.tile(torch.bfloat16, 96, dim)
    types = {
        "out_ptr query_ptr key_ptr value_ptr": "*bf16",
        " ".join(["batch heads groups", *strides]): "i32",
    }
    constants = {"DIM": dim, "INTERLEAVED": interleaved, "BLOCK_HEADS": tile.rows, "BLOCK_DIM": tile.cols}
    compiled = compile_for_hopper("attention.join._join_kernel", types, constants, tile=tile, aligned=strides)
    accesses = compiled.elements // 8
    assert compiled.count("ld.global.v4.b32") == compiled.count("st.global.v4.b32") == accesses
