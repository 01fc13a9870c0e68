"""Dropout: masks that CPU and GPU agree on, and gradients that regenerate them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from flatfsdp.kernels import dropout
from flatfsdp.kernels.dropout import DropoutBackward
from flatfsdp.kernels.shared.outputs import rows_at_once
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import SHARED_LIMIT, compile_for_hopper

FORWARD = pytest.mark.parametrize(
    "run", [dropout.forward_reference, dropout.forward_launch], ids=["reference", "kernel"]
)
BACKWARD = pytest.mark.parametrize(
    "run", [dropout.backward_reference, dropout.backward_launch], ids=["reference", "kernel"]
)
STATES = pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1234, 5), (2**62 + 12345, 2**34 + 3)])


def garbage(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, device=like.device, dtype=like.dtype)


def drop(
    run: Any,
    x: Tensor,
    p: float,
    seed: int = 7,
    offset: int = 0,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    out = garbage(*x.shape, like=x)
    run(x, bias, residual, out, p, seed, offset)
    return out


def gradient(
    run: Any, dy: Tensor, p: float, seed: int = 7, offset: int = 0, *, column_sum: bool = False
) -> DropoutBackward:
    dx, dbias = garbage(*dy.shape, like=dy), None
    if column_sum:
        dbias = torch.full((dy.shape[1],), torch.nan, device=dy.device)
    run(dy, dx, dbias, p, seed, offset)
    return DropoutBackward(dx, dbias)


def test_philox_gives_the_published_numbers() -> None:
    """First known answer of Random123: key and counter 0."""
    words = dropout.philox(0, torch.zeros(1, dtype=torch.int64))[0]
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words.tolist() == expected


def test_elements_take_halves_of_words_lower_ones_first() -> None:
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    x = torch.ones(1, 8)
    for half in halves:
        kept = dropout.keep_mask(x, half / 2**16, 0, 0)[0].tolist()
        assert kept == [other >= half for other in halves]
        kept = dropout.keep_mask(x, (half + 1) / 2**16, 0, 0)[0].tolist()
        assert kept == [other > half for other in halves]


@STATES
def test_kernel_and_reference_drop_the_same_elements(seed: int, offset: int, device: str) -> None:
    for rows, cols in ((5, 48), (70, 81), (3, 1003)):
        x = torch.ones(rows, cols, device=device)
        expected = dropout.keep_mask(x, 0.3, seed, offset)
        for run in (dropout.forward_reference, dropout.forward_launch):
            assert torch.equal(drop(run, x, 0.3, seed, offset) != 0, expected)
        for run in (dropout.backward_reference, dropout.backward_launch):
            for column_sum in (False, True):
                dx = gradient(run, x, 0.3, seed, offset, column_sum=column_sum).dx
                assert torch.equal(dx != 0, expected)


def test_masks_are_fair_and_differ_by_row_seed_and_offset() -> None:
    x = torch.ones(256, 1024)
    for p in (0.1, 0.5, 0.9):
        dropped = 1 - dropout.keep_mask(x, p, 11, 0).float().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    mask = dropout.keep_mask(x, 0.5, 11, 0)
    for other in (
        mask.roll(1, 0),
        mask.roll(1, 1),
        dropout.keep_mask(x, 0.5, 12, 0),
        dropout.keep_mask(x, 0.5, 11, dropout.counters(*x.shape)),
    ):
        assert abs((mask == other).float().mean().item() - 0.5) < 0.005


def test_a_later_offset_continues_the_mask() -> None:
    x = torch.ones(6, 50)
    whole = dropout.keep_mask(x, 0.5, 3, 0)
    assert torch.equal(whole[2:], dropout.keep_mask(x[2:], 0.5, 3, dropout.counters(2, 50)))


@FORWARD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_against_float64(run: Any, dtype: torch.dtype, device: str) -> None:
    x, residual = (torch.randn(37, 300, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(300, device=device).to(dtype)
    keep = dropout.keep_mask(x, 0.1, 7, 0)
    expected = residual.double() + keep * (x.double() + bias.double()) / 0.9
    ours = drop(run, x, 0.1, bias=bias, residual=residual)
    allowed = torch.finfo(dtype).eps / 2 * 1.001 * expected.abs() + 1e-6
    assert ((ours.double() - expected).abs() <= allowed).all()
    alone = drop(run, x, 0.1).double()
    torch.testing.assert_close(alone, (keep * x.double() / 0.9), rtol=torch.finfo(dtype).eps, atol=1e-7)


@FORWARD
def test_p_of_0_keeps_all(run: Any, device: str) -> None:
    x = torch.randn(33, 300, device=device).bfloat16()
    assert torch.equal(drop(run, x, 0.0), x)


@BACKWARD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_against_float64(run: Any, dtype: torch.dtype, device: str) -> None:
    dy = torch.randn(131, 81, device=device).to(dtype)
    expected = dropout.keep_mask(dy, 0.1, 7, 0) * dy.double() / 0.9
    ours = gradient(run, dy, 0.1, column_sum=True)
    torch.testing.assert_close(ours.dx.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert ours.dbias is not None
    assert ((ours.dbias - expected.sum(0)).norm() / expected.sum(0).norm()).item() < 1e-6


def test_column_sums_are_repeatable(device: str) -> None:
    dy = torch.randn(64 * 3 + 1, 80, device=device)
    first, again = (gradient(dropout.backward_launch, dy, 0.1, column_sum=True).dbias for _ in range(2))
    assert first is not None and again is not None and torch.equal(first, again)


def test_infinite_and_nan_elements_leave_no_trace_when_dropped(device: str) -> None:
    x = torch.full((16, 64), torch.inf, device=device)
    x[::2] = torch.nan
    for run in (dropout.forward_reference, dropout.forward_launch):
        out = drop(run, x, 0.5)
        assert torch.equal(out == 0, ~dropout.keep_mask(x, 0.5, 7, 0))


def test_public_functions(device: str) -> None:
    x = torch.randn(4, 10, device=device)
    out = dropout.dropout_forward(x, None, None, 0.5, seed=1, offset=2)
    grads = dropout.dropout_backward(torch.ones_like(x), 0.5, seed=1, offset=2, column_sum=True)
    assert torch.equal(out, x * grads.dx)
    assert grads.dbias is not None and torch.equal(grads.dbias, grads.dx.sum(0))
    assert dropout.dropout_backward(x, 0.5, seed=1, offset=2).dbias is None


def test_no_rows_give_no_rows(device: str) -> None:
    x = torch.empty(0, 10, device=device)
    for forward, backward in (
        (dropout.forward_reference, dropout.backward_reference),
        (dropout.forward_launch, dropout.backward_launch),
    ):
        assert drop(forward, x, 0.5).shape == (0, 10)
        dbias = gradient(backward, x, 0.5, column_sum=True).dbias
        assert dbias is not None and torch.equal(dbias, torch.zeros(10, device=device))
    assert dropout.dropout_forward(x, None, x.clone(), 0.5, seed=1, offset=2).shape == (0, 10)


def test_what_does_not_fit_is_named() -> None:
    x = torch.ones(4, 8)
    for message, bias, residual, p, seed, offset in (
        (r"bias is torch\.float32 \(7,\)", x[0, :7], None, 0.1, 0, 0),
        (r"residual is torch\.float64", None, x.double(), 0.1, 0, 0),
        ("p is 1", None, None, 1.0, 0, 0),
        ("seed is -1", None, None, 0.1, -1, 0),
        ("offset is 9223372036854775807", None, None, 0.1, 0, 2**63 - 1),
    ):
        with pytest.raises(ValueError, match=message):
            dropout.dropout_forward(x, bias, residual, p, seed=seed, offset=offset)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    x = torch.randn(4, 8)
    arguments: tuple[Any, ...] = (x, x[0].clone(), x.clone(), x.clone(), 0.1, 1, 2)
    library.opcheck(torch.ops.flatfsdp.dropout_forward_.default, arguments)
    arguments = (x, x.clone(), x[0].clone(), 0.1, 1, 2)
    library.opcheck(torch.ops.flatfsdp.dropout_backward_.default, arguments)


NUMBERS = {
    **{"threshold": "u32", "factor": "fp32", "seed": "i64", "offset": "i64", "rows": "i32", "cols": "i32"}
}


@pytest.mark.parametrize(
    ("kernel", "pointers", "is_summed"),
    [
        ("_forward_kernel", dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "out_ptr"), "*bf16"), False),
        ("_backward_kernel", {"dy_ptr": "*bf16", "dx_ptr": "*bf16", "band_sums_ptr": "*fp32"}, True),
    ],
)
def test_it_compiles_for_hopper_with_wide_accesses(
    kernel: str, pointers: dict[str, str], is_summed: bool
) -> None:
    form = "dropout_backward, sum" if is_summed else "dropout_forward"
    tile = find(form, torch.bfloat16, 4096)
    in_steps = {"STAGES": tile.stages, "STEPS": tile.steps, "SUM_ROWS": rows_at_once(tile, 8)}
    compiled = compile_for_hopper(
        "dropout",
        kernel,
        {**pointers, **NUMBERS},
        {"BLOCK_ROWS": tile.rows, "BLOCK_COLS": tile.cols, **(in_steps if is_summed else {})},
        num_warps=tile.warps,
        aligned=("rows", "cols"),
    )
    assert compiled.spilled == 0 and compiled.shared <= SHARED_LIMIT
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
