"""Counts of amaxes that do not fit their scale, in PyTorch and in Triton."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast import overflows, scaling
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator

E4M3 = 448.0
BOTH = both(overflows.count_reference, overflows.count_launch)
AMAX = [0.0, 1.0, 224.0, 224.00002, 1e30, math.inf, math.nan, 2.0**-149]


def counts_of(run: Callable[..., None], amax: Tensor, scale: Tensor, fp8_max: float = E4M3) -> Tensor:
    counts = torch.zeros(overflows.ROWS, amax.numel(), dtype=torch.int64, device=amax.device)
    run(amax, scale, torch.full_like(scale, fp8_max), counts)
    return counts


@BOTH
def test_what_counts(run: Callable[..., None], device: str) -> None:
    amax = torch.tensor(AMAX, device=device)
    counts = counts_of(run, amax, torch.full_like(amax, 2.0))
    assert counts.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
    ]


@BOTH
def test_counts_are_added(run: Callable[..., None], device: str) -> None:
    amax, scale = torch.tensor([1.0, math.inf], device=device), torch.ones(2, device=device)
    counts = torch.full((overflows.ROWS, 2), 2**40, device=device)
    for _ in range(3):
        run(amax, scale, torch.full_like(scale, E4M3), counts)
    assert (counts - 2**40).tolist() == [[3, 3], [0, 3], [0, 3], [0, 0]]


@BOTH
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_scale_of_an_amax_is_never_too_large_for_it(
    run: Callable[..., None], power_of_two: bool, device: str
) -> None:
    """This includes rounding: amax * scale is above 448 for many of these."""
    amax = torch.rand(1000, device=device) * 10.0 ** torch.randint(-30, 30, (1000,), device=device)
    limit = torch.full_like(amax, E4M3)
    scale, _ = scaling.current_scales(amax, limit, power_of_two=power_of_two)
    assert power_of_two or (amax * scale > E4M3).any()
    assert not counts_of(run, amax, scale)[1].any()
    assert counts_of(run, amax * 2.0001, scale)[1].all()


def test_kernel_and_reference_agree_on_whole_models(device: str) -> None:
    amax = torch.randn(777, device=device).abs() * (torch.rand(777, device=device) > 0.3)
    amax[::50], amax[3::70] = math.nan, math.inf
    scale = 2.0 ** torch.randint(0, 20, (777,), device=device)
    results = [counts_of(run, amax, scale) for run in (overflows.count_reference, overflows.count_launch)]
    assert torch.equal(*results) and results[0].any(1).all()


def test_wrong_shapes_and_dtypes_are_named() -> None:
    three, counts = torch.ones(3), torch.zeros(4, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(2,\); count_overflows needs"):
        overflows.count_overflows(three, three[:2], three, counts)
    with pytest.raises(ValueError, match=r"counts is torch.float32 \(4, 3\).*torch.int64"):
        overflows.count_overflows(three, three, three, counts.float())


def test_faked_calls_go_through_the_operator() -> None:
    three, counts = torch.ones(3), torch.zeros(4, 3, dtype=torch.int64)
    check_operator("count_overflows_", three, three, three, counts)


def test_it_compiles_for_hopper() -> None:
    types = {"amax_ptr scale_ptr fp8_max_ptr": "*fp32", "counts_ptr": "*i64", "n": "i32"}
    constants = {"INFINITY": overflows.INFINITY, "BLOCK": overflows.BLOCK}
    compiled = compile_for_hopper("cast.overflows._count_kernel", types, constants)
    assert "div.rn.f32" in compiled.ptx and "div.full" not in compiled.ptx
