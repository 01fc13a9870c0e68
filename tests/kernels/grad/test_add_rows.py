"""Rows added to a sum in their order, against one addition for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flatfsdp.kernels.grad import add_rows as module
from flatfsdp.kernels.grad.add_rows import add_rows
from flatfsdp.kernels.shared.tiles import find
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator

BOTH = both(module.reference, module.launch)
TILE = find("accumulate_many", torch.bfloat16, 1)
NUMELS = [16, TILE.cols, TILE.cols + 16, 3 * TILE.cols + 5]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("k", "own"), [(1, None), (2, None), (8, None), (1, 0), (2, 1), (3, 0), (4, 2)])
@pytest.mark.parametrize("numel", NUMELS)
def test_each_row_is_one_exact_addition(
    run: Any, numel: int, k: int, own: int | None, dtype: torch.dtype, device: str
) -> None:
    # As wide a range as makes every order give other bits.
    wide = torch.randn(k, numel, device=device) * 10 ** torch.randn(k, numel, device=device)
    rows = wide.to(dtype)
    others = [row for index, row in enumerate(rows) if index != own]
    received = torch.stack(others) if others else rows[:0]
    operands = (received, None, 0) if own is None else (received, wide[own], own)
    target = torch.full((numel,), torch.nan, device=device)
    run(target, *operands, True)
    expected = rows[0].float()
    for row in rows[1:]:
        expected = expected + row.float()
    assert torch.equal(target, expected)
    run(target, *operands, False)
    for row in rows:
        expected = expected + row.float()
    assert torch.equal(target, expected)
    if k > 2 and dtype == torch.float32:
        assert not torch.equal(expected, rows.flip(0).cumsum(0)[-1] + rows.cumsum(0)[-1])


@BOTH
def test_special_values(run: Any, device: str) -> None:
    specials = torch.tensor(
        [0.0, -0.0, 2.0**-149, torch.inf, -torch.inf, torch.nan] + 10 * [1.0], device=device
    )
    target = torch.full_like(specials, torch.nan)
    run(target, specials[None], None, 0, True)
    torch.testing.assert_close(target, specials, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(target[1])
    run(target, -specials[None], specials, 0, False)
    torch.testing.assert_close(target, specials + specials - specials, rtol=0, atol=0, equal_nan=True)


def test_a_double_sum_on_the_cpu() -> None:
    rows, target = torch.randn(3, 32, dtype=torch.float64), torch.empty(32, dtype=torch.float64)
    add_rows(target, rows, first=True)
    assert torch.equal(target, (rows[0] + rows[1]) + rows[2])


def test_what_does_not_fit_is_named() -> None:
    target = torch.zeros(16)
    for rows in (torch.zeros(16), torch.zeros(2, 8), torch.zeros(0, 16), torch.zeros(16, 2).t()[:, :16]):
        with pytest.raises(ValueError, match="add_rows got rows"):
            add_rows(target, rows, first=True)
    for own, place in ((torch.zeros(8), 0), (torch.zeros(16), 3), (torch.zeros(32)[::2], 0)):
        with pytest.raises(ValueError, match=r"of its own \(\d+,\) at \d"):
            add_rows(target, torch.zeros(2, 16), own, place, first=True)


@pytest.mark.parametrize("own", [None, torch.randn(16)])
def test_compiled_and_faked_calls_go_through_the_operator(own: torch.Tensor | None) -> None:
    check_operator("add_rows_", torch.zeros(16), torch.randn(2, 16), own, 1, False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_compiles_for_hopper_with_wide_loads_and_without_spills(dtype: str) -> None:
    types = {"target_ptr": "*fp32", "own_ptr": "*fp32", "rows_ptr": f"*{dtype}", "numel": "i32"}
    settings = {"K": 4, "OWN": 1, "FIRST": False}
    compiled = compile_for_hopper(
        "grad.add_rows._add_rows_kernel", types, settings, tile=TILE, aligned=["numel"]
    )
    wide = compiled.elements // 4
    rows = wide if dtype == "fp32" else wide // 2
    assert compiled.count("ld.global.v4.b32") == 2 * wide + 3 * rows
    assert compiled.count("st.global.v4.b32") == wide
