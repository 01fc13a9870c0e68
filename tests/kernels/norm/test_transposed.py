"""The norm that also transposes, which only a GPU can run, because Gluon has no interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.norm import forward
from flatfsdp.kernels.norm import transposed as norm_transposed
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.fp8_pairs import endangered_pairs

TYPES = {
    **{"x_ptr weight_ptr bias_ptr": "*bf16", "mean_ptr rstd_ptr scale_ptr amax_ptr": "*fp32"},
    **{"rowwise_ptr columnwise_ptr": "*fp8e4nv", "rows": "i32", "eps": "fp32"},
}
NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("cols", norm_transposed.WIDTHS)
@pytest.mark.parametrize(
    "absent",
    [(), ("bias_ptr", "mean_ptr"), ("amax_ptr", "rowwise_ptr")],
    ids=["layernorm", "rmsnorm", "little"],
)
def test_compiles_for_hopper(cols: int, absent: tuple[str, ...]) -> None:
    warps, constants = norm_transposed.WARPS, {**dict.fromkeys(absent), "COLS": cols, "IS_EARLY": True}
    constants |= {"ZERO_CENTERED": False, "WARPS": warps}
    compiled = compile_for_hopper(
        "norm.transposed._kernel", TYPES, constants, num_warps=warps, aligned=["rows"]
    )
    assert not endangered_pairs(compiled.ptx)
    assert "cp.async.cg.shared.global" in compiled.ptx
    assert "st.global.L1::evict_last.L2::cache_hint.v4.b32" in compiled.ptx
    assert "st.global.b8" not in compiled.ptx and "st.global.b16" not in compiled.ptx


def test_only_shapes_that_keep_the_gpu_busy_are_taken() -> None:
    good = [rows for rows in range(0, 10_000, 32) if norm_transposed.is_good_shape(rows, 4096)]
    assert {4096, 8192} < set(good) and good[0] == 3808 and 4256 not in good
    for rows, cols in ((8192, 1024), (8192, 8192), (8200, 4096), (2**20, 4096), (64, 4096)):
        assert not norm_transposed.is_good_shape(rows, cols), (rows, cols)


def compare(x: Tensor, *, rms: bool, zero_centered: bool, rowwise: bool, with_amax: bool) -> None:
    """Compares with the reference; bytes may differ if a value is near the middle of two."""
    weight, bias = (torch.randn(x.shape[1], device=x.device).bfloat16() for _ in range(2))
    options: dict[str, Any] = {"eps": 1e-5, "rms": rms, "zero_centered": zero_centered, "rowwise": rowwise}
    options |= {"dtype": torch.float8_e4m3fn, "high_precision": False, "columnwise": True}
    arguments = (x, weight, None if rms else bias)
    scale = torch.tensor([37.3], device=x.device)
    amaxes = [torch.zeros(1, device=x.device) if with_amax else None for _ in range(3)]
    ours, again = (forward.norm_forward(*arguments, scale=scale, amax=amax, **options) for amax in amaxes[:2])
    assert ours.columnwise is not None and again.columnwise is not None
    columns = ours.columnwise.view(torch.uint8)
    assert torch.equal(columns, again.columnwise.view(torch.uint8))
    assert ours.rowwise is None or torch.equal(ours.rowwise.view(torch.uint8).T, columns)

    theirs = ours._replace(
        columnwise=torch.empty_like(ours.columnwise),
        mean=None if rms else torch.empty_like(ours.rstd),
        rstd=torch.empty_like(ours.rstd),
    )
    statistics = (None, theirs.mean, theirs.rstd)
    forward.reference(
        *(x, None, weight, arguments[2], *statistics, None, None, theirs.columnwise, scale, amaxes[2]),
        *(1e-5, zero_centered),
    )
    assert theirs.columnwise is not None
    differ = (columns != theirs.columnwise.view(torch.uint8)).float().mean().item()
    assert differ < 1e-4
    torch.testing.assert_close(ours.rstd, theirs.rstd, rtol=2e-6, atol=0, equal_nan=True)
    if ours.mean is not None and theirs.mean is not None:
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6, equal_nan=True)
    if amaxes[0] is not None and amaxes[2] is not None:
        torch.testing.assert_close(amaxes[0], amaxes[2], rtol=1e-6, atol=0, equal_nan=True)


@NEEDS_HOPPER
@pytest.mark.parametrize("cols", norm_transposed.WIDTHS)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("rows", [3808, 8192, 12384])
def test_equals_the_reference(rows: int, cols: int, rms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    launch = norm_transposed.launch
    monkeypatch.setattr(norm_transposed, "launch", lambda *args: (taken.append(1), launch(*args)))
    spread, shift = 3 * torch.rand(rows, 1, device="cuda"), 100 * torch.randn(rows, 1, device="cuda")
    x = (torch.randn(rows, cols, device="cuda") * spread + shift).bfloat16()
    compare(x, rms=rms, zero_centered=False, rowwise=True, with_amax=True)
    compare(x, rms=rms, zero_centered=True, rowwise=False, with_amax=False)
    assert len(taken) == 4


@NEEDS_HOPPER
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_nan_infinity_and_rows_of_zeros(value: float) -> None:
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    x[5, 7] = value
    x[6] = 0
    compare(x, rms=False, zero_centered=False, rowwise=True, with_amax=True)
