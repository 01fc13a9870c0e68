"""Weight gradients: sums against float64, the arguments of cuBLASLt, and the path without nvmath-python."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.gemm import cublas_lt
from flatfsdp.kernels.gemm import wgrad as module
from flatfsdp.kernels.gemm.wgrad import wgrad, wgrad_unfused
from tests.support.assertions import assert_raises
from tests.support.kernels.fake_cublas_lt import FakeCublasLt
from tests.support.kernels.running import E4M3, E5M2, check_operator
from tests.support.plain_layers import error

FP8_PAIRS = pytest.mark.parametrize(("dy_dtype", "x_dtype"), [(E5M2, E4M3), (E4M3, E4M3), (E4M3, E5M2)])
OUT, IN, TOKENS = 48, 80, 32
FP32, BF16 = torch.float32, torch.bfloat16
TARGETS = pytest.mark.parametrize("target_dtype", [FP32, BF16])


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Integers small enough for FP8, and for sums that do not depend on the order of additions."""
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.parametrize("tokens", [1, 5, 123, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_over_microbatches_against_float64(dtype: torch.dtype, tokens: int) -> None:
    microbatches = [(torch.randn(tokens, 7).to(dtype), torch.randn(tokens, 19).to(dtype)) for _ in range(4)]
    target = torch.full((7, 19), torch.nan)
    for index, (dy, x) in enumerate(microbatches):
        wgrad(target, dy, x, first=index == 0)
    exact = sum(dy.double().t() @ x.double() for dy, x in microbatches)
    assert error(target, exact) < 1e-6


@FP8_PAIRS
def test_fp8_against_float64(dy_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    dy, x = torch.randn(OUT, TOKENS).to(dy_dtype), torch.randn(IN, TOKENS).to(x_dtype)
    scales = {"dy_scale_inv": torch.tensor([0.3]), "x_scale_inv": torch.tensor(1.7)}
    target = torch.full((OUT, IN), torch.nan)
    wgrad(target, dy, x, first=True, **scales)
    wgrad(target, dy, x, first=False, **scales)
    assert error(target, 2 * 0.3 * 1.7 * (dy.double() @ x.double().t())) < 1e-6


def test_gradients_of_256_and_1_are_257() -> None:
    target, one = torch.full((1, 1), torch.nan), torch.ones(1, 1, dtype=torch.bfloat16)
    wgrad(target, 256 * one, one, first=True)
    wgrad(target, one, one, first=False)
    assert target.item() == 257


def calls_of(dtype: torch.dtype, tokens: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Operands of `wgrad` and their scales, which are no powers of two; FP8 for E5M2."""
    dy, x = torch.randn(OUT, tokens), torch.randn(IN, tokens)
    if dtype == E5M2:
        scales = {"dy_scale_inv": torch.tensor([0.3]), "x_scale_inv": torch.tensor([1.7])}
        return (dy.to(E5M2), x.to(E4M3)), scales
    return (dy.t().to(dtype).contiguous(), x.t().to(dtype).contiguous()), {}


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, E5M2])
def test_a_bf16_target_is_the_fp32_one_rounded_once(dtype: torch.dtype) -> None:
    """The first time it is the product, later the sum of what it held and of the product in FP32."""
    target, unfused = (torch.full((OUT, IN), torch.nan, dtype=BF16) for _ in range(2))
    rounds_twice = False
    for first in (True, False, False):
        tensors, scales = calls_of(dtype, 48)
        product = torch.full((OUT, IN), torch.nan)
        wgrad(product, *tensors, first=True, **scales)
        exact = product if first else target.float() + product
        rounds_twice |= not first and not torch.equal(exact.bfloat16(), target + product.bfloat16())
        wgrad(target, *tensors, first=first, **scales)
        assert torch.equal(target, exact.bfloat16())
        if first:
            wgrad_unfused(unfused, *tensors, first=first, **scales)
            assert torch.equal(target, unfused)
    assert rounds_twice, "the data tell one rounding from two"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_is_unfused_bit_for_bit(dtype: torch.dtype) -> None:
    fused, unfused = torch.full((7, 19), torch.nan), torch.full((7, 19), torch.nan)
    for first in (True, False, False):
        dy, x = torch.randn(33, 7).to(dtype), torch.randn(33, 19).to(dtype)
        wgrad(fused, dy, x, first=first)
        wgrad_unfused(unfused, dy, x, first=first)
        assert torch.equal(fused, unfused)


def test_fp8_fused_is_unfused_bit_for_bit() -> None:
    fused, unfused = torch.full((OUT, IN), torch.nan), torch.full((OUT, IN), torch.nan)
    for first in (True, False, False):
        dy, x = torch.randn(OUT, TOKENS).to(E5M2), torch.randn(IN, TOKENS).to(E4M3)
        scales = {"dy_scale_inv": torch.tensor([2.0**-3]), "x_scale_inv": torch.tensor([2.0**5])}
        wgrad(fused, dy, x, first=first, **scales)
        wgrad_unfused(unfused, dy, x, first=first, **scales)
        assert torch.equal(fused, unfused)


def test_only_its_slot_of_the_flat_buffer_is_written() -> None:
    flat = torch.full((16 + OUT * IN + 16,), 5.0)
    wgrad(flat[16:-16].view(OUT, IN), torch.randn(TOKENS, OUT), torch.randn(TOKENS, IN), first=True)
    assert (flat[:16] == 5).all() and (flat[-16:] == 5).all()
    assert not (flat[16:-16] == 5).any()


def written_and_added(target_dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    """FP8 gradients of two microbatches, as launched, and their expected values."""
    ours, expected = (torch.full((OUT, IN), torch.nan, dtype=target_dtype) for _ in range(2))
    scales = (torch.tensor([3.0]), torch.tensor([13.0]))
    for first in (True, False):
        dy, x = integers(OUT, TOKENS, dtype=E5M2), integers(IN, TOKENS, dtype=E4M3)
        module.launch_fp8(ours, dy, x, *scales, first, True)
        module.reference_fp8(expected, dy, x, *scales, first, True)
    return ours, expected


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@FP8_PAIRS
@TARGETS
def test_cublas_lt_is_told_the_right_fp8_product(
    fake: FakeCublasLt, dy_dtype: torch.dtype, x_dtype: torch.dtype, target_dtype: torch.dtype
) -> None:
    ours, expected = (torch.full((OUT, IN), torch.nan, dtype=target_dtype) for _ in range(2))
    for index in range(3):
        dy, x = integers(OUT, TOKENS, dtype=dy_dtype), integers(IN, TOKENS, dtype=x_dtype)
        # Other tensors and scales each time, as scales follow the data.
        scales = (torch.tensor([2.0**-index]), torch.tensor([2.0 ** (2 * index)]))
        module.launch_fp8(ours, dy, x, *scales, index == 0, True)
        module.reference_fp8(expected, dy, x, *scales, index == 0, True)
        assert torch.equal(ours, expected)
    assert fake.betas == [0, 1, 1]


@HALVES
@TARGETS
@pytest.mark.parametrize("tokens", [1, 33])
def test_cublas_lt_is_told_the_right_product(
    fake: FakeCublasLt, dtype: torch.dtype, tokens: int, target_dtype: torch.dtype
) -> None:
    ours, expected = (torch.full((7, 19), torch.nan, dtype=target_dtype) for _ in range(2))
    for first in (True, False, False):
        dy, x = integers(tokens, 7, dtype=dtype), integers(tokens, 19, dtype=dtype)
        module.launch(ours, dy, x, first)
        module.reference(expected, dy, x, first)
        assert torch.equal(ours, expected)
    assert fake.betas == [0, 1, 1]


def fp8_call(target_dtype: torch.dtype = FP32) -> tuple[list[Tensor], dict[str, Tensor]]:
    operands = integers(OUT, TOKENS, dtype=E5M2), integers(IN, TOKENS, dtype=E4M3)
    scales = {"dy_scale_inv": torch.ones(1), "x_scale_inv": torch.ones(1)}
    return [torch.empty(OUT, IN, dtype=target_dtype), *operands], scales


def bf16_call(target_dtype: torch.dtype = FP32) -> tuple[list[Tensor], dict[str, Tensor]]:
    halves = [integers(TOKENS, size, dtype=torch.bfloat16) for size in (OUT, IN)]
    return [torch.empty(OUT, IN, dtype=target_dtype), *halves], {}


CALLS = pytest.mark.parametrize(
    "call",
    [partial(call, dtype) for dtype in (FP32, BF16) for call in (fp8_call, bf16_call)],
    ids=["fp8", "bf16", "fp8 to bf16", "bf16 to bf16"],
)


@CALLS
def test_a_matmul_is_prepared_once_and_has_one_algorithm(fake: FakeCublasLt, call: Any) -> None:
    tensors, scales = call()
    for run in (wgrad, wgrad_unfused):
        for first in (True, False):
            run(*tensors, first=first, **scales)
    assert fake.calls["heuristic"] == fake.calls["create"] == fake.calls["preferences destroyed"] == 1
    assert len(set(fake.algorithms_run)) == 1 and fake.betas == [0, 1, 0, 0]


def test_the_accumulator_is_part_of_the_product(fake: FakeCublasLt) -> None:
    tensors, scales = fp8_call()
    for split_accumulator in (True, False, True):
        wgrad(*tensors, first=True, split_accumulator=split_accumulator, **scales)
    told = [thing for thing in fake.things.values() if isinstance(thing, dict) and "TRANSA" in thing]
    assert [one["FAST_ACCUM"] for one in told] == [0, 1]
    assert len(set(fake.algorithms_run)) == 2


@CALLS
def test_if_cublas_lt_refuses_an_algorithm_without_split_k_is_picked_from_many(
    fake: FakeCublasLt, call: Any
) -> None:
    fake.first_choice, fake.others = False, (*((8, 2, 0), (2, 0, 0), (1, 2, 0), (1, 0, 5), (0, 0, 6)),)
    tensors, scales = call()
    wgrad(*tensors, first=True, **scales)
    wgrad(*tensors, first=False, **scales)
    assert {fake.things[algorithm] for algorithm in fake.algorithms_run} == {("algorithm", (1, 0, 5))}
    assert fake.calls["heuristic"] == fake.calls["preferences destroyed"] == 2


@CALLS
def test_the_first_algorithm_with_the_preferred_tile_and_without_split_k(
    fake: FakeCublasLt, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "preferred_tile", lambda product: "TILE_128x160")
    fake.others = ((1, 0, 20), (8, 2, 29), (1, 0, 29), (0, 0, 29))
    tensors, scales = call()
    for run in (wgrad, wgrad_unfused):
        run(*tensors, first=True, **scales)
    assert {fake.things[algorithm] for algorithm in fake.algorithms_run} == {("algorithm", (1, 0, 29))}


@CALLS
def test_without_an_algorithm_with_the_preferred_tile(
    fake: FakeCublasLt, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublas_lt, "preferred_tile", lambda product: "TILE_128x160")
    fake.others = ((1, 0, 20), (8, 2, 29))
    tensors, scales = call()
    wgrad(*tensors, first=True, **scales)
    assert {fake.things[algorithm] for algorithm in fake.algorithms_run} == {("algorithm", (1, 0, 0))}


@TARGETS
def test_a_shape_without_an_algorithm_is_added_and_the_log_says_so(
    fake: FakeCublasLt, caplog: pytest.LogCaptureFixture, target_dtype: torch.dtype
) -> None:
    """Once for the target, and in bf16 once for the FP32 product that is added instead."""
    fake.first_choice, fake.others = False, ((8, 2, 0),)
    with caplog.at_level(logging.INFO, cublas_lt.__name__):
        ours, expected = written_and_added(target_dtype)
    assert torch.equal(ours, expected) and not fake.betas
    messages = [record.getMessage() for record in caplog.records]
    for message, dtype in zip(messages, dict.fromkeys((target_dtype, FP32)), strict=True):
        assert "rows=48, cols=80, inner=32" in message and f"out_dtype={dtype}" in message
        assert "without split-K" in message


@TARGETS
def test_without_nvmath_the_product_is_added_and_the_log_says_so_once(
    fresh_choices: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target_dtype: torch.dtype,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cublas_lt.importlib, "import_module", missing)
    with caplog.at_level(logging.INFO, cublas_lt.__name__):
        ours, expected = written_and_added(target_dtype)
    assert torch.equal(ours, expected)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "FP32 temporary" in message and "nvmath" in message


def test_fp32_is_added_and_needs_no_cublas_lt(fake: FakeCublasLt) -> None:
    ours, expected = (torch.full((7, 19), torch.nan) for _ in range(2))
    for first in (True, False):
        dy, x = torch.randn(33, 7), torch.randn(33, 19)
        wgrad(ours, dy, x, first=first)
        wgrad_unfused(expected, dy, x, first=first)
        assert torch.equal(ours, expected)
    assert not fake.calls


def test_with_nvmath_the_log_names_cublas_lt(
    fresh_choices: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bindings = FakeCublasLt()
    monkeypatch.setattr(cublas_lt.importlib, "import_module", lambda name: bindings)
    with caplog.at_level(logging.INFO, cublas_lt.__name__):
        assert cublas_lt.bindings() is cublas_lt.bindings() is bindings
    assert [record.getMessage() for record in caplog.records] == [
        "Weight gradients and FP8 GEMMs: cuBLASLt 130000 through nvmath-python, accumulating in place"
    ]


@CALLS
@pytest.mark.parametrize("first", [True, False])
def test_buffers_at_odd_addresses(fake: FakeCublasLt, call: Any, first: bool) -> None:
    """GEMMs need 16 bytes, which the fake checks; nothing outside the target is written."""
    tensors, scales = call()
    tensors[0].fill_(3.0)
    expected = tensors[0].clone()
    wgrad(expected, *tensors[1:], first=first, **scales)
    surrounded = [tensor.new_empty(tensor.numel() + 2) for tensor in tensors]
    for flat, tensor in zip(surrounded, tensors, strict=True):
        flat[1:-1].view_as(tensor).copy_(tensor)
    surrounded[0][[0, -1]] = 5.0
    moved = [flat[1:-1].view_as(tensor) for flat, tensor in zip(surrounded, tensors, strict=True)]
    wgrad(*moved, first=first, **scales)
    assert torch.equal(moved[0], expected)
    assert surrounded[0][0] == surrounded[0][-1] == 5.0


def test_gradients_of_a_sum_are_expanded(fake: FakeCublasLt) -> None:
    dy, x = (
        torch.ones(1, 1, dtype=torch.bfloat16).expand(TOKENS, OUT),
        integers(TOKENS, IN, dtype=torch.bfloat16),
    )
    target = torch.full((OUT, IN), torch.nan)
    wgrad(target, dy, x, first=True)
    assert torch.equal(target, x.float().sum(0).expand(OUT, IN))


@TARGETS
def test_no_tokens(fake: FakeCublasLt, target_dtype: torch.dtype) -> None:
    target = torch.full((OUT, IN), torch.nan, dtype=target_dtype)
    wgrad(target, torch.empty(0, OUT), torch.empty(0, IN), first=True)
    assert (target == 0).all()
    wgrad(target.fill_(3.0), torch.empty(0, OUT), torch.empty(0, IN), first=False)
    assert (target == 3).all()


def test_what_does_not_fit_is_named() -> None:
    target, dy, x = torch.empty(OUT, IN), torch.randn(TOKENS, OUT), torch.randn(TOKENS, IN)
    dy_t, x_t, one = dy.t().contiguous().to(E5M2), x.t().contiguous().to(E4M3), torch.ones(1)
    scales = {"dy_scale_inv": one, "x_scale_inv": one}
    assert_raises(ValueError, r"target is torch\.float16", wgrad, target.half(), dy, x, first=True)
    assert_raises(ValueError, r"with strides \(1, 48\)", wgrad, torch.empty(IN, OUT).t(), dy, x, first=True)
    with pytest.raises(ValueError, match=r"dy is torch\.float32 and x torch\.bfloat16"):
        wgrad(target, dy, x.bfloat16(), first=True)
    assert_raises(ValueError, r"target \[out, in\] = \(48, 80\)", wgrad, target, x, dy, first=True)
    assert_raises(ValueError, "are for FP8 operands", wgrad, target, dy, x, first=True, **scales)
    with pytest.raises(ValueError, match="x_scale_inv is missing"):
        wgrad(target, dy_t, x_t, first=True, dy_scale_inv=one)
    with pytest.raises(ValueError, match=r"dy_scale_inv is torch\.float32 \(2,\)"):
        wgrad(target, dy_t, x_t, first=True, dy_scale_inv=torch.ones(2), x_scale_inv=one)
    assert_raises(ValueError, "at most one in E5M2", wgrad, target, dy_t, x_t.to(E5M2), first=True, **scales)
    assert_raises(ValueError, "two FP8 operands", wgrad, target, dy_t, x, first=True, **scales)
    with pytest.raises(ValueError, match=r"have to be transposed"):
        wgrad(target, dy.to(E5M2), x.to(E4M3), first=True, **scales)
    assert_raises(ValueError, "columnwise=True", wgrad, target, dy.to(E5M2).t(), x_t, first=True, **scales)
    with pytest.raises(ValueError, match=r"are \(48, 80, 24\); FP8 GEMMs need multiples of 16"):
        wgrad(target, dy_t[:, :24].contiguous(), x_t[:, :24].contiguous(), first=True, **scales)


@pytest.mark.parametrize("first", [True, False])
def test_compiled_and_faked_calls_go_through_the_operators(first: bool) -> None:
    target, dy, x, one = (
        torch.zeros(OUT, IN),
        torch.randn(TOKENS, OUT),
        torch.randn(TOKENS, IN),
        torch.ones(1),
    )
    check_operator("wgrad_", target, dy, x, first)
    dy_t, x_t = integers(OUT, TOKENS, dtype=E5M2), integers(IN, TOKENS, dtype=E4M3)
    check_operator("wgrad_fp8_", target, dy_t, x_t, one, one, first, True)
