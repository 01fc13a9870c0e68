"""FP8 GEMMs: against float64, in every result dtype; unsupported inputs are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.gemm import cublas_lt
from flatfsdp.kernels.gemm import gemm as module
from flatfsdp.kernels.gemm.gemm import scaled_mm
from tests.support.assertions import assert_raises
from tests.support.kernels.fake_cublas_lt import FakeCublasLt
from tests.support.kernels.running import E4M3, E5M2, check_operator
from tests.support.plain_layers import error

FP8_PAIRS = pytest.mark.parametrize(("a_dtype", "b_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = "cuda" if ON_GPU else "cpu"
M, N, K = 37, 48, 80


def operands(m: int = M, a_dtype: torch.dtype = E4M3, b_dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(rows, K, device=DEVICE) for rows in (m, N))
    return a.to(a_dtype), b.to(b_dtype)


def scales(a: float = 0.3, b: float = 1.7) -> tuple[Tensor, Tensor]:
    return torch.tensor([a], device=DEVICE), torch.tensor(b, device=DEVICE)


def exact(a: Tensor, b: Tensor, scale_invs: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    product = a.double() @ b.double().t() * scale_invs[0].double() * scale_invs[1].double()
    return product if bias is None else product + bias.double()


@FP8_PAIRS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(
    dtype: torch.dtype, with_bias: bool, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> None:
    (a, b), invs = operands(a_dtype=a_dtype, b_dtype=b_dtype), scales()
    bias = torch.randn(N, device=DEVICE).to(dtype) if with_bias else None
    out = scaled_mm(a, b, *invs, bias=bias, out_dtype=dtype, split_accumulator=True)
    assert out.dtype == dtype and out.shape == (M, N) and out.is_contiguous()
    bound = 1e-3 if ON_GPU else 1e-6
    assert error(out, exact(a, b, invs, bias)) < max(bound, torch.finfo(dtype).eps)


@pytest.mark.parametrize("split_accumulator", [True, False])
def test_small_integers_are_exact(split_accumulator: bool) -> None:
    """This holds for both accumulators; each scale belongs to its operand."""
    a, b = (torch.randint(-4, 5, (rows, K), device=DEVICE).float() for rows in (M, N))
    bias = torch.arange(N, device=DEVICE).float()
    for a_dtype, b_dtype in ((E4M3, E5M2), (E5M2, E4M3)):
        out = scaled_mm(
            a.to(a_dtype),
            b.to(b_dtype),
            *scales(2.0, 0.25),
            bias=bias,
            out_dtype=torch.float32,
            split_accumulator=split_accumulator,
        )
        assert torch.equal(out.double(), 0.5 * (a.double() @ b.double().t()) + bias.double())


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp32_results_take_any_bias(bias_dtype: torch.dtype) -> None:
    (a, b), invs = operands(), scales()
    bias = torch.randn(N, device=DEVICE).to(bias_dtype)
    plain, biased = (
        scaled_mm(a, b, *invs, bias=added, out_dtype=torch.float32, split_accumulator=True)
        for added in (None, bias)
    )
    assert torch.equal(biased, plain + bias.float())


def test_bias_and_product_are_rounded_together() -> None:
    """1 + 2^-8 rounds to 1 in bf16, and would be lost before the bias of 2^-8 is added."""
    a, b = torch.zeros(1, 16, device=DEVICE), torch.zeros(16, 16, device=DEVICE)
    a[0, 0], a[0, 1], b[:, 0], b[:, 1] = 1.0, 2.0**-8, 1.0, 1.0
    bias = torch.full((16,), 2.0**-8, device=DEVICE, dtype=torch.bfloat16)
    one = torch.ones(1, device=DEVICE)
    out = scaled_mm(
        a.to(E4M3), b.to(E4M3), one, one, bias=bias, out_dtype=torch.bfloat16, split_accumulator=True
    )
    assert (out == 1 + 2.0**-7).all()


@pytest.mark.parametrize("m", [0, 1])
def test_few_rows(m: int) -> None:
    (a, b), invs = operands(m), scales()
    bias = torch.randn(N, device=DEVICE).bfloat16()
    out = scaled_mm(a, b, *invs, bias=bias, out_dtype=torch.bfloat16, split_accumulator=False)
    assert out.shape == (m, N) and out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), exact(a, b, invs, bias), rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_is_named() -> None:
    (a, b), invs = operands(), scales()

    def call(*tensors: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        scaled_mm(*tensors, bias=bias, out_dtype=dtype, split_accumulator=True)

    assert_raises(ValueError, "at most one in E5M2", call, a.to(E5M2), b.to(E5M2), *invs)
    assert_raises(ValueError, r"a is torch\.float32 and b torch\.float8", call, a.float(), b, *invs)
    with pytest.raises(ValueError, match=r"a is \(37, 80\) on .* and b \(48, 64\)"):
        call(a, b[:, :64].contiguous(), *invs)
    with pytest.raises(ValueError, match=r"a has strides \(1, 37\); .* columnwise=True"):
        call(a.t().contiguous().t(), b, *invs)
    with pytest.raises(ValueError, match=r"b \[N, K\] is \(40, 80\); FP8 GEMMs need multiples of 16"):
        call(a, b[:40], *invs)
    with pytest.raises(ValueError, match=r"b \[N, K\] is \(48, 24\); FP8 GEMMs need multiples of 16"):
        call(a[:, :24].contiguous(), b[:, :24].contiguous(), *invs)
    with pytest.raises(ValueError, match=r"b_scale_inv is torch\.float32 \(2,\)"):
        call(a, b, invs[0], torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match=r"a_scale_inv is torch\.bfloat16 \(1,\)"):
        call(a, b, invs[0].bfloat16(), invs[1])
    with pytest.raises(ValueError, match=r"bias is torch\.float32 \(48,\) .* in torch\.bfloat16: cast it"):
        call(a, b, *invs, bias=torch.zeros(N, device=DEVICE))
    with pytest.raises(ValueError, match=r"it has to be contiguous, \[48\]"):
        call(a, b, *invs, bias=torch.zeros(N + 1, device=DEVICE).bfloat16())
    assert_raises(ValueError, r"out_dtype is torch\.float8", call, a, b, *invs, dtype=E4M3)


def test_what_torch_is_told(fresh_choices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._scaled_mm` also has a CPU kernel, like the GPU's without biases for FP32 results."""
    monkeypatch.setattr(cublas_lt, "bindings", lambda: None)
    told = []

    def spy(*args: Tensor, **options: object) -> Tensor:
        told.append((options["use_fast_accum"], options["bias"] is None))
        return real(*args, **options)

    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", spy)
    (a, b), invs = operands(m=64), scales()
    for dtype, split in ((torch.bfloat16, True), (torch.float32, False)):
        bias = torch.randn(N, device=DEVICE).to(dtype)
        out, expected = (a.new_full((64, N), torch.nan, dtype=dtype) for _ in range(2))
        module.launch(a, b, *invs, bias, out, split)
        module.reference(a, b, *invs, bias, expected, split)
        assert torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert told == [(False, False), (True, True)]


def integers(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Integers small enough for FP8, and for sums that do not depend on the order of additions."""
    return torch.randint(-4, 5, (rows, cols)).to(dtype)


@FP8_PAIRS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_cublas_lt_is_told(
    fake: FakeCublasLt, dtype: torch.dtype, with_bias: bool, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> None:
    for index in range(3):
        a, b = integers(M, K, a_dtype), integers(N, K, b_dtype)
        # Other tensors and scales each time, as scales follow the data.
        invs = torch.tensor([2.0**-index]), torch.tensor([2.0 ** (2 * index)])
        bias = torch.randint(-4, 5, (N,)).to(dtype) if with_bias else None
        out = scaled_mm(a, b, *invs, bias=bias, out_dtype=dtype, split_accumulator=True)
        assert torch.equal(out, exact(a, b, invs, bias).to(dtype))
    assert fake.betas == [0, 0, 0] and fake.calls["heuristic"] == 1, "one algorithm for all of them"


def test_the_accumulator_the_bias_and_the_number_of_rows_are_part_of_the_product(fake: FakeCublasLt) -> None:
    a, b, bias = integers(M, K, E4M3), integers(N, K, E4M3), torch.zeros(N).bfloat16()
    invs = torch.tensor(1.0), torch.tensor(1.0)
    for rows, added, split in ((M, None, True), (M, None, False), (M, bias, True), (M - 1, None, True)):
        scaled_mm(a[:rows], b, *invs, bias=added, out_dtype=torch.bfloat16, split_accumulator=split)
    assert len(set(fake.algorithms_run)) == 4
    told = [thing for thing in fake.things.values() if isinstance(thing, dict) and "TRANSA" in thing]
    assert [one["FAST_ACCUM"] for one in told] == [0, 1, 0, 0]


@pytest.mark.parametrize("moved", [0, 1, 2], ids=["a", "b", "bias"])
def test_what_cublas_lt_cannot_read_is_left_to_torch(fake: FakeCublasLt, moved: int) -> None:
    tensors = [integers(64, K, E4M3), integers(N, K, E4M3), integers(1, N, torch.bfloat16)[0]]
    flat = torch.empty(tensors[moved].numel() + 1, dtype=tensors[moved].dtype)
    tensors[moved] = flat[1:].view_as(tensors[moved]).copy_(tensors[moved])
    a, b, bias = tensors
    invs = torch.tensor(1.0), torch.tensor(1.0)
    out = scaled_mm(a, b, *invs, bias=bias, out_dtype=torch.bfloat16, split_accumulator=True)
    assert torch.allclose(out.double(), exact(a, b, invs, bias), rtol=1e-2)
    assert not fake.calls


def test_a_prepared_matmul_that_goes_takes_its_descriptors_with_it(fake: FakeCublasLt) -> None:
    product = cublas_lt.Product(M, N, K, E4M3, E4M3, torch.bfloat16)
    before = {number for number, thing in fake.things.items() if thing != "handle"}
    matmul = cublas_lt.PreparedMatmul(torch.device("cpu"), product)
    described = [thing for thing in fake.things.values() if isinstance(thing, dict) and "TRANSA" in thing]
    assert matmul.is_possible and len(described) == 1
    del matmul
    left = [fake.things[number] for number in fake.things.keys() - before]
    assert not [thing for thing in left if isinstance(thing, dict) and "TRANSA" in thing]
    assert not [thing for thing in left if isinstance(thing, tuple) and thing[0] in (E4M3, torch.bfloat16)]


def test_compiled_and_faked_calls_go_through_the_operator() -> None:
    (a, b), invs = operands(), scales()
    out = a.new_empty(M, N, dtype=torch.bfloat16)
    check_operator("scaled_mm_", a, b, *invs, None, out, True)
