"""Weight gradients on the GPU: fused equals unfused bit for bit, in place, in every run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.gemm import cublas_lt
from flatfsdp.kernels.gemm import wgrad as module
from flatfsdp.kernels.gemm.wgrad import wgrad, wgrad_unfused
from flatfsdp.kernels.grad.accumulate import accumulate
from tests.support.gpu.marks import FP8_GEMMS
from tests.support.gpu.waiting import without_synchronisation

pytestmark = FP8_GEMMS
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS = 8192
SHAPES = pytest.mark.parametrize(
    ("out", "inner"),
    [(28672, 4096), (4096, 14336), (4096, 4096), (256, 512)],
    ids=["gate_up", "down", "out", "few outputs"],
)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
ACCUMULATORS = pytest.mark.parametrize("split_accumulator", [True, False], ids=["split", "fast"])

Wgrad = Callable[..., None]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def operands(out: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dy and x in the form that `wgrad` takes; in FP8 E5M2 and E4M3, transposed."""
    if dtype == E4M3:
        dy = torch.randn(out, TOKENS, device="cuda").to(E5M2)
        return dy, torch.randn(inner, TOKENS, device="cuda").to(E4M3)
    return tuple(torch.randn(TOKENS, size, device="cuda").to(dtype) for size in (out, inner))


def scale_inv(exponent: int) -> Tensor:
    return torch.full((1,), 2.0**exponent, device="cuda")


def accumulated(
    run: Wgrad, microbatches: list[tuple[Tensor, Tensor]], shape: tuple[int, int], **options: bool
) -> Tensor:
    """The sum over microbatches, each with its own scales in FP8, from a poisoned buffer."""
    target = torch.full(shape, torch.nan, device="cuda")
    for index, (dy, x) in enumerate(microbatches):
        scales = {}
        if dy.dtype == E5M2:
            scales = {"dy_scale_inv": scale_inv(-9 - index), "x_scale_inv": scale_inv(index - 2)}
        run(target, dy, x, first=index == 0, **scales, **options)
    return target


@SHAPES
@ACCUMULATORS
def test_fp8_fused_is_unfused_bit_for_bit_in_every_run(out: int, inner: int, split_accumulator: bool) -> None:
    microbatches = [operands(out, inner, E4M3) for _ in range(3)]
    options = {"split_accumulator": split_accumulator}
    fused = accumulated(wgrad, microbatches, (out, inner), **options)
    assert fused.isfinite().all()
    assert torch.equal(fused, accumulated(wgrad_unfused, microbatches, (out, inner), **options))
    assert torch.equal(fused, accumulated(wgrad, microbatches, (out, inner), **options))


@SHAPES
@HALVES
def test_high_precision_fused_is_unfused_bit_for_bit_in_every_run(out: int, inner: int, dtype: Any) -> None:
    microbatches = [operands(out, inner, dtype) for _ in range(3)]
    fused = accumulated(wgrad, microbatches, (out, inner))
    assert fused.isfinite().all()
    assert torch.equal(fused, accumulated(wgrad_unfused, microbatches, (out, inner)))
    assert torch.equal(fused, accumulated(wgrad, microbatches, (out, inner)))


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float16], ids=["fp8", "bf16", "fp16"])
@SHAPES
def test_a_bf16_target_rounds_fp32_sums_once(
    out: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one algorithm without split-K, in every run; the FP32 sums of small integers are exact."""
    prepared: list[Any] = []

    def prepare(device: torch.device, product: cublas_lt.Product) -> Any:
        prepared.append(cublas_lt.prepared_matmul(device, product))
        return prepared[-1]

    monkeypatch.setattr(module, "prepared_matmul", prepare)
    dy, x = (torch.randint(-4, 5, (TOKENS, size), device="cuda").float() for size in (out, inner))
    exact = dy.t() @ x
    once = exact.bfloat16()
    twice = (once.float() + exact).bfloat16()
    scales = {}
    if dtype == E4M3:
        dy, x = dy.t().contiguous().to(E5M2), x.t().contiguous().to(E4M3)
        scales = {"dy_scale_inv": scale_inv(3), "x_scale_inv": scale_inv(-3)}
    else:
        dy, x = dy.to(dtype), x.to(dtype)
    for _ in range(20):
        target = torch.full((out, inner), torch.nan, device="cuda", dtype=torch.bfloat16)
        wgrad(target, dy, x, first=True, **scales)
        assert torch.equal(target, once)
        wgrad(target, dy, x, first=False, **scales)
        assert torch.equal(target, twice)
    wgrad_unfused(target, dy, x, first=True, **scales)
    assert torch.equal(target, once)
    # Otherwise cuBLASLt has nothing: from fp16 to bf16, and from FP8 for few outputs.
    if prepared[0] is not None:
        assert set(map(id, prepared)) == {id(prepared[0])} and prepared[0]._sums_once(prepared[0]._algorithm)
    assert cublas_lt.bindings() is None or dtype == torch.float16 or prepared[0] or out * inner < 2**20


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["fp8", "bf16"])
@SHAPES
def test_a_bf16_target_is_the_fp32_one_within_one_rounding(out: int, inner: int, dtype: torch.dtype) -> None:
    dy, x = operands(out, inner, dtype)
    scales = {"dy_scale_inv": scale_inv(-9), "x_scale_inv": scale_inv(-2)} if dtype == E4M3 else {}
    wide, narrow = (
        torch.full((out, inner), torch.nan, device="cuda", dtype=target_dtype)
        for target_dtype in (torch.float32, torch.bfloat16)
    )
    for first in (True, False):
        before = narrow.float()
        wgrad(wide, dy, x, first=True, **scales)
        wgrad(narrow, dy, x, first=first, **scales)
        expected = wide if first else before + wide
        # Another tile may sum in another order.
        slack = (1e-2 if dtype == E4M3 else 1e-4) * wide.square().mean().sqrt()
        assert ((narrow.float() - expected).abs() <= 2.0**-8 * expected.abs() + slack).all()
    again = torch.empty_like(narrow)
    wgrad(again, dy, x, first=True, **scales)
    for _ in range(19):
        wgrad(narrow, dy, x, first=True, **scales)
        assert torch.equal(narrow, again)


def relative_error(ours: Tensor, dy_t: Tensor, x_t: Tensor, factor: float = 1.0) -> float:
    """Relative error of 256 rows, against float64."""
    rows = torch.randperm(dy_t.shape[0], device="cuda")[:256]
    wanted = dy_t.view(torch.uint8)[rows].view(dy_t.dtype) if dy_t.dtype == E5M2 else dy_t[rows]
    exact = wanted.double() @ x_t.double().t() * factor
    return ((ours[rows].double() - exact).norm() / exact.norm()).item()


@SHAPES
def test_fp8_against_float64(out: int, inner: int) -> None:
    dy, x = operands(out, inner, E4M3)
    errors = []
    for split_accumulator in (True, False):
        target = torch.full((out, inner), torch.nan, device="cuda")
        scales = {"dy_scale_inv": scale_inv(-9), "x_scale_inv": scale_inv(-2)}
        for first in (True, False):
            wgrad(target, dy, x, first=first, split_accumulator=split_accumulator, **scales)
        errors.append(relative_error(target, dy, x, factor=2 * 2.0**-11))
    split, fast = errors
    print(f"relative error, split {split:.1e}, fast {fast:.1e}")
    assert split < 1e-3 and fast < 2e-2
    if torch.cuda.get_device_capability() == (9, 0):
        assert split < fast, "the flag for the accumulator has an effect"


@pytest.mark.parametrize(("out", "inner"), [(4096, 4096), (1000, 777), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_is_unfused_for_any_size(out: int, inner: int, dtype: torch.dtype) -> None:
    microbatches = [operands(out, inner, dtype) for _ in range(3)]
    fused = accumulated(wgrad, microbatches, (out, inner))
    assert torch.equal(fused, accumulated(wgrad_unfused, microbatches, (out, inner)))


@SHAPES
@HALVES
def test_high_precision_against_float64(out: int, inner: int, dtype: torch.dtype) -> None:
    dy, x = operands(out, inner, dtype)
    target = torch.full((out, inner), torch.nan, device="cuda")
    for first in (True, False):
        wgrad(target, dy, x, first=first)
    assert relative_error(target, dy.t(), x.t(), factor=2.0) < 1e-5


@pytest.mark.parametrize(("dy_dtype", "x_dtype"), [(E5M2, E4M3), (E4M3, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize(("out", "inner", "tokens"), [(16, 32, 48), (272, 80, 1040)])
def test_small_integers_are_exact(out: int, inner: int, tokens: int, dy_dtype: Any, x_dtype: Any) -> None:
    """Sizes are odd, formats are on both sides, and each scale belongs to its operand."""
    dy, x = (torch.randint(-4, 5, (size, tokens), device="cuda").float() for size in (out, inner))
    target = torch.full((out, inner), torch.nan, device="cuda")
    for index in range(2):
        scales = {"dy_scale_inv": scale_inv(index), "x_scale_inv": scale_inv(3)}
        wgrad(target, dy.to(dy_dtype), x.to(x_dtype), first=index == 0, **scales)
    assert torch.equal(target.double(), 24 * (dy.double() @ x.double().t()))


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["fp8", "bf16"])
def test_in_place_means_no_temporary_of_the_targets_size(dtype: torch.dtype) -> None:
    pytest.importorskip("nvmath")
    microbatches = [operands(4096, 14336, dtype)] * 2
    accumulated(wgrad, microbatches, (4096, 14336))  # plans and cuBLAS's own workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target = accumulated(wgrad, microbatches, (4096, 14336))
    size = target.numel() * target.element_size()
    assert torch.cuda.max_memory_allocated() - before - size <= cublas_lt.MAX_WORKSPACE + (1 << 20) < size


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("gap", [16, 1])
def test_bits_do_not_depend_on_the_slot_of_the_flat_buffer(dtype: torch.dtype, gap: int) -> None:
    """A slot begins at a multiple of 64 bytes, a separate tensor at one of 512; others work, too."""
    dy, x = operands(1024, 2048, dtype)
    scales = {"dy_scale_inv": scale_inv(0), "x_scale_inv": scale_inv(0)} if dtype == E4M3 else {}
    own = torch.full((1024, 2048), torch.nan, device="cuda")
    flat = torch.full((gap + own.numel() + gap,), 5.0, device="cuda")
    slot = flat[gap:-gap].view_as(own)
    for first in (True, False):
        wgrad(own, dy, x, first=first, **scales)
        wgrad(slot, dy, x, first=first, **scales)
    assert torch.equal(own, slot)
    assert (flat[:gap] == 5).all() and (flat[-gap:] == 5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expanded_gradients_and_no_tokens(dtype: torch.dtype) -> None:
    dy = torch.ones(1, 1, device="cuda", dtype=dtype).expand(64, 48)
    x = torch.randint(-4, 5, (64, 80), device="cuda").to(dtype)
    target = torch.full((48, 80), torch.nan, device="cuda")
    for first in (True, False):
        wgrad(target, dy, x, first=first)
        wgrad(target, dy[:0], x[:0], first=False)
    assert torch.equal(target, 2 * x.float().sum(0).expand(48, 80))
    wgrad(target, dy[:0], x[:0], first=True)
    assert (target == 0).all()


def test_threads_and_streams_do_not_mix_their_scales() -> None:
    dy, x = operands(256, 512, E4M3)
    expected = torch.empty(256, 512, device="cuda")
    wgrad(expected, dy, x, first=True, dy_scale_inv=scale_inv(0), x_scale_inv=scale_inv(0))
    targets = [torch.full((256, 512), torch.nan, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()

    def work(exponent: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            scales = {"dy_scale_inv": scale_inv(exponent), "x_scale_inv": scale_inv(0)}
            for index in range(50):
                wgrad(targets[exponent], dy, x, first=index == 0, **scales)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(exponent,)) for exponent in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = torch.empty_like(expected)
    for index in range(50):
        accumulate(reference, expected, first=index == 0)
    for exponent, target in enumerate(targets):
        assert torch.equal(target, reference * 2.0**exponent)


def test_the_host_does_not_wait() -> None:
    dy, x = operands(256, 512, E4M3)
    target, one = torch.empty(256, 512, device="cuda"), scale_inv(0)
    call = partial(wgrad, target, dy, x, first=True, dy_scale_inv=one, x_scale_inv=one)
    call()  # makes the plan
    with without_synchronisation():
        call()


@pytest.fixture
def _without_nvmath(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cublas_lt, "bindings", lambda: None)
    cublas_lt.prepared_matmul.cache_clear()
    yield
    cublas_lt.prepared_matmul.cache_clear()


@pytest.mark.usefixtures("_without_nvmath")
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16], ids=["fp8", "bf16"])
def test_without_nvmath_fused_is_unfused(dtype: torch.dtype) -> None:
    microbatches = [operands(1024, 2048, dtype) for _ in range(3)]
    fused = accumulated(wgrad, microbatches, (1024, 2048))
    assert torch.equal(fused, accumulated(wgrad_unfused, microbatches, (1024, 2048)))
    once, (dy, x) = accumulated(wgrad, microbatches[:1], (1024, 2048)), microbatches[0]
    if dtype == E4M3:
        assert relative_error(once, dy, x, factor=2.0**-11) < 1e-3
    else:
        assert relative_error(once, dy.t(), x.t()) < 1e-5
