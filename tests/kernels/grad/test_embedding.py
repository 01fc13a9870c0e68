"""Embedding gradients against sums of one token after the other, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.grad import embedding
from flatfsdp.kernels.grad.embedding import embedding_grad
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import DTYPES, check_operator

# PyTorch's index_add_ adds in no particular order on a GPU, so the reference runs on the CPU.
PLACES = [(embedding.reference, "cpu")]
PLACES += [(embedding.launch, "cuda" if torch.cuda.is_available() else "cpu")]
BOTH = pytest.mark.parametrize(("run", "device"), PLACES, ids=["reference", "kernel"])


def one_by_one(
    target: Tensor, dy: Tensor, ids: Tensor, padding_idx: int | None = None, *, first: bool
) -> Tensor:
    """The expected `target`: FP32 additions in the order of tokens, then one write or addition a row.

    Assignment to a bf16 target rounds.
    """
    sums: dict[int, Tensor] = {}
    for row, grad in zip(ids.tolist(), dy.float(), strict=True):
        if row != padding_idx:
            sums[row] = sums.get(row, torch.zeros_like(grad)) + grad
    result = torch.zeros_like(target) if first else target.clone()
    for row, total in sums.items():
        result[row] = total if first else result[row] + total
    return result


def tokens(n: int, cols: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """A target with garbage, dy, and ids, some of which occur once and one very often."""
    ids = torch.randint(0, vocabulary, (n,), device=device)
    ids[torch.rand(n, device=device) < 0.3] = 2
    target = torch.randn(vocabulary, cols, device=device) * 100
    return target, torch.randn(n, cols, device=device), ids


@BOTH
@DTYPES
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "cols", "vocabulary"), [(1, 16, 3), (123, 48, 40), (37, 1000, 50)])
def test_every_row_is_the_sum_of_its_tokens_in_order(
    run: Any, device: str, dtype: torch.dtype, target_dtype: torch.dtype, n: int, cols: int, vocabulary: int
) -> None:
    before, dy, ids = tokens(n, cols, vocabulary, device)
    before, dy = before.to(target_dtype), dy.to(dtype)
    for first in (True, False):
        for padding_idx in (None, 2):
            target = before.clone()
            run(target, dy, ids, padding_idx, first)
            assert torch.equal(target, one_by_one(before, dy, ids, padding_idx, first=first))


@BOTH
def test_columns_beyond_one_program(run: Any, device: str) -> None:
    before, dy, ids = tokens(5, 2100, 3, device)
    target = before.clone()
    run(target, dy.bfloat16(), ids.int(), None, False)
    assert torch.equal(target, one_by_one(before, dy.bfloat16(), ids, first=False))


@BOTH
def test_first_overwrites_nan_and_later_calls_leave_other_rows_alone(run: Any, device: str) -> None:
    _, dy, ids = tokens(9, 16, 5, device)
    ids %= 3
    target = torch.full((5, 16), torch.nan, device=device)
    run(target, dy, ids, None, True)
    assert torch.equal(target, one_by_one(target, dy, ids, first=True))
    target[3:] = torch.tensor(-0.0)
    run(target, dy, ids, None, False)
    assert torch.signbit(target[3:]).all()


@BOTH
@pytest.mark.parametrize("first", [True, False])
def test_rows_that_another_rank_has_are_skipped(run: Any, device: str, first: bool) -> None:
    before, dy, ids = tokens(50, 16, 12, device)
    ids[:3] = torch.tensor([0, 11, 3])
    for begin, end in ((0, 6), (6, 12), (12, 15)):
        is_own = (ids >= begin) & (ids < end)
        rows = torch.where(is_own, ids - begin, -1)
        target = before.clone()
        run(target, dy, rows.int(), None, first)
        assert torch.equal(target, one_by_one(before, dy[is_own], rows[is_own], first=first))


@BOTH
def test_no_tokens(run: Any, device: str) -> None:
    ids = torch.empty(0, dtype=torch.int64, device=device)
    target = torch.ones(4, 16, device=device)
    run(target, torch.empty(0, 16, device=device), ids, None, False)
    assert (target == 1).all()
    run(target, torch.empty(0, 16, device=device), ids, None, True)
    assert (target == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [1, 16, 700, 1024])
def test_ids_are_sorted_as_torch_does(n: int, dtype: torch.dtype, device: str) -> None:
    largest = embedding.LARGEST_ID
    ids = torch.randint(0, largest, (n,), device=device)
    ids[torch.rand(n, device=device) < 0.5] %= 5
    ids[n // 3], ids[-1] = -1, largest - 1
    expected, tokens = ids.sort(stable=True)
    for vocabulary in (largest, largest + 1):
        ours = embedding.sort_ids(ids.to(dtype), vocabulary)
        assert torch.equal(ours[0], expected.int()) and torch.equal(ours[1].long(), tokens)


@pytest.mark.parametrize("begin", [-1, embedding.LARGEST_ID // 2, embedding.LARGEST_ID - 60])
def test_neighbouring_ids_are_told_apart(begin: int, device: str) -> None:
    ids = torch.arange(begin, begin + 60, device=device).repeat(3)[torch.randperm(180, device=device)]
    expected, tokens = ids.sort(stable=True)
    ours = embedding.sort_ids(ids, embedding.LARGEST_ID)
    assert torch.equal(ours[0], expected.int()) and torch.equal(ours[1].long(), tokens)


@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_all_ids_are_told_apart_by_an_inexact_division(ulps: int) -> None:
    """A GPU's division is wrong by 2 ulps at most; tests all ids and their neighbours."""
    ids = torch.arange(-1, embedding.LARGEST_ID)

    def number(ids: Tensor, shift: int) -> Tensor:
        return (0x40000000 - 32 + shift - 16 * ids).int().view(torch.float32)

    scale = 0.5 / (number(ids, 0) + 2**-20)
    scale = (scale.view(torch.int32) + ulps).view(torch.float32)
    for difference in (-1, 0, 1):
        # The filler of masks is the largest id.
        other = (ids + difference).clamp(-1, embedding.LARGEST_ID)
        for shift, counts in ((0, other < ids), (16, other <= ids)):
            # Exact in FP64, as in an FMA, and then rounded.
            fused, rounded = number(other, shift).double() * scale.double(), number(other, shift) * scale
            assert torch.equal(fused > 0.5, counts) and torch.equal(rounded > 0.5, counts)
            assert (fused != 0.5).all() and (rounded != 0.5).all() and (fused < 1.5).all()


def test_many_tokens_are_sorted_by_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, dy, ids = tokens(40, 16, 9, device)
    one, two = before.clone(), before.clone()
    embedding.launch(one, dy, ids, None, False)
    monkeypatch.setattr(embedding, "MOST_RANKED", 39)
    embedding.launch(two, dy, ids, None, False)
    assert torch.equal(one, two)


def test_what_does_not_fit_is_named() -> None:
    target, dy, ids = tokens(4, 16, 5, "cpu")
    for message, arguments in (
        (r"target is torch\.float16 \(5, 16\)", (target.half(), dy, ids)),
        (r"target is .* of 15 columns like dy", (target, dy[:, :15].contiguous(), ids)),
        (r"dy is torch\.float64", (target, dy.double(), ids)),
        (r"ids is torch\.int64 \(3,\)", (target, dy, ids[:3])),
        (r"ids is torch\.float32", (target, dy, ids.float())),
    ):
        with pytest.raises(ValueError, match=message):
            embedding_grad(*arguments, first=True)


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    target, dy, ids = tokens(4, 16, 5, "cpu")
    for padding_idx, first in ((None, True), (2, False)):
        check_operator("embedding_grad_", target, dy, ids, padding_idx, first)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("target_type", ["fp32", "bf16"])
def test_it_compiles_for_hopper_with_wide_accesses(first: bool, target_type: str) -> None:
    tile, kernel = embedding.tile(torch.bfloat16, 4096), "grad.embedding._embedding_kernel"
    types = {"target_ptr": f"*{target_type}", "dy_ptr": "*bf16", "ids_ptr tokens_ptr": "*i32"}
    types["n padding_idx cols"] = "i32"
    constants = {"FIRST": first, "BLOCK_IDS": embedding.BLOCK_IDS, "IS_EARLY": True}
    compiled = compile_for_hopper(kernel, types, constants, tile=tile, aligned=["cols"])
    assert compiled.registers <= 96
    # Accesses in flight before the loop, and in its body.
    assert compiled.count("cp.async.cg.shared.global") == compiled.elements // 8 * tile.stages
    assert "st.global.v4.b32" in compiled.ptx and "st.global.b32" not in compiled.ptx


@pytest.mark.parametrize("ids_type", ["i64", "i32"])
def test_the_sort_compiles_for_hopper_without_spills(ids_type: str) -> None:
    tile = find("embedding_grad, sort", torch.int64, 8192)
    types = {"ids_ptr": f"*{ids_type}", "sorted_ptr tokens_ptr": "*i32", "n": "i32"}
    constants = {"BLOCK_TOKENS": tile.rows, "BLOCK_OTHERS": tile.cols, "IS_EARLY": True}
    compiled = compile_for_hopper("grad.embedding._rank_kernel", types, constants, tile=tile, aligned=["n"])
    assert compiled.registers <= 64
    # A pair is one instruction, and no others look like it.
    assert compiled.count("fma.rn.f32") == compiled.elements * tile.steps
