"""Delayed scaling, slot by slot, in PyTorch and in Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flatfsdp.kernels import scaling
from torch import Tensor

from tests.kernels.compiling import SHARED_LIMIT, compile_for_hopper

E4M3, E5M2 = 448.0, 57344.0
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
BOTH = pytest.mark.parametrize("run", [scaling.reference, scaling.launch], ids=["reference", "kernel"])


def update(
    run: Callable[..., None], history: Tensor, fp8_max: float = E4M3, old: float = 3.0, **options: Any
) -> tuple[Tensor, Tensor]:
    n = history.shape[1]
    scale = torch.full((n,), old, device=history.device)
    chosen = {"most_recent": False, "margin": 0.0, "power_of_two": False, **options}
    run(scale, history, torch.full_like(scale, fp8_max), *chosen.values())
    return scale, history


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
    assert torch.equal(scale, expected)


@BOTH
def test_powers_of_two_are_floored(run: Any, device: str) -> None:
    history = torch.zeros(2, 1000, device=device)
    history[0] = torch.rand(1000, device=device) * 100 + 1e-3
    scale, _ = update(run, history.clone(), power_of_two=True)
    exact = E4M3 / history[0].double()
    assert torch.equal(scale.double(), 2.0 ** torch.floor(torch.log2(exact)))


def test_kernel_and_reference_agree_on_whole_models(device: str) -> None:
    history = torch.randn(64, 777, device=device).abs() * (torch.rand(777, device=device) > 0.3)
    history[0, ::50] = torch.tensor(float("nan"))
    history[3, ::70] = torch.tensor(float("inf"))
    for power_of_two in (False, True):
        results = [
            update(run, history.clone(), power_of_two=power_of_two)
            for run in (scaling.reference, scaling.launch)
        ]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    scale, history = torch.ones(3), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"history is torch.float32 \(4, 2\)"):
        scaling.update_scales(scale, history[:, :2], scale)
    with pytest.raises(ValueError, match=r"fp8_max is torch\.float64"):
        scaling.update_scales(scale, history, scale.double())


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    scale, history = torch.ones(3), torch.rand(4, 3)
    arguments = (scale, history, torch.full((3,), E4M3), False, 0.0, True)
    torch.library.opcheck(torch.ops.flatfsdp.update_scales_.default, arguments)


def test_it_compiles_for_hopper_without_spills() -> None:
    compiled = compile_for_hopper(
        "scaling",
        "_update_kernel",
        {
            "scale_ptr": "*fp32",
            "history_ptr": "*fp32",
            "fp8_max_ptr": "*fp32",
            "n": "i32",
            "inverse_margin": "fp32",
        },
        {"LENGTH": 1024, "MOST_RECENT": False, "POWER_OF_TWO": True, "FLT_MAX": LARGEST, "BLOCK": 128},
    )
    assert compiled.spilled == 0 and compiled.shared <= SHARED_LIMIT
