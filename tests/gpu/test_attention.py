"""Attention on a GPU: PyTorch's own choice of backends stays, and the ordered backward repeats its bits."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
    return attention(query, key, value, None, is_causal=is_causal, dropout=0.0, scale=None)


def gradients(inputs: list[Tensor], grad: Tensor, is_causal: bool = True) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(*inputs, is_causal), inputs, grad)


def random_parts(
    batch: int, heads: int, groups: int, queries: int, keys: int, dim: int, device: str = "cuda"
) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and a gradient: [batch, seq, heads, dim] in memory, as from a projection."""
    sizes = ((heads, queries), (groups, keys), (groups, keys), (heads, queries))
    parts = [
        torch.randn(batch, seq, n, dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for n, seq in sizes
    ]
    return [part.requires_grad_() for part in parts[:3]], parts[3]


def is_ordered(out: Tensor) -> bool:
    return "_Ordered" in type(out.grad_fn).__name__


NEEDS_CUDNN = pytest.mark.skipif(ordered.bindings() is None, reason="needs nvidia-cudnn-frontend")
SHAPES = [
    (2, 8, 2, 512, 512, 128),
    (1, 4, 4, 1, 1, 64),
    (1, 6, 2, 7, 7, 128),
    (2, 4, 1, 192, 192, 64),
    (1, 1, 1, 256, 256, 64),
    (1, 4, 2, 1000, 1000, 80),
    (1, 4, 2, 1088, 1088, 128),
    (1, 4, 2, 128, 320, 128),
    (1, 4, 2, 320, 128, 128),
]


@NEEDS_CUDNN
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ordered_backward_against_float64_and_itself(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    is_causal: bool,
    strict: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, heads, groups, queries, _, dim = shape
    parts, grad = random_parts(*shape)
    inputs, grad = [part.detach().to(dtype).requires_grad_() for part in parts], grad.to(dtype)
    # With the switch on, cuBLAS would need a setting of the environment.
    torch.use_deterministic_algorithms(False)
    wide = [part.detach().double().requires_grad_() for part in inputs]
    full = [wide[0], *(x.repeat_interleave(heads // groups, 1) for x in wide[1:])]
    scores = full[0] @ full[1].transpose(-1, -2) * dim**-0.5
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:]).bool().tril(), -torch.inf)
    expected = torch.autograd.grad(scores.softmax(-1) @ full[2], wide, grad.double())
    torch.use_deterministic_algorithms(True)
    assert is_ordered(attend(*inputs, is_causal)) == (queries > 1), "cuDNN computes no single query"
    first = gradients(inputs, grad, is_causal)
    for found, right in zip(first, expected, strict=True):
        # Gradients of a single key's score are zero but for rounding.
        assert (found - right).norm() <= 1e-2 * right.norm() + 1e-2
    for _ in range(30):
        assert all(map(torch.equal, first, gradients(inputs, grad, is_causal)))
    monkeypatch.setattr(ordered, "WORKSPACE", 1)
    ordered._expected.cache_clear()
    assert all(map(torch.equal, first, gradients(inputs, grad, is_causal))), "turns of heads change bits"
    ordered._expected.cache_clear()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    # A graph of an earlier test that is freed meanwhile would break the capture.
    gc.collect()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        yield


@NEEDS_CUDNN
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("in_turns", [False, True])
def test_the_ordered_backward_in_a_cuda_graph(
    batch: int, in_turns: bool, strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_turns:
        monkeypatch.setattr(ordered, "WORKSPACE", 1)
    ordered._expected.cache_clear()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # Leaves belong to the stream that first uses them, which a capture on another one would make wait.
    with torch.cuda.stream(stream):
        inputs, grad = random_parts(batch, 4, 2, 256, 256, 64)
        eager = gradients(inputs, grad)
    with capture(graph, stream):
        out = attend(*inputs)
        recorded = torch.autograd.grad(out, inputs, grad)
    assert is_ordered(out)
    for _ in range(3):
        for result in recorded:
            result.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, eager, recorded))
    ordered._expected.cache_clear()


@NEEDS_CUDNN
def test_what_is_captured_before_it_has_run_takes_flash_attention(strict: None) -> None:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with torch.cuda.stream(stream):
            inputs, grad = random_parts(1, 4, 2, 384, 384, 64)
            flash = gradients(inputs, grad)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    with capture(graph, stream):
        recorded = gradients(inputs, grad)
    graph.replay()
    assert all(map(torch.equal, flash, recorded))
    assert is_ordered(attend(*inputs))


@NEEDS_CUDNN
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_ordered_backward_in_gradient_checkpointing(use_reentrant: bool, strict: None) -> None:
    inputs, grad = random_parts(1, 4, 2, 256, 256, 64)
    expected = gradients(inputs, grad)
    checkpoint(attend, *inputs, use_reentrant=use_reentrant).backward(grad)
    assert all(torch.equal(x.grad, right) for x, right in zip(inputs, expected, strict=True))


@NEEDS_CUDNN
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_ordered_backward_on_another_device_than_the_current_one(strict: None) -> None:
    inputs, grad = random_parts(1, 4, 2, 256, 256, 64)
    expected = gradients(inputs, grad)
    there = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    assert is_ordered(attend(*there))
    found = gradients(there, grad.to("cuda:1"))
    assert all(torch.equal(x.to("cuda:0"), right) for x, right in zip(found, expected, strict=True))
