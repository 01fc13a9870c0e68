"""Attention on a GPU: PyTorch's own choice of backends stays, and the ordered backward repeats its bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels.attention import ordered
from flatfsdp.layers.attention.sdpa import attention
from tests.support.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

PLAIN = "torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)"
OURS = "attention(x, x, x, None, is_causal=True, dropout=0.0, scale=None)"
MASKED = "attention(x, x, x, x[..., :1, :] > 0, is_causal=False, dropout=0.0, scale=None)"


def order_after(*calls: str) -> str:
    """PyTorch's order of backends in a process that only makes these calls."""
    program = f"""
import torch
from flatfsdp.layers.attention.sdpa import attention
x = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
{"; ".join(calls)}
print(torch._C._get_sdp_priority_order())
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return found.stdout


@pytest.mark.parametrize("first", [OURS, MASKED], ids=["causal", "masked"])
def test_the_order_of_backends_stays_that_of_pytorch(first: str) -> None:
    """PyTorch determines it when it first chooses a backend, and ours may run before that."""
    assert order_after(first) == order_after(PLAIN)
    assert order_after(first, PLAIN) == order_after(PLAIN)


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(inputs: list[Tensor], grad: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    out = attention(*inputs, None, is_causal=is_causal, dropout=0.0, scale=None)
    return torch.autograd.grad(out, inputs, grad)


SHAPES = [
    (2, 8, 2, 512, 512, 128),
    (1, 4, 4, 1, 1, 64),
    (1, 6, 2, 7, 7, 128),
    (2, 4, 1, 192, 192, 64),
    (1, 4, 2, 1000, 1000, 80),
    (1, 4, 2, 1088, 1088, 128),
    (1, 4, 2, 128, 320, 128),
]


@pytest.mark.skipif(ordered.bindings() is None, reason="needs nvidia-cudnn-frontend")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ordered_backward_against_float64_and_itself(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    is_causal: bool,
    strict: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, heads, groups, queries, keys, dim = shape
    sizes = ((heads, queries), (groups, keys), (groups, keys), (heads, queries))
    # [batch, seq, heads, dim] in memory, as from a projection.
    parts = [torch.randn(batch, seq, n, dim, device="cuda").to(dtype).transpose(1, 2) for n, seq in sizes]
    inputs, grad = [part.requires_grad_() for part in parts[:3]], parts[3]
    wide = [part.detach().double().requires_grad_() for part in inputs]
    full = [wide[0], *(x.repeat_interleave(heads // groups, 1) for x in wide[1:])]
    scores = full[0] @ full[1].transpose(-1, -2) * dim**-0.5
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:]).bool().tril(), -torch.inf)
    expected = torch.autograd.grad(scores.softmax(-1) @ full[2], wide, grad.double())
    first = gradients(inputs, grad, is_causal)
    for found, right in zip(first, expected, strict=True):
        # Gradients of a single key's score are zero but for rounding.
        assert (found - right).norm() <= 1e-2 * right.norm() + 1e-2
    for _ in range(30):
        assert all(map(torch.equal, first, gradients(inputs, grad, is_causal)))
    monkeypatch.setattr(ordered, "WORKSPACE", 1)
    assert all(map(torch.equal, first, gradients(inputs, grad, is_causal))), "turns of heads change bits"


@pytest.mark.skipif(ordered.bindings() is None, reason="needs nvidia-cudnn-frontend")
def test_the_ordered_backward_in_a_cuda_graph(strict: None) -> None:
    inputs = [
        torch.randn(1, n, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)
    ]
    grad = torch.randn_like(inputs[0])
    eager = gradients(inputs, grad, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradients(inputs, grad, True)
    for result in recorded:
        result.fill_(torch.nan)
    graph.replay()
    assert all(map(torch.equal, eager, recorded))
