"""LayerNorm and RMSNorm against float64; FP8 outputs bit for bit against the FP32 result of the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.norm import backward, forward
from flatfsdp.kernels.norm import rows as norm_rows
from flatfsdp.kernels.norm import wide as norm_wide
from flatfsdp.kernels.norm.backward import NormBackward
from flatfsdp.kernels.norm.forward import NormForward
from flatfsdp.kernels.shared.tiles import MULTIPROCESSORS, Tile, find
from tests.support.kernels.compiling import Compiled, compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs
from tests.support.kernels.running import (
    E4M3,
    E5M2,
    FORMATS,
    both,
    check_layouts,
    check_operator,
    garbage,
    saturated,
)
from tests.support.plain_layers import error

EPS = 1e-5
FORWARD = both(forward.reference, forward.launch)
BACKWARD = both(backward.reference, backward.launch)
KINDS = pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])


class Way(NamedTuple):
    """An implementation of the forward, and whether to request a columnwise output."""

    run: Callable[..., None]
    columnwise: bool

    def fp8_options(self, dtype: torch.dtype, device: str) -> dict[str, Any]:
        """Options for both layouts in FP8, if it can write both; else none."""
        options = {"dtype": dtype, "columnwise": True, "scale": torch.ones(1, device=device)}
        return options if self.columnwise else {}


@pytest.fixture(params=["reference", "rows", "transposed", "steps", "wide rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """The kernel for whole rows, with a transpose or not, and in several steps; the one for wide rows."""
    if request.param == "reference":
        return Way(forward.reference, True)
    if request.param == "wide rows":
        monkeypatch.setattr(forward, "WIDEST_ROW", 0)
    steps = 4 if request.param == "steps" else 1
    small = Tile(32, 256, 4, 2) if request.param == "wide rows" else Tile(2, 1024, 4, 2, steps)
    for module in (norm_rows, norm_wide):
        monkeypatch.setattr(module, "find", lambda *_: small)
    return Way(forward.launch, request.param != "rows")


def normalize(
    run: Callable[..., None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rms: bool,
    residual: Tensor | None = None,
    zero_centered: bool = False,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
) -> NormForward:
    """Calls `norm_forward` with the given implementation, into garbage memory."""
    rows, cols = x.shape
    result = NormForward(
        garbage(rows, cols, like=x, dtype=x.dtype),
        None if dtype is None else garbage(rows, cols, like=x, dtype=dtype),
        garbage(cols, rows, like=x, dtype=dtype) if columnwise and dtype else None,
        garbage(rows, cols, like=x, dtype=x.dtype),
        None if rms else garbage(rows, like=x),
        garbage(rows, like=x),
    )
    summed = None if residual is None else result.summed
    run(
        *(x, residual, weight, bias, summed, result.mean, result.rstd, *result[:3], scale, amax),
        *(EPS, zero_centered),
    )
    return result if residual is not None else result._replace(summed=x)


def gradients(
    run: Callable[..., None],
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    rms: bool,
    d_residual: Tensor | None = None,
    zero_centered: bool = False,
) -> NormBackward:
    _, mean, rstd = exact(x, weight, None, rms=rms)
    dx = garbage(*x.shape, like=x, dtype=x.dtype)
    grads = garbage(1 if rms else 2, x.shape[1], like=x)
    run(dy, x, weight, None if rms else mean.float(), rstd.float(), d_residual, dx, grads, zero_centered)
    return NormBackward(dx, grads[0], None if rms else grads[1])


def exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, rms: bool, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Result, mean and rstd in float64, from the same numbers."""
    value = x.double()
    mean = value.mean(1)
    centered = value if rms else value - mean[:, None]
    rstd = (centered.square().mean(1) + EPS).rsqrt()
    result = centered * rstd[:, None] * (weight.double() + int(zero_centered))
    return result if bias is None else result + bias.double(), mean, rstd


@KINDS
@pytest.mark.parametrize(("rows", "cols"), [(5, 48), (37, 80), (3, 1000), (2, 1024)])
def test_forward_against_float64(way: Way, rms: bool, rows: int, cols: int, device: str) -> None:
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((rows, cols), cols, cols))
    shift, options = None if rms else bias, way.fp8_options(E5M2, device)
    for zero_centered in (False, True):
        result = normalize(way.run, x, weight, shift, rms=rms, zero_centered=zero_centered, **options)
        out, mean, rstd = exact(x, weight, shift, rms=rms, zero_centered=zero_centered)
        assert result.out is not None
        assert error(result.out, out) < 1e-6
        assert error(result.rstd, rstd) < 1e-6
        assert result.mean is None or (result.mean - mean).abs().max() < 1e-6


@FORWARD
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(run: Any, dtype: torch.dtype, device: str) -> None:
    x, weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in ((9, 300), 300, 300))
    result = normalize(run, x, weight, bias, rms=False)
    once, _, _ = exact(x, weight, bias, rms=False)
    assert result.out is not None
    difference = (result.out.double() - once).abs()
    assert (difference <= torch.finfo(dtype).eps / 2 * once.abs() * 1.001 + 1e-6).all()


def test_a_large_mean_costs_no_digits(way: Way, device: str) -> None:
    x, weight = 1e4 + torch.randn(6, 1000, device=device), torch.ones(1000, device=device)
    result = normalize(way.run, x, weight, rms=False, **way.fp8_options(E5M2, device))
    _, _, rstd = exact(x, weight, None, rms=False)
    assert error(result.rstd, rstd) < 1e-4


@KINDS
def test_the_norm_sees_the_rounded_sum(way: Way, rms: bool, device: str) -> None:
    x, residual = (torch.randn(35, 272, device=device).bfloat16() for _ in range(2))
    weight, options = torch.randn(272, device=device), {"rms": rms, **way.fp8_options(E4M3, device)}
    result = normalize(way.run, x, weight, residual=residual, **options)
    assert torch.equal(result.summed, x + residual)
    alone = normalize(way.run, x + residual, weight, **options)
    assert result.out is not None and alone.out is not None
    torch.testing.assert_close(result.out, alone.out, rtol=2.0**-7, atol=1e-6)
    # Rounding to x's dtype changes statistics by more than that.
    torch.testing.assert_close(result.rstd, alone.rstd, rtol=1e-6, atol=0)
    if result.mean is not None:
        torch.testing.assert_close(result.mean, alone.mean, rtol=0, atol=1e-6)


@KINDS
@FORMATS
@pytest.mark.parametrize("rows", [40, 48], ids=["odd", "aligned"])
def test_fp8_and_amax_are_of_the_fp32_result(
    way: Way, rms: bool, dtype: torch.dtype, rows: int, device: str
) -> None:
    x = torch.randn(rows, 272, device=device)
    x[3] *= 1e-12  # subnormal results
    x[7, 5] = torch.nan
    x[11] = 0
    weight = torch.randn(272, device=device).exp() * 10  # some saturate
    limit = torch.finfo(dtype).max
    scale, amax = torch.tensor([limit / 20], device=device), torch.zeros(1, device=device)
    options: dict[str, Any] = {"dtype": dtype, "columnwise": way.columnwise, "scale": scale, "amax": amax}
    result = normalize(way.run, x, weight, rms=rms, **options)
    assert result.out is not None and result.rowwise is not None
    expected = saturated(result.out * scale, dtype)
    assert (expected.float().abs() == limit).any() and expected[7].isnan().all()
    assert (result.columnwise is not None) == way.columnwise
    check_layouts(expected, result.rowwise, result.columnwise)
    assert amax.isnan()


@pytest.mark.parametrize(
    ("work", "bands", "delay"),
    [
        *((norm_rows.TRANSPOSE_WORK, 4, 1), (norm_rows.TRANSPOSE_WORK, 4, 99)),
        (norm_rows.SLIM_TRANSPOSE_WORK, 3, 2),
    ],
)
def test_transposes_wait_for_all_rows_of_their_band(
    work: norm_rows.TransposeWork, bands: int, delay: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cols = bands * work.band + 32, 96
    programs = work.band // 2 + 1  # of a band: normalizing, transposing
    monkeypatch.setattr(norm_rows, "find", lambda *_: Tile(2, 128, 4))
    monkeypatch.setattr(norm_rows, "TRANSPOSE_WORK", work._replace(warps=delay * programs * 4))
    assert norm_rows.schedule(rows, cols, Tile(2, 128, 4), is_transposed=True).delay == min(delay, bands + 1)
    x, weight = torch.randn(rows, cols, device=device), torch.randn(cols, device=device)
    options: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "scale": torch.ones(1, device=device)}
    for _ in range(2):
        result = normalize(forward.launch, x, weight, rms=True, columnwise=True, **options)
        assert result.rowwise is not None and result.columnwise is not None
        assert not result.rowwise.float().isnan().any()
        assert torch.equal(result.columnwise.view(torch.uint8), result.rowwise.view(torch.uint8).T)


def test_only_many_programs_of_few_warps_transpose_large_tiles() -> None:
    for rows, rms, expected in (
        (8192, False, norm_rows.SLIM_TRANSPOSE_WORK),
        (8191, False, norm_rows.TRANSPOSE_WORK),
        (8192, True, norm_rows.TRANSPOSE_WORK),
    ):
        tile = norm_rows.row_tile(torch.bfloat16, 4096, rms=rms, is_transposed=True)
        assert norm_rows.transpose_work(rows, 4096, tile) == expected
        assert norm_rows.schedule(rows, 4096, tile, is_transposed=True).band == expected.band


def test_amax_only_grows(way: Way, device: str) -> None:
    x, weight = torch.randn(40, 80, device=device), torch.ones(80, device=device)
    options = {"dtype": E4M3, "columnwise": way.columnwise, "scale": torch.ones(1, device=device)}
    for before in (0.0, 1000.0):
        amax = torch.tensor([before], device=device)
        result = normalize(way.run, x, weight, rms=True, amax=amax, **options)
        assert result.out is not None
        assert amax.item() == max(before, result.out.abs().max().item())


@BACKWARD
@KINDS
@pytest.mark.parametrize(("rows", "cols"), [(5, 48), (67, 80), (2, 8208)])
def test_backward_against_float64(run: Any, rms: bool, rows: int, cols: int, device: str) -> None:
    x, dy, extra = (torch.randn(rows, cols, device=device) for _ in range(3))
    weight = torch.randn(cols, device=device)
    for zero_centered in (False, True):
        wide = [value.double().requires_grad_() for value in (x, weight, torch.zeros_like(weight))]
        exact(*wide, rms=rms, zero_centered=zero_centered)[0].backward(dy.double())
        ours = gradients(run, dy, x, weight, rms=rms, zero_centered=zero_centered)
        for grad, leaf in zip(ours, wide, strict=True):
            assert grad is None or error(grad, leaf.grad) < 2e-6
    with_extra = gradients(run, dy, x, weight, rms=rms, zero_centered=True, d_residual=extra)
    assert error(with_extra.dx, wide[0].grad + extra) < 2e-6


@BACKWARD
def test_d_residual_is_added_before_rounding(run: Any, device: str) -> None:
    x, dy, extra = (torch.randn(33, 80, device=device).bfloat16() for _ in range(3))
    weight = torch.randn(80, device=device).bfloat16()
    ours = gradients(run, dy, x, weight, rms=True, d_residual=extra).dx
    unrounded = gradients(run, dy.float(), x.float(), weight, rms=True).dx
    difference = (ours.double() - (unrounded.double() + extra)).abs()
    assert (difference <= 2.0**-8 * ours.abs() * 1.001 + 1e-6).all()


def test_weight_gradients_of_many_programs_are_complete_and_repeatable(device: str) -> None:
    rows, cols = 264 + 5, 4100
    x, dy = (torch.randn(rows, cols, device=device).bfloat16() for _ in range(2))
    weight = torch.ones(cols, device=device)
    first, again = (gradients(backward.launch, dy, x, weight, rms=False) for _ in range(2))
    assert first.dbias is not None and again.dbias is not None
    assert torch.equal(first.dweight, again.dweight) and torch.equal(first.dbias, again.dbias)
    assert error(first.dbias, dy.double().sum(0)) < 1e-6


@KINDS
def test_public_functions_return_what_is_asked_for(rms: bool, device: str) -> None:
    x, weight = torch.randn(7, 48, device=device), torch.ones(48, device=device)
    result = forward.norm_forward(
        *(x, weight, None),
        **{"eps": EPS, "rms": rms, "dtype": torch.float8_e4m3fn, "scale": torch.ones(1, device=device)},
        **{"high_precision": False, "rowwise": False, "columnwise": True},
    )
    assert result.out is None and result.rowwise is None and result.summed is x
    assert result.columnwise is not None and result.columnwise.shape == (48, 7)
    grads = backward.norm_backward(x, result.summed, weight, result.mean, result.rstd, rms=rms)
    assert (grads.dbias is None) == rms and grads.dx.shape == x.shape


@KINDS
def test_no_rows_give_no_rows(way: Way, rms: bool, device: str) -> None:
    x, weight = torch.empty(0, 48, device=device), torch.ones(48, device=device)
    scale, amax = torch.ones(1, device=device), torch.full((1,), 3.0, device=device)
    options: dict[str, Any] = {"dtype": E4M3, "scale": scale, "amax": amax, "columnwise": way.columnwise}
    normalize(way.run, x, weight, rms=rms, residual=x.clone(), **options)
    assert amax.item() == 3.0
    empty = forward.norm_forward(x, weight, None, eps=EPS, rms=rms, **options)
    assert empty.out is not None and empty.out.shape == (0, 48)
    run = backward.reference if way.run is forward.reference else backward.launch
    grads = gradients(run, x, x, weight, rms=rms)
    assert torch.equal(grads.dweight, torch.zeros_like(weight))
    grads = backward.norm_backward(x, x, weight, empty.mean, empty.rstd, rms=rms)
    assert torch.equal(grads.dweight, torch.zeros_like(weight))


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    for message, arguments, options in (
        (r"x is torch\.float64", (x.double(), weight, None), {"rms": True}),
        (r"x is .* strides \(1, 4\)", (torch.ones(8, 4).T, weight, None), {"rms": True}),
        (r"weight is torch\.float32 \(7,\)", (x, weight[:7], None), {"rms": True}),
        (r"RMSNorm has no bias", (x, weight, weight), {"rms": True}),
        (r"residual is torch\.bfloat16", (x, weight, None), {"rms": True, "residual": x.bfloat16()}),
        (r"needs a scale", (x, weight, None), {"rms": True, "dtype": torch.float8_e5m2}),
        (r"columnwise output is FP8 only", (x, weight, None), {"rms": True, "columnwise": True}),
        (r"no output", (x, weight, None), {"rms": True, "high_precision": False}),
        (r"amax is torch\.float32 \(2,\)", (x, weight, None), {"rms": True, "amax": torch.zeros(2)}),
    ):
        with pytest.raises(ValueError, match=message):
            forward.norm_forward(*arguments, eps=EPS, **options)
    with pytest.raises(ValueError, match="mean must be None for RMSNorm"):
        backward.norm_backward(x, x, weight, torch.ones(4), torch.ones(4), rms=True)
    with pytest.raises(ValueError, match=r"dy is torch\.float32 \(3, 8\)"):
        backward.norm_backward(x[:3], x, weight, None, torch.ones(4), rms=True)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    x, weight, row = torch.randn(4, 8), torch.randn(8), torch.ones(4)
    outputs = (x.clone(), row.clone(), row.clone(), x.clone(), None, None)
    check_operator("norm_forward_", x, x.clone(), weight, None, *outputs, None, torch.zeros(1), EPS, True)
    sums = torch.empty(2, 8)
    check_operator("norm_backward_", x, x.clone(), weight, row, row.clone(), None, x.clone(), sums, False)


INPUTS = {
    "x_ptr residual_ptr weight_ptr bias_ptr summed_ptr out_ptr": "*bf16",
    "mean_ptr rstd_ptr scale_ptr amax_ptr": "*fp32",
    **{"rowwise_ptr columnwise_ptr": "*fp8e4nv", "arrived_ptr": "*i32", "rows": "i32", "eps": "fp32"},
}
GRADIENTS = {
    **{"dy_ptr x_ptr weight_ptr d_residual_ptr dx_ptr": "*bf16", "rows rows_per_program": "i32"},
    "mean_ptr rstd_ptr dweight_ptr dbias_ptr": "*fp32",
}
ALIGNED = ("rows", "rows_per_program")
STAGED = "cp.async.cg.shared.global"


def check_compiled(
    kernel: str, types: dict[str, str], absent: set[str], tile: Tile, *, loads: str = STAGED, **constants: Any
) -> Compiled:
    """Checks that loads and stores of activations have 16 bytes."""
    constants |= {**dict.fromkeys(absent), "ZERO_CENTERED": False}
    compiled = compile_for_hopper(f"norm.{kernel}", types, constants, tile=tile, aligned=ALIGNED)
    assert not endangered_pairs(compiled.ptx)
    assert loads in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "st.global.b8" not in compiled.ptx and "st.global.b16" not in compiled.ptx
    return compiled


@pytest.mark.parametrize("cols", [1024, 4096, 8192, 16384])
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm, residual"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
def test_whole_rows_compile_for_hopper(cols: int, rms: bool, is_transposed: bool) -> None:
    tile = norm_rows.row_tile(torch.bfloat16, cols, rms=rms, is_transposed=is_transposed)
    order = norm_rows.schedule(8192, cols, tile, is_transposed=is_transposed)
    absent = {"bias_ptr", "mean_ptr"} if rms else {"residual_ptr", "summed_ptr"}
    absent |= set() if is_transposed else {"columnwise_ptr", "arrived_ptr"}
    constants = {
        **{"COLS": cols, "WHOLE": is_transposed, "ROWWISE_POLICY": norm_rows.KEPT if is_transposed else ""},
        **{"BAND": order.band, "TRANSPOSE_COLS": order.cols, "DELAY": order.delay, "IS_EARLY": True},
    }
    loads = STAGED if tile.stages > 1 and tile.steps > 1 else "ld.global.v4.b32"
    compiled = check_compiled("rows._row_kernel", INPUTS, absent, tile, loads=loads, **constants)
    assert "ldmatrix" in compiled.ptx or not is_transposed
    assert ("atom.global.gpu.release" in compiled.ptx) == is_transposed
    assert ("ld.global.gpu.acquire" in compiled.ptx) == is_transposed


def test_the_clearing_of_counters_compiles_for_hopper() -> None:
    constants = {"IS_EARLY": True, "BLOCK": norm_rows.CLEARED}
    compiled = compile_for_hopper("norm.rows._clear_kernel", {"arrived_ptr": "*i32", "n": "i32"}, constants)
    assert compiled.shared == 0
    assert "griddepcontrol.wait" in compiled.ptx


def test_wide_rows_compile_for_hopper() -> None:
    tile = norm_wide.wide_tile(torch.bfloat16, 32768)
    check_compiled("wide._wide_kernel", INPUTS, {"out_ptr"}, tile, COLS=32768)


def test_casts_of_odd_shapes_keep_their_values_in_ptxas() -> None:
    tile = norm_wide.wide_tile(torch.float32, 272)
    types = {**INPUTS, **{name: "*fp32" for name, kind in INPUTS.items() if kind == "*bf16"}}
    constants = {"ZERO_CENTERED": False, "COLS": 272}
    assert not endangered_pairs(compile_for_hopper("norm.wide._wide_kernel", types, constants, tile=tile).ptx)


@pytest.mark.parametrize("cols", [4096, 16384])
def test_backward_compiles_for_hopper(cols: int) -> None:
    tile = backward.row_tile(torch.bfloat16, cols)
    absent = set() if cols <= backward.WIDEST_FUSED else {"dweight_ptr", "dbias_ptr"}
    compiled = check_compiled("backward._backward_kernel", GRADIENTS, absent, tile, COLS=cols)
    programs = backward.programs_of(tile) // MULTIPROCESSORS
    assert compiled.registers * 32 * tile.warps * programs <= backward.REGISTERS, "all run at once"


def test_weight_gradients_of_wide_rows_compile_for_hopper() -> None:
    tile, kernel = find("norm_backward, sum", torch.bfloat16, 16384), "norm.backward._weight_kernel"
    compiled = compile_for_hopper(kernel, GRADIENTS, {"COLS": 16384}, tile=tile, aligned=ALIGNED)
    assert STAGED in compiled.ptx
