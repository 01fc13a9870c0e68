"""FP8 GEMMs of real layers on the GPU: right, the same in every run, and equal to PyTorch's."""

from __future__ import annotations

import pytest
import torch

from flatfsdp.kernels.gemm import cublas_lt
from flatfsdp.kernels.gemm import gemm as module
from tests.support.gpu.marks import FP8_GEMMS

pytest.importorskip("nvmath")
pytestmark = FP8_GEMMS
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("rows", "cols", "inner"),
    [(8192, 12288, 4096), (2048, 16384, 2048), (8192, 4096, 4096), (4096, 6144, 4096), (16, 4096, 14336)],
    ids=str,
)
@pytest.mark.parametrize("split_accumulator", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_products_of_layers(
    rows: int, cols: int, inner: int, split_accumulator: bool, with_bias: bool
) -> None:
    a = torch.randn(rows, inner, device="cuda").to(E5M2 if split_accumulator else E4M3)
    b = torch.randn(cols, inner, device="cuda").to(E4M3)
    invs = torch.tensor([0.3], device="cuda"), torch.tensor([1.7], device="cuda")
    # At a multiple of 16 bytes, the smallest alignment that a plan accepts.
    bias = torch.randn(8 + cols, device="cuda").bfloat16()[8:] if with_bias else None
    exact = torch.empty(rows, cols, device="cuda")
    module.reference(a, b, *invs, bias, exact, split_accumulator)
    found = []
    for _ in range(2):
        out = torch.full((rows, cols), torch.nan, device="cuda", dtype=torch.bfloat16)
        module.launch(a, b, *invs, bias, out, split_accumulator)
        found.append(out)
    assert torch.equal(*found)
    assert (found[0].float() - exact).norm() / exact.norm() < 4e-3


def test_the_preferred_tile_is_taken() -> None:
    product = cublas_lt.Product(8192, 12288, 4096, E4M3, E4M3, torch.bfloat16)
    prepared = cublas_lt.prepared_matmul(torch.device("cuda", torch.cuda.current_device()), product)
    assert prepared is not None
    lt = cublas_lt.bindings()
    assert lt.MatmulTile(prepared._tile(prepared._algorithm)).name == "TILE_176x128"
