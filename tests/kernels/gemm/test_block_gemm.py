"""GEMMs of matrices with block scales: against float64, in all pairings; unsupported inputs are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.cast.block_cast import block_cast
from flatfsdp.kernels.gemm import block_gemm as module
from flatfsdp.kernels.gemm.block_gemm import block_scaled_mm, dequantize
from tests.support.kernels.running import E4M3, check_operator

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
PAIRINGS = pytest.mark.parametrize("b_block", ["1x128", "128x128"])


def quantized(rows: int, cols: int, block: Any) -> tuple[Tensor, Tensor]:
    """Quantizes numbers whose magnitude differs from block to block."""
    x = torch.randn(rows, cols, device=DEVICE)
    x *= torch.randint(-3, 3, (rows, 1), device=DEVICE).exp2()
    x *= torch.arange(cols, device=DEVICE).div(128).floor().remainder(3).exp2()
    result = block_cast(x, block=block, rowwise=True, columnwise=False)
    assert result.rowwise is not None and result.rowwise_scale_inv is not None
    return result.rowwise, result.rowwise_scale_inv


def element_by_element(q: Tensor, scale_inv: Tensor) -> Tensor:
    """The values of q in float64."""
    row, col = (torch.arange(size, device=q.device) for size in q.shape)
    if scale_inv.shape[0] != q.shape[0]:
        row = row // 128
    return q.double() * scale_inv.double()[row][:, col // 128]


@pytest.mark.parametrize("block", ["1x128", "128x128"])
@pytest.mark.parametrize("shape", [(48, 144), (272, 80), (256, 1280)])
def test_dequantized(shape: tuple[int, int], block: str) -> None:
    q, scale_inv = quantized(*shape, block)
    assert torch.equal(dequantize(q, scale_inv).double(), element_by_element(q, scale_inv))


@PAIRINGS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "n", "k"), [(48, 144, 640), (16, 272, 80), (256, 384, 1280)])
def test_against_float64(m: int, n: int, k: int, dtype: torch.dtype, b_block: str) -> None:
    """640 and 1280 are 5 and 10 blocks, which scales of squares pad to 8 and 12."""
    (a, a_inv), (b, b_inv) = quantized(m, k, "1x128"), quantized(n, k, b_block)
    out = block_scaled_mm(a, a_inv, b, b_inv, dtype)
    exact = element_by_element(a, a_inv) @ element_by_element(b, b_inv).t()
    assert out.dtype == dtype and out.shape == (m, n) and out.isfinite().all()
    # Row by row, as their magnitudes differ.
    errors = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() < max(1e-3 if ON_HOPPER else 1e-6, torch.finfo(dtype).eps)


def test_as_a_linear_layer_uses_it() -> None:
    """Forward, gradient of the input and of the weight, from casts in both layouts."""
    tokens, out_features, in_features = 256, 272, 144
    x = block_cast(
        torch.randn(tokens, in_features, device=DEVICE), block="1x128", rowwise=True, columnwise=True
    )
    dy = block_cast(
        torch.randn(tokens, out_features, device=DEVICE), block="1x128", rowwise=True, columnwise=True
    )
    weight = torch.randn(out_features, in_features, device=DEVICE)
    w = block_cast(weight, block="128x128", rowwise=True, columnwise=True)
    products = {
        "fprop": (x.rowwise, x.rowwise_scale_inv, w.rowwise, w.rowwise_scale_inv),
        "dgrad": (dy.rowwise, dy.rowwise_scale_inv, w.columnwise, w.columnwise_scale_inv),
        "wgrad": (dy.columnwise, dy.columnwise_scale_inv, x.columnwise, x.columnwise_scale_inv),
    }
    shapes = {"fprop": (tokens, out_features), "dgrad": (tokens, in_features), "wgrad": weight.shape}
    for name, operands in products.items():
        found = block_scaled_mm(*operands, torch.float32)
        exact = element_by_element(*operands[:2]) @ element_by_element(*operands[2:]).t()
        assert found.shape == shapes[name]
        assert (found.double() - exact).norm() < 1e-3 * exact.norm(), name


def test_what_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are those that torch and cuBLASLt document; recipes 4 and 5 are 1x128 and 128x128."""
    told: list[dict[str, Any]] = []

    def spy(*arguments: Any, out: Tensor) -> None:
        _, b, a_scales, a_recipe, _, b_scales, b_recipe, *_ = arguments
        told.append({"b": b.stride(), "recipes": (a_recipe, b_recipe), "scales": (*a_scales, *b_scales)})

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    m, n, k = 48, 272, 640
    a, a_inv = quantized(m, k, "1x128")
    for block in ("128x128", "1x128"):
        b, b_inv = quantized(n, k, block)
        module.launch(a, b, a_inv, b_inv, a.new_empty(m, n, dtype=torch.float32))
    squares, vectors = told
    assert squares["b"] == vectors["b"] == (1, k)
    assert (squares["recipes"], vectors["recipes"]) == (([4], [5]), ([4], [4]))
    layouts = [[(tuple(scale.shape), scale.stride()) for scale in call["scales"]] for call in told]
    assert layouts[0] == [((m, 5), (1, m)), ((8, 3), (1, 8))]
    assert layouts[1] == [((m, 5), (1, m)), ((n, 5), (1, n))]


def test_no_rows() -> None:
    nothing = block_cast(torch.empty(0, 128, device=DEVICE), block="1x128", rowwise=True, columnwise=False)
    b, b_inv = quantized(16, 128, "128x128")
    out = block_scaled_mm(nothing.rowwise, nothing.rowwise_scale_inv, b, b_inv, torch.bfloat16)
    assert out.shape == (0, 16)


def test_what_does_not_fit_is_named() -> None:
    (a, a_inv), (b, b_inv) = quantized(48, 640, "1x128"), quantized(272, 640, "128x128")
    dtype = torch.bfloat16
    for message, arguments in (
        (r"take torch\.float8_e4m3fn only", (a.to(torch.float8_e5m2), a_inv, b, b_inv, dtype)),
        (r"a \[M, K\] is \(40, 640\); .* multiple of 16 rows", (a[:40], a_inv[:40], b, b_inv, dtype)),
        (r"b \[N, K\] is \(270, 640\)", (a, a_inv, b[:270], b_inv, dtype)),
        (r"a_scale_inv is .* \(48, 5\) with strides \(1, 48\) on", (a, a_inv.contiguous(), b, b_inv, dtype)),
        (
            r"b_scale_inv is .* \(3, 8\) with strides \(8, 1\) on .* block_cast",
            (a, a_inv, b, b_inv[:, :5].contiguous(), dtype),
        ),
        (r"b_scale_inv is torch\.bfloat16", (a, a_inv, b, b_inv.bfloat16(), dtype)),
        (r"out_dtype is torch\.float8", (a, a_inv, b, b_inv, E4M3)),
    ):
        with pytest.raises(ValueError, match=message):
            block_scaled_mm(*arguments)


def test_operator() -> None:
    (a, a_inv), (b, b_inv) = quantized(48, 640, "1x128"), quantized(272, 640, "128x128")
    check_operator("block_scaled_mm_", a, b, a_inv, b_inv, a.new_empty(48, 272, dtype=torch.bfloat16))
