"""Casts to FP8 in both layouts, with amax and column sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast import cast as module
from flatfsdp.kernels.cast.cast import cast, max_abs
from flatfsdp.kernels.cast.transpose import transpose
from flatfsdp.kernels.shared.tiles import find
from tests.support.assertions import assert_raises
from tests.support.kernels.compiling import DTYPE_OF, VECTOR, X_TYPES, Compiled, compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs
from tests.support.kernels.running import (
    E4M3,
    E5M2,
    FORMATS,
    INPUTS,
    bits,
    both,
    check_operator,
    garbage,
    saturated,
)

BOTH = both(module.reference, module.launch)


def run_all(
    run: Any, x: Tensor, scale: float, dtype: torch.dtype, old_amax: float = 0.0
) -> dict[str, Tensor]:
    """Every output of one call, in poisoned memory."""
    rows, cols = x.shape
    outputs = {
        "rowwise": garbage(rows, cols, like=x, dtype=dtype),
        "columnwise": garbage(cols, rows, like=x, dtype=dtype),
        "amax": torch.full((1,), old_amax, device=x.device),
        "column_sum": garbage(cols, like=x),
    }
    run(x, torch.full((1,), scale, device=x.device), *outputs.values())
    return outputs


def check_bits(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Compares bit for bit; the message shows how many differ, where the first does, and how."""
    ours, theirs = bits(ours), bits(theirs)
    where = (ours != theirs).nonzero()
    if len(where):
        row, col = where[0].tolist()
        raise AssertionError(
            f"{name}: {len(where)} of {ours.numel()} bytes differ, in columns "
            f"{where[:, 1].unique().tolist()[:20]} of {ours.shape[1]}; at [{row}, {col}] "
            f"{ours[row, col].item():#x} for {theirs[row, col].item():#x}"
        )


@BOTH
@FORMATS
@INPUTS
@pytest.mark.parametrize("shape", [(5, 16), (123, 48), (300, 70), (96, 176)])
def test_all_outputs_against_float64(
    run: Any, shape: tuple[int, int], x_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(shape, device=device).to(x_dtype)
    scale = 37.3
    out = run_all(run, x, scale, dtype)
    # One rounding of the product to FP32, one to FP8.
    product = (x.double() * torch.tensor(scale).double()).float()
    check_bits("rowwise", out["rowwise"], saturated(product, dtype))
    check_bits("columnwise", out["columnwise"].t(), saturated(product, dtype))
    assert out["amax"].item() == x.double().abs().max().item()
    exact = x.double().sum(0)
    assert (out["column_sum"].double() - exact).norm() <= 1e-6 * x.double().abs().sum(0).norm()
    back = out["rowwise"].double() / scale
    inside = product.abs() <= torch.finfo(dtype).max
    error = ((back - x.double()) * inside).norm() / x.double().norm()
    assert error < {E4M3: 0.03, E5M2: 0.06}[dtype]


@pytest.mark.parametrize("first", [0, 1, 8])
def test_later_launches_of_one_shape(first: int, device: str) -> None:
    """Addresses of matrix and amax are multiples of 16 bytes or not."""
    memory = torch.randn(3, 16 * 48 + 8, device=device).bfloat16()
    amaxes, scale = torch.zeros(3, 8, device=device), torch.full((1,), 3.0, device=device)
    for row in range(3):
        x, amax = memory[row, first : first + 16 * 48].view(16, 48), amaxes[row, first % 8 : first % 8 + 1]
        got = cast(x, scale, E4M3, amax=amax, columnwise=True)
        assert got.rowwise is not None and got.columnwise is not None
        check_bits("rowwise", got.rowwise, saturated(x.float() * scale, E4M3))
        check_bits("columnwise", got.columnwise.t(), saturated(x.float() * scale, E4M3))
    assert torch.equal(amaxes.amax(1), memory[:, first : first + 16 * 48].abs().amax(1).float())


@BOTH
@FORMATS
def test_special_values(run: Any, dtype: torch.dtype, device: str) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    values = [0.0, -0.0, 2.0**-149, -(2.0**-130), torch.inf, -torch.inf, 3e38, -3e38, largest, -largest]
    values += [smallest, smallest / 4, -smallest / 4 * 1.5, largest * 1.03, largest * 1.2]
    x = torch.tensor([values], device=device)
    out = run_all(run, x, 1.0, dtype)
    check_bits("rowwise", out["rowwise"], saturated(x, dtype))
    check_bits("columnwise", out["columnwise"].t(), saturated(x, dtype))
    finite = out["rowwise"].float()
    assert finite[0, 4] == largest and finite[0, 5] == -largest, "infinity saturates"
    assert torch.equal(torch.signbit(finite[0, :2]), torch.tensor([False, True], device=device))
    assert out["amax"].item() == torch.inf


@BOTH
@FORMATS
def test_nan_stays_nan_and_wins_the_amax(run: Any, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(70, 70, device=device)
    x[3, 65] = torch.nan
    x[69, 0] = -torch.inf
    out = run_all(run, x, 2.0, dtype)
    assert out["amax"].isnan().all()
    assert torch.equal(out["rowwise"].float().isnan(), x.isnan())
    assert torch.equal(out["columnwise"].float().isnan(), x.isnan().t())
    again = run_all(run, torch.ones(2, 2, device=device), 1.0, dtype, old_amax=torch.nan)
    assert again["amax"].isnan().all()


@BOTH
@INPUTS
@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")  # by the interpreter
def test_sums_of_a_column_do_not_reach_others(run: Any, x_dtype: torch.dtype, device: str) -> None:
    x = torch.ones(150, 70, device=device, dtype=x_dtype)
    x[3, 65], x[149, 0], x[149, 1], x[2, 1] = torch.nan, -torch.inf, torch.inf, -torch.inf
    sums = run_all(run, x, 1.0, E5M2)["column_sum"]
    assert sums[65].isnan() and sums[0] == -torch.inf and sums[1].isnan()
    assert (sums[2:65] == 150).all() and (sums[66:] == 150).all()


@BOTH
def test_the_amax_is_a_running_maximum_in_its_slot(run: Any, device: str) -> None:
    history = torch.tensor([1.0, 2.0, 3.0], device=device)
    for largest, expected in ((0.5, 2.0), (7.0, 7.0), (-9.0, 9.0)):
        x = torch.zeros(3, 100, device=device)
        x[1, 70] = largest
        run(x, torch.ones(1, device=device), x.to(E4M3), None, history[1:2], None)
        assert history.tolist() == [1.0, expected, 3.0]


@BOTH
@pytest.mark.parametrize("shape", [(0, 48), (48, 0)])
def test_nothing_is_cast_to_nothing(run: Any, shape: tuple[int, int], device: str) -> None:
    out = run_all(run, torch.empty(shape, device=device), 1.0, E4M3, old_amax=3.0)
    assert out["amax"].item() == 3.0
    assert torch.equal(out["column_sum"], torch.zeros(shape[1], device=device))
    x = torch.empty(shape, device=device).bfloat16()
    result = cast(x, torch.ones(1, device=device), E5M2, columnwise=True)
    assert result.rowwise.shape == shape and result.columnwise.shape == shape[::-1]
    assert transpose(result.rowwise).shape == shape[::-1]


@both(module.max_abs_reference, module.max_abs_launch)
@INPUTS
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (33, 1000)])
def test_max_abs(run: Any, x_dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device).to(x_dtype)
    largest = x.double().abs().max().item()
    for before, expected in ((0.0, largest), (1e9, 1e9), (torch.inf, torch.inf)):
        history = torch.tensor([-1.0, before, -1.0], device=device)
        run(x, history[1:2])
        assert history.tolist() == [-1.0, expected, -1.0]
    for special in (-torch.inf, torch.nan):
        x[-1, -1] = special
        amax = torch.zeros(1, device=device)
        run(x, amax)
        assert str(amax.item()) == str(abs(special))


def test_max_abs_with_and_without_a_place_for_it(device: str) -> None:
    x = torch.tensor([[1.0, -3.0]], device=device)
    assert max_abs(x).tolist() == [3.0]
    out = torch.tensor([2.0], device=device)
    assert max_abs(x, out) is out and out.item() == 3.0
    assert max_abs(x[:0]).tolist() == [0.0]
    assert max_abs(x[:0], out).item() == 3.0


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_only_what_is_asked_for_comes_back(wanted: tuple[bool, bool], device: str) -> None:
    x, scale = torch.randn(33, 20, device=device), torch.ones((), device=device)
    rowwise, columnwise = wanted
    for column_sum in (None, torch.float32, torch.bfloat16):
        result = cast(x, scale, E4M3, rowwise=rowwise, columnwise=columnwise, column_sum=column_sum)
        assert [part is not None for part in result] == [rowwise, columnwise, column_sum is not None]
        if column_sum is not None:
            assert result.column_sum is not None and result.column_sum.dtype == column_sum
        if rowwise:
            assert torch.equal(bits(result.rowwise), bits(saturated(x, E4M3)))
        if columnwise:
            assert torch.equal(bits(result.columnwise), bits(saturated(x, E4M3)).t())


def test_what_does_not_fit_is_named() -> None:
    x, one = torch.randn(4, 6), torch.ones(1)
    with pytest.raises(ValueError, match=r"x is torch\.float32 of shape \(6, 4\) and strides \(1, 6\)"):
        cast(x.t(), one, E4M3)
    assert_raises(ValueError, r"x is torch\.float64", cast, x.double(), one, E4M3)
    assert_raises(ValueError, r"x is torch\.float32 of shape \(24,\)", max_abs, x.flatten())
    assert_raises(ValueError, r"out is torch\.float32 \(2,\)", max_abs, x, torch.zeros(2))
    assert_raises(ValueError, r"dtype is torch\.bfloat16", cast, x, one, torch.bfloat16)
    assert_raises(ValueError, "at least one layout", cast, x, one, E4M3, rowwise=False)
    assert_raises(ValueError, r"scale is torch\.float32 \(2,\)", cast, x, torch.ones(2), E4M3)
    assert_raises(ValueError, r"amax is torch\.float64", cast, x, one, E4M3, amax=one.double())


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    x, one = torch.randn(4, 6), torch.ones(1)
    q, q_t = x.to(E4M3), x.t().contiguous().to(E4M3)
    check_operator("cast_", x, one, q, q_t, torch.zeros(1), torch.zeros(6))
    check_operator("cast_", x, one, None, q_t, None, None)
    check_operator("max_abs_", x, torch.zeros(1))


def compiled_cast(x_type: str, is_summed: bool, aligned: tuple[str, ...]) -> Compiled:
    types = {"scale_ptr amax_ptr band_sums_ptr": "*fp32", "rowwise_ptr columnwise_ptr": "*fp8e4nv"}
    types |= {"x_ptr": f"*{x_type}", "rows cols": "i32"}
    constants = {
        "IS_EARLY": True,
        "WHOLE": "rows" in aligned,
        **({} if is_summed else {"band_sums_ptr": None}),
    }
    tile = find("cast, sum" if is_summed else "cast", DTYPE_OF[x_type], 4096)
    return compile_for_hopper("cast.cast._cast_kernel", types, constants, tile=tile, aligned=aligned)


@X_TYPES
@pytest.mark.parametrize("is_summed", [False, True])
def test_cast_compiles_for_hopper_without_spills(x_type: str, is_summed: bool) -> None:
    compiled = compiled_cast(x_type, is_summed, ("rows", "cols"))
    # The input and both outputs, all 16 bytes wide.
    assert compiled.count("ld.global.v4.b32") == compiled.elements // VECTOR[x_type]
    assert compiled.count("st.global.v4.b32") == 2 * compiled.elements // 16
    assert ("mma.sync" in compiled.ptx) == (is_summed and x_type == "bf16")
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    assert compiled.count("atom.global") == 1, "one for a program"
    assert not endangered_pairs(compiled.ptx)


@pytest.mark.parametrize("aligned", [(), ("cols",)], ids=["nothing", "cols"])
@pytest.mark.parametrize("is_summed", [False, True])
def test_cast_of_odd_shapes_keeps_its_values_in_ptxas(is_summed: bool, aligned: tuple[str, ...]) -> None:
    assert not endangered_pairs(compiled_cast("fp32", is_summed, aligned).ptx)


@X_TYPES
def test_max_abs_compiles_for_hopper_without_spills(x_type: str) -> None:
    tile = find("max_abs", torch.bfloat16, 4096)
    types = {"x_ptr": f"*{x_type}", "amax_ptr": "*fp32", "numel": "i32"}
    compiled = compile_for_hopper("cast.cast._max_abs_kernel", types, {}, tile=tile, aligned=["numel"])
    assert compiled.registers <= {"bf16": 64, "fp32": 128}[x_type]
    assert compiled.count("ld.global.v4.b32") == compiled.elements // VECTOR[x_type]
    assert compiled.count("atom.global") == 1
