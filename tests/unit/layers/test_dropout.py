from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flatfsdp.layers.dropout import bias_dropout_add
from tests.support import plain_layers as plain
from tests.support.assertions import saved_by


def test_without_dropout_it_is_an_addition() -> None:
    inputs = [plain.leaf(3, 5, 24), plain.leaf(24), plain.leaf(3, 5, 24)]
    for training, p in ((True, 0.0), (False, 0.7)):
        plain.same_gradients(
            lambda x, bias, residual, p=p, training=training: bias_dropout_add(
                x, bias, residual, p, training
            ),
            lambda x, bias, residual: x + bias + residual,
            inputs,
            plain.EPS[torch.float32],
        )
    x, _, residual = inputs
    assert bias_dropout_add(x, None, None, 0.5, False) is x
    assert torch.equal(bias_dropout_add(x, None, residual, 0.0, True), x + residual)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_elements_are_dropped_and_backward_drops_the_same(has_bias: bool, has_residual: bool) -> None:
    p, x = 0.4, plain.leaf(60, 2, 33)
    bias = plain.leaf(33) if has_bias else None
    residual = plain.leaf(60, 2, 33) if has_residual else None
    out = bias_dropout_add(x, bias, residual, p, True)
    dropped = out == (0 if residual is None else residual)
    assert abs(dropped.float().mean().item() - p) < 0.05
    branch = x.detach().double() + (0 if bias is None else bias.detach())
    expected = torch.where(dropped, 0.0, branch / (1 - p)) + (0 if residual is None else residual.detach())
    assert plain.error(out, expected) < 1e-6

    dy = torch.randn_like(out)
    out.backward(dy)
    dx = torch.where(dropped, 0.0, dy.double() / (1 - p))
    assert x.grad is not None and plain.error(x.grad, dx) < 1e-6
    if bias is not None:
        assert bias.grad is not None and plain.error(bias.grad, dx.sum((0, 1))) < 1e-6


def test_the_gradient_of_the_residual_is_not_copied() -> None:
    x, residual = plain.leaf(4, 8), plain.leaf(4, 8)
    for p in (0.0, 0.3):
        out = bias_dropout_add(x, plain.leaf(8), residual, p, True)
        dy = torch.randn(4, 8)
        (grad,) = torch.autograd.grad(out, residual, dy)
        assert grad.data_ptr() == dy.data_ptr()


@pytest.mark.parametrize(("p", "nbytes"), [(0.0, 0), (0.3, 8)])
def test_only_a_seed_is_stored_for_backward(p: float, nbytes: int) -> None:
    _, stored = saved_by(bias_dropout_add, plain.leaf(4, 8), plain.leaf(8), plain.leaf(4, 8), p, True)
    assert sum(tensor.nbytes for tensor in stored) == nbytes


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_bias_gradients_are_summed_in_fp32(p: float) -> None:
    """In bf16 the sum of 2048 ones stops at 256."""
    x, bias = torch.ones(2048, 4, dtype=torch.bfloat16), torch.zeros(4, requires_grad=True)
    out = bias_dropout_add(x, bias, None, p, True)
    assert out.dtype == torch.bfloat16
    out.backward(torch.full_like(out, 1 - p))
    assert bias.grad is not None and bias.grad.dtype == torch.float32
    kept = 2048 if p == 0 else (out != 0).sum(0)
    assert torch.equal(bias.grad, torch.ones(4) * kept)


def test_the_result_has_the_wider_dtype() -> None:
    x, residual = plain.leaf(4, 8, dtype=torch.bfloat16), plain.leaf(4, 8)
    out = bias_dropout_add(x, plain.leaf(8, dtype=torch.bfloat16), residual, 0.3, True)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_calls_differ_and_a_seed_repeats_them() -> None:
    x = torch.ones(50, 40)

    def two() -> list[Tensor]:
        torch.manual_seed(5)
        return [bias_dropout_add(x, None, None, 0.5, True) for _ in range(2)]

    (first, second), (again, _) = two(), two()
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_drops_the_same(use_reentrant: bool) -> None:
    x = torch.ones(20, 30, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return bias_dropout_add(x, None, None, 0.5, True).square()

    out = checkpoint(function, x, use_reentrant=use_reentrant)
    out.sum().backward()
    # 2 * (2 x) * 2 where kept.
    assert x.grad is not None and torch.equal(x.grad, 2 * out.detach())


def test_strided_tensors_and_no_tokens() -> None:
    x, residual = torch.randn(8, 6).T, torch.randn(6, 2, 8)[:, 0]
    torch.manual_seed(0)
    ours = bias_dropout_add(x, None, residual, 0.5, True)
    torch.manual_seed(0)
    assert torch.equal(ours, bias_dropout_add(x.contiguous(), None, residual.contiguous(), 0.5, True))
    nothing, bias = plain.leaf(0, 3, 8), plain.leaf(8)
    bias_dropout_add(nothing, bias, nothing, 0.5, True).sum().backward()
    assert bias.grad is not None and torch.equal(bias.grad, torch.zeros(8))


def test_what_does_not_fit_is_named() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"p is 1\.0"):
        bias_dropout_add(x, None, None, 1.0, True)
    with pytest.raises(ValueError, match=r"the residual has shape \(4,\)"):
        bias_dropout_add(x, None, torch.ones(4), 0.1, True)
    with pytest.raises(ValueError, match="bias is"):
        bias_dropout_add(x, torch.ones(3), None, 0.1, True)


def test_compiled_calls_draw_new_numbers() -> None:
    x = torch.ones(20, 20)
    compiled = torch.compile(lambda x: bias_dropout_add(x, None, x, 0.5, True), backend="aot_eager")
    assert not torch.equal(compiled(x), compiled(x))
