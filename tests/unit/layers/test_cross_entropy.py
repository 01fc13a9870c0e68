"""`cross_entropy` and `LinearCrossEntropy` against torch in float64, and against each other bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp import fp8
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.layers import Linear, LinearCrossEntropy, cross_entropy
from tests.support.assertions import assert_raises, saved_by
from tests.support.plain_layers import EPS, error, leaf

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
CHUNKS = pytest.mark.parametrize("chunk_tokens", [None, 4, 100])
VOCAB, WIDTH = 50, 24


def ids(*shape: int) -> Tensor:
    """Random ids, some of which are ignored."""
    targets = torch.randint(VOCAB, shape)
    return targets.masked_fill(torch.rand(shape) < 0.2, -100)


def upstream(loss: Tensor) -> Tensor:
    return torch.rand_like(loss) + 0.5


# ---- the loss of logits -----------------------------------------------------------------------------------


@DTYPES
@REDUCTIONS
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(9,), (2, 5), ()])
def test_loss_and_gradient_are_those_of_torch(
    dtype: torch.dtype, reduction: Any, inplace: bool, shape: tuple[int, ...]
) -> None:
    targets = torch.randint(VOCAB, shape) if shape == () else ids(*shape)
    x = leaf(*shape, VOCAB, dtype=dtype)
    ours = cross_entropy(x * 3, targets, reduction=reduction, inplace_backward=inplace)
    assert ours.dtype == torch.float32
    double = x.detach().double().requires_grad_()
    logits = (x * 3).detach().double() + 3 * (double - double.detach())
    theirs = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), reduction=reduction)
    theirs = theirs.view_as(ours)
    assert error(ours, theirs) < 2e-6
    dloss = upstream(ours)
    ours.backward(dloss)
    theirs.backward(dloss.double())
    assert x.grad.dtype == dtype and error(x.grad, double.grad) < EPS[dtype]


def test_ignore_index_may_be_an_id() -> None:
    x, targets = leaf(6, VOCAB), torch.tensor([0, 3, 0, 7, 0, 9])
    ours = cross_entropy(x, targets, ignore_index=0)
    theirs = F.cross_entropy(x, targets, ignore_index=0)
    assert torch.allclose(ours, theirs)
    grads = [torch.autograd.grad(loss, x)[0] for loss in (ours, theirs)]
    assert torch.allclose(*grads, atol=1e-7) and (grads[0][::2] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_without_a_token_that_counts_the_mean_is_nan_and_gradients_are_0(tokens: int) -> None:
    x = leaf(tokens, VOCAB)
    loss = cross_entropy(x, torch.full((tokens,), -100))
    assert loss.isnan()
    loss.backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_the_gradient_lands_in_the_logits_only_if_asked() -> None:
    x, targets = leaf(6, VOCAB), ids(6)
    for inplace in (False, True):
        logits = x * 1
        before = logits.detach().clone()
        (grad,) = torch.autograd.grad(cross_entropy(logits, targets, inplace_backward=inplace), logits)
        assert torch.equal(logits.detach(), before) == (not inplace)
        assert (grad.data_ptr() == logits.data_ptr()) == inplace


def test_overwritten_logits_are_refused_to_others() -> None:
    """They are refused to operations with a pending backward, and to a second backward of the loss itself."""
    x, targets = leaf(6, VOCAB), ids(6)
    logits = x * 1
    squares = logits.square().sum()
    loss = cross_entropy(logits, targets, inplace_backward=True)
    loss.backward(retain_graph=True)
    for later in (squares, loss):
        assert_raises(RuntimeError, "modified by an inplace operation", later.backward)


def test_a_leaf_is_not_overwritten() -> None:
    x, targets = leaf(6, VOCAB), ids(6)
    for logits in (x, x.view(6, VOCAB)):
        with pytest.raises(ValueError, match="would overwrite a leaf"):
            cross_entropy(logits, targets, inplace_backward=True)
    with torch.no_grad():
        assert cross_entropy(x, targets, inplace_backward=True).isfinite()


def test_a_plain_backward_can_run_twice() -> None:
    x, targets = leaf(6, VOCAB), ids(6)
    loss = cross_entropy(x, targets)
    one, two = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)


def test_what_does_not_fit_is_named() -> None:
    x = torch.randn(6, VOCAB)
    assert_raises(ValueError, r"targets have shape \(5,\), and tokens \(6,\)", cross_entropy, x, ids(5))
    assert_raises(ValueError, "reduction is 'max'", cross_entropy, x, ids(6), reduction="max")
    for wrong in (-1, VOCAB):
        targets = ids(6)
        targets[3] = wrong
        with pytest.raises(RuntimeError, match="outside of the vocabulary of 50, and not ignore_index=-100"):
            cross_entropy(x, targets)


# ---- with the head's product ------------------------------------------------------------------------------


def head(dtype: torch.dtype = torch.float32, **options: Any) -> LinearCrossEntropy:
    options = {"params_dtype": dtype, "init_method": nn.init.normal_, **options}
    return LinearCrossEntropy(WIDTH, VOCAB, **options)


def main_grad_of(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    layer.weight.main_grad = torch.full(layer.weight.shape, torch.nan, dtype=dtype)
    return layer.weight.main_grad


def doubled_loss(layer: LinearCrossEntropy, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch's loss in float64, with its leaves; logits are rounded as ours."""
    x, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    exact = x @ weight.t()
    rounded = exact + (exact.to(layer.weight.dtype).double() - exact).detach()
    how = layer.how
    losses = F.cross_entropy(
        rounded.view(-1, VOCAB), targets.view(-1), ignore_index=how.ignore_index, reduction=how.kind
    )
    return losses, x, weight


@DTYPES
@REDUCTIONS
@CHUNKS
@pytest.mark.parametrize("fused", [False, True, "two_pass"])
def test_head_and_loss_against_float64(
    dtype: torch.dtype, reduction: Any, chunk_tokens: int | None, fused: Any
) -> None:
    layer = head(dtype, reduction=reduction, chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=fused)
    if fused:
        main_grad_of(layer)
    x, targets = leaf(2, 7, WIDTH, dtype=dtype), ids(2, 7)
    loss = layer(x, targets, is_first_microbatch=True)
    expected, x_double, weight = doubled_loss(layer, x, targets)
    assert loss.dtype == torch.float32 and error(loss.flatten(), expected.flatten()) < EPS[dtype]
    dloss = upstream(loss)
    loss.backward(dloss)
    expected.backward(dloss.double().view_as(expected))
    got = layer.weight.main_grad if fused else layer.weight.grad
    assert (layer.weight.grad is None) == bool(fused) and got.dtype == (torch.float32 if fused else dtype)
    assert error(got, weight.grad) < EPS[dtype] and error(x.grad, x_double.grad) < EPS[dtype]


@DTYPES
@CHUNKS
def test_the_same_bits_as_a_linear_and_the_loss_of_its_logits(
    dtype: torch.dtype, chunk_tokens: int | None
) -> None:
    """This includes a second microbatch; chunks of the weight's gradient add up in another order."""
    layer = head(dtype, chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    plain = Linear(WIDTH, VOCAB, bias=False, params_dtype=dtype, fuse_wgrad_accumulation=True)
    plain.load_state_dict(layer.state_dict())
    ours, theirs = main_grad_of(layer), main_grad_of(plain)
    for first in (True, False):
        x, targets = leaf(12, WIDTH, dtype=dtype), ids(12)
        other = x.detach().clone().requires_grad_()
        logits = plain(other, is_first_microbatch=first)
        assert torch.equal(layer(x), logits)
        loss, expected = layer(x, targets, is_first_microbatch=first), cross_entropy(logits, targets)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert torch.equal(x.grad, other.grad)
        assert torch.equal(ours, theirs) if chunk_tokens is None else error(ours, theirs) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_chunks_of_the_weight_gradient_add_up_in_fp32(fused: bool) -> None:
    """256 and 1 are 257, which bf16 cannot represent, and 4 times 0.25 on top are 258, which it can."""
    layer = head(torch.bfloat16, reduction="none", chunk_tokens=1, fuse_wgrad_accumulation=fused)
    layer.weight.data.zero_()
    layer.weight.main_grad = torch.zeros(VOCAB, WIDTH)
    values = torch.tensor([256.0, 1.0, 0.25, 0.25, 0.25, 0.25])
    x = values[:, None].expand(6, WIDTH).bfloat16().contiguous()
    # Each token adds x times its probability of 1 / VOCAB.
    layer(x, torch.zeros(6, dtype=torch.int64)).backward(torch.full((6,), float(VOCAB)))
    got = layer.weight.main_grad if fused else layer.weight.grad
    assert (got[1:] == 258).all()


@DTYPES
@CHUNKS
def test_a_bf16_main_grad_is_the_fp32_one_rounded_once(dtype: torch.dtype, chunk_tokens: int | None) -> None:
    """After all chunks; a later microbatch adds its FP32 sum to what was rounded."""
    layer = head(dtype, reduction="sum", chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    wide, narrow = main_grad_of(layer), main_grad_of(layer, torch.bfloat16)
    for first in (True, False):
        x, targets = leaf(14, WIDTH, dtype=dtype), ids(14)
        for main_grad, overwrites in ((wide, True), (narrow, first)):
            before = main_grad.clone()
            layer.weight.main_grad = main_grad
            layer(x, targets, is_first_microbatch=overwrites).backward()
        exact = wide if first else before.float() + wide
        assert torch.equal(narrow, exact.bfloat16())


@CHUNKS
@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_what_is_frozen_gets_no_gradient(chunk_tokens: int | None, frozen: str) -> None:
    layer = head(chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    expected, x_double, weight = doubled_loss(layer, x := leaf(9, WIDTH), targets := ids(9))
    expected.backward()
    main_grad = main_grad_of(layer)
    layer.weight.requires_grad_(frozen == "input")
    loss = layer(x if frozen == "weight" else x.detach(), targets, is_first_microbatch=True)
    assert loss.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    loss.backward()
    if frozen == "weight":
        assert main_grad.isnan().all() and error(x.grad, x_double.grad) < 2e-6
    else:
        assert x.grad is None and error(main_grad, weight.grad) < 2e-6


@CHUNKS
def test_autograd_may_ask_for_the_input_only(chunk_tokens: int | None) -> None:
    layer = head(chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    main_grad = main_grad_of(layer)
    expected, x_double, _ = doubled_loss(layer, x := leaf(9, WIDTH), targets := ids(9))
    (grad,) = torch.autograd.grad(layer(x, targets), x)
    assert error(grad, torch.autograd.grad(expected, x_double)[0]) < 2e-6
    assert main_grad.isnan().all()


@CHUNKS
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_token_counts(chunk_tokens: int | None, tokens: int) -> None:
    layer = head(chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    main_grad, x = main_grad_of(layer), leaf(tokens, WIDTH)
    loss = layer(x, torch.full((tokens,), -100), is_first_microbatch=True)
    assert loss.isnan()
    loss.backward()
    assert torch.equal(x.grad, torch.zeros_like(x)) and torch.equal(main_grad, torch.zeros_like(main_grad))


def test_a_second_backward_needs_chunks() -> None:
    x, targets = leaf(9, WIDTH), ids(9)
    loss = head()(x, targets)
    loss.backward(retain_graph=True)
    assert_raises(RuntimeError, r"second backward .* use chunk_tokens", loss.backward)
    loss = head(chunk_tokens=4)(x, targets)
    one, two = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, two)


@CHUNKS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_changes_no_bit(chunk_tokens: int | None, use_reentrant: bool) -> None:
    layer = head(torch.bfloat16, chunk_tokens=chunk_tokens, fuse_wgrad_accumulation=True)
    x, targets = torch.randn(9, WIDTH).bfloat16(), ids(9)

    def results(call: Callable[..., Tensor]) -> list[Tensor]:
        main_grad, leaf = main_grad_of(layer), x.clone().requires_grad_()
        loss = call(leaf, targets, True)
        loss.backward()
        return [loss, leaf.grad, main_grad]

    repeated = results(lambda *inputs: checkpoint(layer, *inputs, use_reentrant=use_reentrant))
    assert all(torch.equal(one, two) for one, two in zip(results(layer), repeated, strict=True))


@pytest.mark.parametrize(("chunk_tokens", "expected"), [(None, [torch.bfloat16]), (4, [])])
def test_what_of_the_logits_is_kept_for_backward(
    chunk_tokens: int | None, expected: list[torch.dtype]
) -> None:
    layer = head(torch.bfloat16, chunk_tokens=chunk_tokens)
    _, kept = saved_by(layer, leaf(99, WIDTH, dtype=torch.bfloat16), ids(99))
    assert [tensor.dtype for tensor in kept if tensor.numel() >= 99 * VOCAB] == expected


def test_products_are_not_in_fp8() -> None:
    layer = LinearCrossEntropy(32, 48, params_dtype=torch.bfloat16)
    x, targets = leaf(16, 32, dtype=torch.bfloat16), torch.randint(48, (16,))
    expected = layer(x, targets)
    with fp8.autocast(recipe=CurrentScaling()):
        assert torch.equal(layer(x, targets), expected)
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert layer.fp8_weights() == ()


def test_its_weight_is_a_heads() -> None:
    layer, plain = head(), nn.Linear(WIDTH, VOCAB, bias=False)
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    assert list(layer.state_dict()) == ["weight"]


def test_options_that_contradict_each_other() -> None:
    parts = ({"parameters_split": ("a", "b")}, {"partition_sizes": (20, 30)})
    for options in ({"bias": True}, {"return_bias": True}, *parts):
        assert_raises(NotImplementedError, "one weight and no bias", head, **options)
    assert_raises(NotImplementedError, "parallel_mode is 'row'", head, parallel_mode="row")
    assert_raises(ValueError, "chunk_tokens is 0", head, chunk_tokens=0)
    assert_raises(ValueError, "reduction is 'max'", head, reduction="max")
    with pytest.raises(ValueError, match=r"targets have shape \(5,\), and tokens \(9,\)"):
        head()(torch.randn(9, WIDTH), ids(5))
    with pytest.raises(RuntimeError, match="outside of the vocabulary"):
        head()(torch.randn(1, WIDTH), torch.tensor([VOCAB]))
