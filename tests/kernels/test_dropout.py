"""Dropout: masks that CPU and GPU agree on, and gradients that regenerate them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels import dropout
from flatfsdp.kernels.dropout import DropoutBackward
from flatfsdp.kernels.shared.outputs import rows_at_once
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import DTYPES, both, check_operator, garbage

FORWARDS = (dropout.forward_reference, dropout.forward_launch)
BACKWARDS = (dropout.backward_reference, dropout.backward_launch)
FORWARD, BACKWARD = both(*FORWARDS), both(*BACKWARDS)
SEEDS = pytest.mark.parametrize("seed", [0, 1234, 2**62 + 12345])


def drop(
    run: Any,
    x: Tensor,
    p: float,
    seed: int | None = 7,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    out = garbage(*x.shape, like=x, dtype=x.dtype)
    run(x, bias, residual, None if seed is None else torch.tensor(seed, device=x.device), out, p)
    return out


def gradient(run: Any, dy: Tensor, p: float, seed: int = 7, *, column_sum: bool = False) -> DropoutBackward:
    dx = garbage(*dy.shape, like=dy, dtype=dy.dtype)
    dbias = garbage(dy.shape[1], like=dy) if column_sum else None
    run(dy, torch.tensor(seed, device=dy.device), dx, dbias, p)
    return DropoutBackward(dx, dbias)


def kept(like: Tensor, p: float, seed: int = 7) -> Tensor:
    return dropout.keep_mask(like, p, torch.tensor(seed, device=like.device))


def test_philox_gives_the_published_numbers() -> None:
    """First known answer of Random123: key and counter 0."""
    words = dropout.philox(torch.tensor(0), torch.zeros(1, dtype=torch.int64))[0]
    expected = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words.tolist() == expected


def test_elements_take_halves_of_words_lower_ones_first() -> None:
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    x = torch.ones(1, 8)
    for half in halves:
        assert kept(x, half / 2**16, 0)[0].tolist() == [other >= half for other in halves]
        assert kept(x, (half + 1) / 2**16, 0)[0].tolist() == [other > half for other in halves]


@SEEDS
def test_kernel_and_reference_drop_the_same_elements(seed: int, device: str) -> None:
    for rows, cols in ((5, 48), (70, 81), (3, 1003)):
        x = torch.ones(rows, cols, device=device)
        expected = kept(x, 0.3, seed)
        for run in FORWARDS:
            assert torch.equal(drop(run, x, 0.3, seed) != 0, expected)
        for run in BACKWARDS:
            for column_sum in (False, True):
                dx = gradient(run, x, 0.3, seed, column_sum=column_sum).dx
                assert torch.equal(dx != 0, expected)


def test_masks_are_fair_and_differ_by_row_and_seed() -> None:
    x = torch.ones(256, 1024)
    for p in (0.1, 0.5, 0.9):
        dropped = 1 - kept(x, p, 11).float().mean().item()
        assert abs(dropped - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    mask = kept(x, 0.5, 11)
    for other in (mask.roll(1, 0), mask.roll(1, 1), kept(x, 0.5, 12)):
        assert abs((mask == other).float().mean().item() - 0.5) < 0.005


@FORWARD
@DTYPES
def test_forward_against_float64(run: Any, dtype: torch.dtype, device: str) -> None:
    x, residual = (torch.randn(37, 300, device=device).to(dtype) for _ in range(2))
    bias = torch.randn(300, device=device).to(dtype)
    keep = kept(x, 0.1)
    expected = residual.double() + keep * (x.double() + bias.double()) / 0.9
    ours = drop(run, x, 0.1, bias=bias, residual=residual)
    allowed = torch.finfo(dtype).eps / 2 * 1.001 * expected.abs() + 1e-6
    assert ((ours.double() - expected).abs() <= allowed).all()
    alone = drop(run, x, 0.1).double()
    torch.testing.assert_close(alone, (keep * x.double() / 0.9), rtol=torch.finfo(dtype).eps, atol=1e-7)


@FORWARD
def test_p_of_0_keeps_all(run: Any, device: str) -> None:
    x = torch.randn(33, 300, device=device).bfloat16()
    for seed in (7, None):
        assert torch.equal(drop(run, x, 0.0, seed), x)


@BACKWARD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_against_float64(run: Any, dtype: torch.dtype, device: str) -> None:
    dy = torch.randn(131, 81, device=device).to(dtype)
    expected = kept(dy, 0.1) * dy.double() / 0.9
    ours = gradient(run, dy, 0.1, column_sum=True)
    torch.testing.assert_close(ours.dx.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert ours.dbias is not None
    assert ((ours.dbias - expected.sum(0)).norm() / expected.sum(0).norm()).item() < 1e-6


def test_infinite_and_nan_elements_leave_no_trace_when_dropped(device: str) -> None:
    x = torch.full((16, 64), torch.inf, device=device)
    x[::2] = torch.nan
    for run in FORWARDS:
        out = drop(run, x, 0.5)
        assert torch.equal(out == 0, ~kept(x, 0.5))


def test_public_functions(device: str) -> None:
    x = torch.randn(4, 10, device=device)
    seed = dropout.draw_seed(x.device)
    out = dropout.dropout_forward(x, None, None, 0.5, seed)
    grads = dropout.dropout_backward(torch.ones_like(x), 0.5, seed, column_sum=True)
    assert torch.equal(out, x * grads.dx)
    assert grads.dbias is not None and torch.equal(grads.dbias, grads.dx.sum(0))
    assert dropout.dropout_backward(x, 0.5, seed).dbias is None


def test_no_rows_give_no_rows(device: str) -> None:
    x = torch.empty(0, 10, device=device)
    for forward, backward in zip(FORWARDS, BACKWARDS, strict=True):
        assert drop(forward, x, 0.5).shape == (0, 10)
        dbias = gradient(backward, x, 0.5, column_sum=True).dbias
        assert dbias is not None and torch.equal(dbias, torch.zeros(10, device=device))
    assert dropout.dropout_forward(x, None, x.clone(), 0.5, dropout.draw_seed(x.device)).shape == (0, 10)


def test_what_does_not_fit_is_named() -> None:
    x, seed = torch.ones(4, 8), torch.tensor(0)
    for message, bias, residual, p, key in (
        (r"bias is torch\.float32 \(7,\)", x[0, :7], None, 0.1, seed),
        (r"residual is torch\.float64", None, x.double(), 0.1, seed),
        ("p is 1", None, None, 1.0, seed),
        ("there is no seed", None, None, 0.1, None),
        (r"seed is torch\.int32 \(\) on cpu", None, None, 0.1, seed.int()),
        (r"seed is torch\.int64 \(1,\) on cpu", None, None, 0.1, seed[None]),
        (r"seed is torch\.int64 \(\) on meta", None, None, 0.1, seed.to("meta")),
    ):
        with pytest.raises(ValueError, match=message):
            dropout.dropout_forward(x, bias, residual, p, key)


def test_seeds_come_from_the_default_generator(device: str) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    first, second = (dropout.draw_seed(torch.device(device)) for _ in range(2))
    assert first.shape == () and first.dtype == torch.int64 and first.device.type == device
    assert first != second
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)
    assert torch.equal(dropout.draw_seed(torch.device(device)), first)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    x, seed = torch.randn(4, 8), torch.tensor(1)
    check_operator("dropout_forward_", x, x[0].clone(), x.clone(), seed, x.clone(), 0.1)
    check_operator("dropout_backward_", x, seed, x.clone(), x[0].clone(), 0.1)


@pytest.mark.parametrize(
    ("kernel", "form"), [("_forward_kernel", "forward"), ("_backward_kernel", "backward, sum")]
)
def test_it_compiles_for_hopper_with_wide_accesses(kernel: str, form: str) -> None:
    tile = find(f"dropout_{form}", torch.bfloat16, 4096)
    types = {"x_ptr bias_ptr residual_ptr out_ptr dy_ptr dx_ptr": "*bf16", "band_sums_ptr": "*fp32"}
    types |= {"seed_ptr": "*i64", "threshold": "u32", "factor": "fp32", "rows cols": "i32"}
    constants = {"SUM_ROWS": rows_at_once(tile, 8)} if "sum" in form else {}
    aligned = ["rows", "cols"]
    compiled = compile_for_hopper(f"dropout.{kernel}", types, constants, tile=tile, aligned=aligned)
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
