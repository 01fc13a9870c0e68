"""Delayed scaling, slot by slot, in PyTorch and in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast import scaling
from tests.support.kernels.compiling import compile_for_hopper
from tests.support.kernels.running import both, check_operator

E4M3, E5M2 = 448.0, 57344.0
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
CONSTANTS = {"FLT_MAX": LARGEST, "EXPONENT": scaling.EXPONENT}
BOTH = both(scaling.update_reference, scaling.update_launch)
CURRENT = both(scaling.current_reference, scaling.current_launch)


def update(
    run: Callable[..., None], history: Tensor, fp8_max: float = E4M3, old: float = 3.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """The new scales and the history; inverses and old scales are checked."""
    n = history.shape[1]
    old_scale = torch.full((n,), old, device=history.device)
    scale, inverse = (torch.full_like(old_scale, torch.nan) for _ in range(2))
    chosen = {"most_recent": False, "margin": 0.0, "power_of_two": False, **options}
    run(history, old_scale, torch.full_like(scale, fp8_max), scale, inverse, *chosen.values())
    assert torch.equal(inverse, 1 / scale), (scale, inverse)
    assert (old_scale == old).all()
    return scale, history


def current(
    run: Callable[..., None],
    amax: Tensor,
    fp8_max: float = E4M3,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
) -> Tensor:
    """The scales, with their inverses checked."""
    scale, inverse = (torch.full_like(amax, torch.nan) for _ in range(2))
    run(amax, torch.full_like(amax, fp8_max), scale, inverse, epsilon, power_of_two)
    assert torch.equal(inverse, 1 / scale), (scale, inverse)
    return scale


def floored(value: Tensor) -> Tensor:
    """The largest powers of two not above the values, computed on the CPU, where that is exact."""
    mantissa, exponent = torch.frexp(value.cpu())
    return torch.ldexp(torch.full_like(mantissa, 0.5), exponent).to(value.device)


def check_equal(ours: Tensor, theirs: Tensor) -> None:
    """Compares bit for bit, with NaN equal to NaN; the message names the largest differences."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@BOTH
@pytest.mark.parametrize("fp8_max", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (0.0, lambda fp8_max: 3.0),
        (SMALLEST, lambda fp8_max: LARGEST),
        (2.0, lambda fp8_max: fp8_max / 2),
        (torch.inf, lambda fp8_max: 3.0),
        (torch.nan, lambda fp8_max: 3.0),
    ],
)
def test_scale_of_each_kind_of_amax(
    run: Any, fp8_max: float, amax: float, expected: Any, device: str
) -> None:
    history = torch.zeros(4, 1, device=device)
    history[0] = amax
    scale, _ = update(run, history, fp8_max)
    assert scale.item() == expected(fp8_max)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 31, 1024])
def test_the_history_rolls_and_row_0_is_free_again(run: Any, length: int, device: str) -> None:
    history = torch.rand(length, 5, device=device) + 0.5
    history[0, 2] = 0  # not cast since the last update
    before = history.clone()
    update(run, history)
    rolled = torch.roll(before, -1, 0)
    rolled[0] = 0
    rolled[:, 2] = before[:, 2]
    assert torch.equal(history, rolled)


@BOTH
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("most_recent", [False, True])
def test_largest_or_latest_amax(run: Any, most_recent: bool, margin: int, device: str) -> None:
    history = torch.rand(16, 300, device=device) + 0.1
    amax = history[0].clone() if most_recent else history.amax(0)
    expected = torch.full_like(amax, E4M3) / amax / 2**margin
    scale, _ = update(run, history, most_recent=most_recent, margin=margin)
    check_equal(scale, expected)


@BOTH
def test_powers_of_two_are_floored(run: Any, device: str) -> None:
    history = torch.zeros(2, 1000, device=device)
    history[0] = torch.rand(1000, device=device) * 100 + 1e-3
    scale, _ = update(run, history.clone(), power_of_two=True)
    check_equal(scale, floored(torch.full_like(scale, E4M3) / history[0]))


@CURRENT
@pytest.mark.parametrize("fp8_max", [E4M3, E5M2])
def test_current_scale_of_each_kind_of_amax(run: Any, fp8_max: float, device: str) -> None:
    amax = torch.tensor([0.0, SMALLEST, 2.0, torch.inf, torch.nan], device=device)
    scale = current(run, amax, fp8_max)
    assert scale.tolist() == [1.0, LARGEST, fp8_max / 2, 1.0, 1.0]
    scale = current(run, amax, fp8_max, epsilon=4.0)
    assert scale.tolist() == [fp8_max / 4, fp8_max / 4, fp8_max / 4, 1.0, 1.0]


@CURRENT
def test_current_scales_are_exact(run: Any, device: str) -> None:
    amax = torch.rand(300, device=device) * 100 + 1e-3
    exact = torch.full_like(amax, E5M2) / amax
    check_equal(current(run, amax, E5M2), exact)
    check_equal(current(run, amax, E5M2, power_of_two=True), floored(exact))


def test_kernel_and_reference_agree_on_whole_models(device: str) -> None:
    history = torch.randn(64, 777, device=device).abs() * (torch.rand(777, device=device) > 0.3)
    history[0, ::50] = torch.tensor(float("nan"))
    history[3, ::70] = torch.tensor(float("inf"))
    for power_of_two in (False, True):
        results = [
            update(run, history.clone(), power_of_two=power_of_two)
            for run in (scaling.update_reference, scaling.update_launch)
        ]
        for ours, theirs in zip(*results, strict=True):
            check_equal(ours, theirs)


def test_old_scales_stay_and_new_ones_come_with_their_inverses(device: str) -> None:
    old, fp8_max = torch.full((3,), 7.0, device=device), torch.full((3,), E4M3, device=device)
    history = torch.tensor([[1.0, 0.0, 100.0], [2.0, 0.0, 0.0]], device=device)
    scale, scale_inv = scaling.update_scales(history, old, fp8_max)
    assert old.tolist() == [7.0] * 3
    assert scale.tolist() == [128.0, 7.0, 4.0] and torch.equal(scale_inv, 1 / scale)
    assert history.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 100.0]]
    scale, scale_inv = scaling.current_scales(torch.ones_like(old), fp8_max)
    assert scale.tolist() == [256.0] * 3 and scale_inv.tolist() == [2.0**-8] * 3


def test_wrong_shapes_and_dtypes_are_named() -> None:
    scale, history = torch.ones(3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"history is torch.float32 \(4, 2\)"):
        scaling.update_scales(history[:, :2], scale, scale)
    with pytest.raises(ValueError, match=r"fp8_max is torch\.float64"):
        scaling.update_scales(history, scale, scale.double())
    with pytest.raises(ValueError, match=r"fp8_max is torch\.float32 \(2,\); current_scales needs"):
        scaling.current_scales(scale, scale[:2])
    with pytest.raises(ValueError, match=r"amax is torch\.float32 \(4, 3\)"):
        scaling.current_scales(history, scale)


def test_compiled_and_faked_calls_go_through_the_operators() -> None:
    scale, history = torch.ones(3), torch.rand(4, 3)
    fp8_max, outputs = torch.full((3,), E4M3), (torch.empty(3), torch.empty(3))
    check_operator("update_scales_", history, scale, fp8_max, *outputs, False, 0.0, True)
    check_operator("current_scales_", scale, fp8_max, *outputs, 0.0, True)


@pytest.mark.parametrize("most_recent", [False, True])
def test_updates_compile_for_hopper_without_spills(most_recent: bool) -> None:
    tile = scaling.update_tile(1024)
    types = {"history_ptr old_scale_ptr fp8_max_ptr scale_ptr scale_inv_ptr": "*fp32"}
    types |= {"n": "i32", "inverse_margin": "fp32"}
    constants = {"LENGTH": 1024, "MOST_RECENT": most_recent, **CONSTANTS, "POWER_OF_TWO": True}
    compiled = compile_for_hopper("cast.scaling._update_kernel", types, constants, tile=tile)
    assert "div.rn.f32" in compiled.ptx and "div.full" not in compiled.ptx
    barrier, first_store = (compiled.ptx.index(text) for text in ("bar.sync", "st.global"))
    assert barrier < first_store, "a history's rows have all been read before one is written"


def test_current_scales_compile_for_hopper() -> None:
    types = {"amax_ptr fp8_max_ptr scale_ptr scale_inv_ptr": "*fp32", "n": "i32", "epsilon": "fp32"}
    constants = {**CONSTANTS, "POWER_OF_TWO": False, "BLOCK": scaling.BLOCK}
    compiled = compile_for_hopper("cast.scaling._current_kernel", types, constants)
    assert "div.rn.f32" in compiled.ptx and "div.full" not in compiled.ptx
