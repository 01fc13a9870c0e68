"""Activations against float64; FP8 outputs bit for bit against the FP32 result of the same call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels import activation
from flatfsdp.kernels.activation import GATED, NAMES, ActivationBackward
from flatfsdp.kernels.shared.outputs import Outputs, rows_at_once
from tests.support.kernels.compiling import Compiled, compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs
from tests.support.kernels.running import (
    E5M2,
    FORMATS,
    both,
    check_layouts,
    check_operator,
    garbage,
    saturated,
)
from tests.support.plain_layers import activated, error

FORWARDS = (activation.forward_reference, activation.forward_launch)
BACKWARDS = (activation.backward_reference, activation.backward_launch)
FORWARD, BACKWARD = both(*FORWARDS), both(*BACKWARDS)
FUNCTIONS = pytest.mark.parametrize("name", NAMES)
# The other activations differ from these in FP32 only, before rounding.
ROUNDED = pytest.mark.parametrize("name", ["gelu", "silu", "relu", "srelu", "geglu", "swiglu", "glu"])


def outputs(like: Tensor, rows: int, cols: int, dtype: torch.dtype | None, columnwise: bool) -> Outputs:
    return Outputs(
        garbage(rows, cols, like=like, dtype=like.dtype),
        None if dtype is None else garbage(rows, cols, like=like, dtype=dtype),
        garbage(cols, rows, like=like, dtype=dtype) if dtype and columnwise else None,
    )


def activate(
    run: Any,
    x: Tensor,
    name: str,
    *,
    dtype: Any = None,
    columnwise: bool = False,
    scale: Any = None,
    amax: Any = None,
) -> Outputs:
    """Calls `activation_forward` with the given implementation, into garbage memory."""
    rows, cols = x.shape[0], x.shape[1] // (2 if name in GATED else 1)
    result = outputs(x, rows, cols, dtype, columnwise)
    run(x, GATED.get(name, name), name in GATED, *result, scale, amax)
    return result


def gradient(
    run: Any, dy: Tensor, x: Tensor, name: str, *, column_sum: bool = False, **options: Any
) -> ActivationBackward:
    sums = garbage(x.shape[1], like=x) if column_sum else None
    result = outputs(x, *x.shape, options.get("dtype"), options.get("columnwise", False))
    scaling = (options.get("scale"), options.get("amax"))
    run(dy, x, GATED.get(name, name), name in GATED, *result, sums, *scaling)
    return ActivationBackward(*result, sums)


def inputs(
    rows: int, cols: int, name: str, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Random dy and x."""
    width = 2 * cols if name in GATED else cols
    return (
        torch.randn(rows, cols, device=device).to(dtype),
        (2 * torch.randn(rows, width, device=device)).to(dtype),
    )


@FORWARD
@FUNCTIONS
def test_forward_against_float64(run: Any, name: str, device: str) -> None:
    for rows, cols in ((5, 48), (67, 80), (3, 1000)):
        _, x = inputs(rows, cols, name, device)
        assert error(activate(run, x, name).out, activated(x.double(), name)) < 1e-6


@BACKWARD
@FUNCTIONS
@pytest.mark.parametrize("column_sum", [False, True])
def test_backward_against_float64(run: Any, name: str, column_sum: bool, device: str) -> None:
    for rows, cols in ((5, 48), (131, 80)):
        dy, x = inputs(rows, cols, name, device)
        wide = x.double().requires_grad_()
        activated(wide, name).backward(dy.double())
        assert wide.grad is not None
        result = gradient(run, dy, x, name, column_sum=column_sum)
        assert error(result.dx, wide.grad) < 1e-6
        if column_sum:
            assert error(result.column_sum, wide.grad.sum(0)) < 2e-6


@ROUNDED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(name: str, dtype: torch.dtype, device: str) -> None:
    dy, x = inputs(70, 80, name, device, dtype)
    pairs = []
    for forward, backward in zip(FORWARDS, BACKWARDS, strict=True):
        pairs.append((activate(forward, x, name).out, activate(forward, x.float(), name).out))
        pairs.append((gradient(backward, dy, x, name).dx, gradient(backward, dy.float(), x.float(), name).dx))
    for rounded, unrounded in pairs:
        assert rounded is not None and unrounded is not None
        assert torch.equal(rounded, unrounded.to(dtype))


@pytest.mark.parametrize("run", [*FORWARDS, *BACKWARDS], ids=lambda run: run.__name__)
@ROUNDED
@FORMATS
@pytest.mark.parametrize("rows", [71, 64], ids=["odd", "aligned"])
def test_casts_are_of_the_fp32_result(
    run: Any, name: str, dtype: torch.dtype, rows: int, device: str
) -> None:
    dy, x = inputs(rows, 80, name, device)
    special = x if run in FORWARDS else dy
    special[7, 5] = torch.nan
    special[11] *= 1e-20
    limit = torch.finfo(dtype).max
    scale, amax = torch.tensor([limit / 2], device=device), torch.zeros(1, device=device)
    options: dict[str, Any] = {"dtype": dtype, "columnwise": True, "scale": scale, "amax": amax}
    result = activate(run, x, name, **options) if run in FORWARDS else gradient(run, dy, x, name, **options)
    out, rowwise, columnwise, *_ = result
    expected = saturated(out * scale, dtype)
    assert (expected.float().abs() == limit).any() and expected.isnan().any()
    check_layouts(expected, rowwise, columnwise)
    assert amax.isnan()


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_amax_only_grows_and_counts_both_halves(name: str, device: str) -> None:
    dy, x = inputs(70, 80, name, device)
    dy[:, :40] *= 10
    for before in (0.0, 1e6):
        amax = torch.tensor([before], device=device)
        out = activate(activation.forward_launch, x, name, amax=amax).out
        assert out is not None and amax.item() == max(before, out.abs().max().item())
        amax = torch.tensor([before], device=device)
        dx = gradient(activation.backward_launch, dy, x, name, amax=amax).dx
        assert dx is not None and amax.item() == max(before, dx.abs().max().item())


@FUNCTIONS
def test_special_values(name: str, device: str) -> None:
    """Zero gives zero, large values neither overflow early nor turn into NaN, NaN stays."""
    values = torch.tensor([0.0, -0.0, 1e-40, 100.0, -100.0, 1e4, -1e4, torch.nan], device=device)
    x = values.repeat(3, 1)
    x = torch.cat([x, torch.ones_like(x)], 1) if name in GATED else x
    for forward, backward in zip(FORWARDS, BACKWARDS, strict=True):
        out = activate(forward, x, name).out
        assert out is not None
        torch.testing.assert_close(
            out.double(), activated(x.double(), name), rtol=1e-6, atol=1e-38, equal_nan=True
        )
        dx = gradient(backward, torch.ones(3, 8, device=device), x, name).dx
        assert dx is not None and dx[:, :7].isfinite().all()
        steep = dx[0, 3].item()
        slope = {"srelu": 200.0, "sreglu": 200.0, "glu": 0.0}.get(name, 1.0)
        assert math.isclose(steep, slope, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_no_rows_give_no_rows(name: str, device: str) -> None:
    dy, x = inputs(0, 48, name, device)
    scale, amax = torch.ones(1, device=device), torch.full((1,), 3.0, device=device)
    options: dict[str, Any] = {"dtype": E5M2, "columnwise": True, "scale": scale, "amax": amax}
    for forward, backward in zip(FORWARDS, BACKWARDS, strict=True):
        activate(forward, x, name, **options)
        sums = gradient(backward, dy, x, name, column_sum=True, **options).column_sum
        assert sums is not None and torch.equal(sums, torch.zeros_like(sums))
        assert amax.item() == 3.0
    result = activation.activation_forward(x, name, **options)
    assert result.columnwise is not None and result.columnwise.shape == (48, 0)


def test_public_functions_return_what_is_asked_for(device: str) -> None:
    dy, x = inputs(7, 48, "swiglu", device, torch.bfloat16)
    options: dict[str, Any] = {
        **{"dtype": torch.float8_e4m3fn, "scale": torch.ones(1, device=device)},
        **{"high_precision": False, "rowwise": False, "columnwise": True},
    }
    result = activation.activation_forward(x, "swiglu", **options)
    assert result.out is None and result.rowwise is None
    assert result.columnwise is not None and result.columnwise.shape == (48, 7)
    grads = activation.activation_backward(dy, x, "swiglu", column_sum=torch.bfloat16, **options)
    assert grads.dx is None and grads.columnwise is not None and grads.columnwise.shape == (96, 7)
    assert grads.column_sum is not None and grads.column_sum.isfinite().all()
    assert grads.column_sum.dtype == torch.bfloat16


def test_what_does_not_fit_is_named() -> None:
    x = torch.ones(4, 9)
    with pytest.raises(ValueError, match="no activation 'tanh'; choose one of gelu"):
        activation.activation_forward(x, "tanh")
    with pytest.raises(ValueError, match="x has 9 columns; swiglu needs two halves"):
        activation.activation_forward(x, "swiglu")
    with pytest.raises(ValueError, match=r"dy is torch\.float32 \(4, 8\).* of shape \(4, 9\)"):
        activation.activation_backward(x[:, :8].contiguous(), x, "gelu")
    with pytest.raises(ValueError, match=r"a cast to torch\.float8_e5m2 needs a scale"):
        activation.activation_forward(x, "gelu", dtype=torch.float8_e5m2)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    dy, x = inputs(4, 8, "swiglu", "cpu")
    one = torch.zeros(1)
    check_operator("activation_forward_", x, "silu", True, dy.clone(), None, None, None, one)
    outputs = (x.clone(), None, None, torch.zeros(16))
    check_operator("activation_backward_", dy, x, "silu", True, *outputs, None, one)


def compiled(
    kind: str,
    is_gated: bool,
    absent: set[str],
    *,
    transposes: bool,
    aligned: Sequence[str] = ("rows", "cols"),
) -> Iterator[Compiled]:
    """The kernels of forward and backward for bf16."""
    is_summed = "band_sums_ptr" not in absent
    for direction, fp8, tile in (
        ("forward", "*fp8e4nv", activation.forward_tile(torch.bfloat16, 16384, is_gated, transposes)),
        (
            "backward",
            "*fp8e5",
            activation.backward_tile(torch.bfloat16, 16384, is_gated, transposes, is_summed),
        ),
    ):
        types = {"x_ptr out_ptr dy_ptr dx_ptr": "*bf16", "rowwise_ptr columnwise_ptr": fp8}
        types |= {"scale_ptr amax_ptr band_sums_ptr": "*fp32", "rows cols": "i32"}
        own = {"dx_ptr", "band_sums_ptr"} if direction == "forward" else {"out_ptr"}
        constants = {
            **{**dict.fromkeys(absent - own), "KIND": kind, "IS_GATED": is_gated, "WHOLE": "rows" in aligned},
            **{"SLOPE_OF_INNER": activation.TWO_ROOT_TWO_OVER_PI, "CUBIC": activation.CUBIC},
            **({"SUM_PAIRS": min(tile.rows // 2, rows_at_once(tile, 16))} if direction == "backward" else {}),
        }
        kernel = f"activation._{direction}_kernel"
        found = compile_for_hopper(kernel, types, constants, tile=tile, aligned=aligned)
        assert not endangered_pairs(found.ptx)
        yield found


KINDS = pytest.mark.parametrize(("kind", "is_gated"), [("silu", True), ("gelu", False)])


@KINDS
def test_fp8_kernels_compile_for_hopper_with_wide_accesses(kind: str, is_gated: bool) -> None:
    """16 bytes per load and store, pairs transposed by the hardware, each value computed once."""
    for found in compiled(kind, is_gated, {"out_ptr", "dx_ptr"}, transposes=True):
        ptx = found.ptx
        assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx
        assert "st.global.v4.b32" in ptx and "st.global.b8" not in ptx and "st.global.b16" not in ptx
        assert "cvt.rn.satfinite.e" in ptx and "ldmatrix" in ptx
        assert found.count("ex2.approx") == found.elements


@KINDS
def test_casts_of_odd_shapes_keep_their_values_in_ptxas(kind: str, is_gated: bool) -> None:
    assert len([*compiled(kind, is_gated, {"out_ptr", "dx_ptr"}, transposes=True, aligned=["cols"])]) == 2


def test_bf16_kernels_compile_for_hopper_with_wide_accesses() -> None:
    absent = {"rowwise_ptr", "columnwise_ptr", "scale_ptr", "amax_ptr", "band_sums_ptr"}
    for found in compiled("silu", True, absent, transposes=False):
        assert "ld.global.v4.b32" in found.ptx and "st.global.v4.b32" in found.ptx
        assert "st.global.b16" not in found.ptx
