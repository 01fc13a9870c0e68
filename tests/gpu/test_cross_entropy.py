"""Cross-entropy on the GPU equals torch's in FP32, with the logits in memory once or in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.layers import LinearCrossEntropy, cross_entropy
from tests.support.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU
TOKENS, WIDTH, VOCAB = 4096, 512, 64000
LOGITS = 2 * TOKENS * VOCAB
"""Bytes of the logits in bf16."""


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def ids(tokens: int, vocabulary: int) -> Tensor:
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    targets[::7] = -100
    return targets


def close(ours: Tensor, theirs: Tensor, bound: float) -> bool:
    return bool((ours.float() - theirs.float()).norm() <= bound * theirs.float().norm())


@pytest.mark.parametrize("vocabulary", [128256, 50257, 32000, 16032, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inplace", [False, True])
def test_loss_and_gradient_are_those_of_torch(vocabulary: int, dtype: torch.dtype, inplace: bool) -> None:
    x = (3 * torch.randn(515, vocabulary, device="cuda")).to(dtype).requires_grad_()
    targets = ids(515, vocabulary)
    ours = cross_entropy(x * 1, targets, inplace_backward=inplace)
    theirs = F.cross_entropy(x.float(), targets)
    assert close(ours, theirs, 1e-6)
    one, two = (torch.autograd.grad(loss * 1000, x)[0] for loss in (ours, theirs))
    assert one.dtype == dtype and close(one, two, 2e-6 if dtype == torch.float32 else 1e-3)


def head(chunk_tokens: int | None) -> LinearCrossEntropy:
    options = {"params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True}
    layer = LinearCrossEntropy(WIDTH, VOCAB, chunk_tokens=chunk_tokens, **options)
    layer.weight.main_grad = torch.zeros(VOCAB, WIDTH, device="cuda")
    return layer


@pytest.mark.parametrize(("chunk_tokens", "share"), [(None, 1.1), (512, 0.25)])
def test_memory_holds_the_logits_once_or_a_chunk_of_them(chunk_tokens: int | None, share: float) -> None:
    # Without it the weight gradient has a temporary of its own size.
    pytest.importorskip("nvmath")
    layer = head(chunk_tokens)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = ids(TOKENS, VOCAB)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = layer(x, targets)
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    logits = F.linear(x, layer.weight)
    assert peak < share * LOGITS
    assert close(loss, F.cross_entropy(logits.float(), targets), 1e-6)


def test_chunks_have_the_loss_and_gradients_of_the_whole() -> None:
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    targets, results = ids(TOKENS, VOCAB), []
    weight = head(None).weight.detach()
    for chunk_tokens in (None, 1024, 1000):
        layer, leaf = head(chunk_tokens), x.clone().requires_grad_()
        layer.weight.data.copy_(weight)
        loss = layer(leaf, targets)
        (loss * 1000).backward()
        results.append((loss, leaf.grad, layer.weight.main_grad))
    for chunked in results[1:]:
        assert all(close(one, two, 2e-3) for one, two in zip(chunked, results[0], strict=True))
