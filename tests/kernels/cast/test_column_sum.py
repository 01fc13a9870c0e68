"""Sums over rows against float64, in one band of rows and in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast import column_sum as module
from flatfsdp.kernels.cast.column_sum import column_sum, division
from flatfsdp.kernels.shared.outputs import rows_at_once
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import DTYPE_OF, VECTOR, X_TYPES, compile_for_hopper
from tests.support.kernels.running import DTYPES, both, check_operator, garbage

BOTH = both(module.reference, module.launch)


def summed(run: Any, x: Tensor) -> Tensor:
    """Sums into garbage memory."""
    out = garbage(x.shape[1], like=x)
    run(x, out)
    return out


@pytest.fixture(params=[1, 3], ids=["one band", "three bands"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the number of programs that share the columns of a narrow matrix."""
    monkeypatch.setattr(module, "PROGRAMS", request.param)


@BOTH
@DTYPES
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("shape", [(1, 16), (5, 123), (1031, 31), (2500, 20)])
def test_against_float64(run: Any, dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    error = summed(run, x).double() - x.double().sum(0)
    assert (error.abs() <= 1e-6 * x.double().abs().sum(0)).all()


@BOTH
def test_infinity_and_nan_stay_in_their_columns(run: Any, device: str) -> None:
    x = torch.ones(70, 40, device=device)
    x[69, 3], x[0, 39] = torch.inf, torch.nan
    sums = summed(run, x)
    assert sums[3] == torch.inf and sums[39].isnan()
    assert (sums.nan_to_num(70.0, 70.0) == 70).all()


@BOTH
@pytest.mark.parametrize("shape", [(0, 48), (48, 0)])
def test_no_rows_give_zeros(run: Any, shape: tuple[int, int], device: str) -> None:
    assert torch.equal(summed(run, torch.empty(shape, device=device)), torch.zeros(shape[1], device=device))


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (100, 64), (8192, 1024), (8192, 4096), (4097, 28672)])
def test_every_row_is_in_one_band(rows: int, cols: int) -> None:
    tile = find("column_sum", torch.bfloat16, cols)
    bands, steps = division(rows, cols, tile)
    height = steps * tile.rows
    assert (bands - 1) * height < rows <= bands * height


@BOTH
@pytest.mark.usefixtures("programs")
def test_sums_are_rounded_to_what_is_asked_for(run: Any, device: str) -> None:
    x = torch.randn(1100, 20, device=device).bfloat16()
    narrow = torch.full((20,), torch.nan, dtype=torch.bfloat16, device=device)
    run(x, narrow)
    assert torch.equal(narrow, summed(run, x).bfloat16())


def test_public_function_has_fp32_and_other_results(device: str) -> None:
    x = torch.randn(9, 20, device=device).bfloat16()
    sums = column_sum(x)
    assert sums.dtype == torch.float32 and torch.allclose(sums, x.float().sum(0), atol=1e-5)
    assert torch.equal(column_sum(x, torch.bfloat16), sums.bfloat16())


def test_what_does_not_fit_is_named() -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"x is torch\.float32 of shape \(6, 4\) and strides \(1, 6\)"):
        column_sum(x.t())
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        column_sum(x.double())


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    check_operator("column_sum_", torch.randn(4, 6), torch.zeros(6))


@X_TYPES
@pytest.mark.parametrize("cols", [4096, 12288])
def test_it_compiles_for_hopper_with_wide_loads(x_type: str, cols: int) -> None:
    tile = find("column_sum", DTYPE_OF[x_type], cols)
    types = {"x_ptr out_ptr": f"*{x_type}", "rows cols steps": "i32"}
    constants = {"SUM_ROWS": rows_at_once(tile, VECTOR[x_type])}
    kernel = "cast.column_sum._column_sum_kernel"
    compiled = compile_for_hopper(kernel, types, constants, tile=tile, aligned=["rows", "cols"])
    # Accesses in flight before the loop, and in its body.
    accesses = compiled.elements // VECTOR[x_type]
    assert compiled.count("cp.async.cg.shared.global") == accesses * tile.stages


@pytest.mark.parametrize("cols", [4096, 8192, 16384])
def test_bands_are_read_after_the_kernel_that_writes_them(cols: int) -> None:
    tile, kernel = find("sum_bands", torch.float32, cols), "shared.outputs._sum_bands_kernel"
    types = {"bands_ptr": "*fp32", "out_ptr": "*bf16", "bands cols": "i32"}
    compiled = compile_for_hopper(kernel, types, {"IS_EARLY": True}, tile=tile, aligned=["cols"])
    assert 0 < compiled.ptx.index("griddepcontrol.wait") < compiled.ptx.index("ld.global")
