"""`Embedding`: nn.Embedding, with gradients that go to `main_grad` row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.layers import Embedding, Linear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
IDS = pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([[1, 5, 1], [0, 6, 1]]),
        torch.tensor(3),
        torch.tensor([2, 2, 2, 2], dtype=torch.int32),
        torch.empty(4, 0, dtype=torch.int64),
    ],
    ids=["2d", "scalar", "int32", "empty"],
)


@DTYPES
@IDS
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
def test_bits_of_nn_embedding(dtype: torch.dtype, ids: Tensor, padding_idx: int | None) -> None:
    ours = Embedding(7, 12, padding_idx, params_dtype=dtype)
    theirs = nn.Embedding(7, 12, padding_idx, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    out, expected = ours(ids), theirs(ids)
    assert torch.equal(out, expected) and out.dtype == dtype
    dy = torch.randn_like(out)
    out.backward(dy)
    expected.backward(dy)
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


@DTYPES
@IDS
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize("start", [2.5, None])
def test_main_grad_against_float64(
    dtype: torch.dtype, ids: Tensor, padding_idx: int | None, start: float | None
) -> None:
    """The gradient is added to, or overwrites, main_grad, in FP32 whatever the table's dtype."""
    layer = Embedding(7, 12, padding_idx, params_dtype=dtype, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((7, 12), torch.nan if start is None else start)
    expected = torch.full((7, 12), start or 0.0, dtype=torch.float64)
    for microbatch in range(2):
        out = layer(ids, is_first_microbatch=microbatch == 0 and start is None)
        assert torch.equal(out, layer.weight[ids.long()])
        dy = torch.randn_like(out)
        out.backward(dy)
        rows = dy.reshape(-1, 12).double().clone()
        if padding_idx is not None:
            rows[ids.flatten() == padding_idx % 7] = 0
        expected.index_add_(0, ids.flatten().long(), rows)
    assert layer.weight.grad is None
    error = (layer.weight.main_grad - expected).norm() / expected.norm().clamp(min=1)
    assert error < 1e-6


def test_gradients_of_256_and_1_are_257() -> None:
    layer = Embedding(4, 16, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(4, 16)
    for value in (256.0, 1.0):
        out = layer(torch.tensor([2]))
        out.backward(torch.full_like(out, value))
    assert (layer.weight.main_grad[2] == 257).all()


@DTYPES
def test_a_bf16_main_grad_rounds_the_sum_over_tokens_once(dtype: torch.dtype) -> None:
    """256 and four times 0.5 are 258, which each addition in bf16 would round to 256."""
    layer = Embedding(4, 16, params_dtype=dtype, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((4, 16), torch.nan, dtype=torch.bfloat16)
    dy = torch.tensor([256.0, 0.5, 0.5, 0.5, 0.5])[:, None].expand(5, 16).to(dtype)
    for first, total in ((True, 258), (False, 516)):
        layer(torch.full((5,), 2), is_first_microbatch=first).backward(dy)
        assert (layer.weight.main_grad[2] == total).all()
    assert (layer.weight.main_grad[[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("tied_to", ["fused", "plain"])
def test_a_table_that_is_tied_to_a_head(tied_to: str) -> None:
    """Both write to one main_grad; a head that does not fuse leaves its part in `.grad`."""
    layer = Embedding(16, 32, fuse_wgrad_accumulation=True)
    head = Linear(32, 16, bias=False, fuse_wgrad_accumulation=tied_to == "fused")
    head.weight = layer.weight
    layer.weight.main_grad = torch.zeros(16, 32)
    ids, dy = torch.randint(0, 16, (16,)), torch.randn(16, 16)
    head(layer(ids)).backward(dy)
    plain = layer.weight.detach().double().requires_grad_()
    (plain[ids] @ plain.t()).backward(dy.double())
    total = layer.weight.main_grad + (0 if tied_to == "fused" else layer.weight.grad)
    assert (total - plain.grad).norm() / plain.grad.norm() < 1e-6


def test_frozen_or_without_gradients_it_needs_no_main_grad() -> None:
    layer = Embedding(7, 4, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        assert layer(torch.tensor([1])).grad_fn is None
    layer.weight.requires_grad_(False)
    assert not layer(torch.tensor([1])).requires_grad


@pytest.mark.parametrize(
    ("main_grad", "error"),
    [
        (None, RuntimeError),
        (torch.zeros(7, 4, dtype=torch.float16), TypeError),
        (torch.zeros(4, 7), ValueError),
        (torch.zeros(4, 7).t(), ValueError),
    ],
)
def test_a_main_grad_that_does_not_fit(main_grad: Any, error: type) -> None:
    layer = Embedding(7, 4, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        layer.weight.main_grad = main_grad
    with pytest.raises(error, match=r"main_grad|Embedding\.weight"):
        layer(torch.tensor([1])).sum().backward()


def test_initial_values() -> None:
    layer = Embedding(300, 200, padding_idx=4)
    assert abs(layer.weight.std() - 0.023) < 1e-3 and (layer.weight[4] == 0).all()
    assert (Embedding(3, 2, init_method=lambda w: w.fill_(2.0)).weight == 2).all()
    assert Embedding(3, 2, padding_idx=-1).padding_idx == 2


@pytest.mark.parametrize("fused", [False, True])
def test_an_id_outside_the_table(fused: bool) -> None:
    layer = Embedding(3, 2, fuse_wgrad_accumulation=fused)
    for bad in (3, -1):
        with pytest.raises((IndexError, RuntimeError)):
            layer(torch.tensor([bad]))
