"""Weight gradients that the layer adds to `main_grad` itself, for parameters that merely have one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import fp8
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import FFN, MAKES, RECIPES, SHORT, TOKENS, WIDTH, seeded, weights_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def with_main_grads(layer: Any, fill: Callable[[Tensor], Tensor]) -> Any:
    for weight in weights_of(layer).values():
        weight.main_grad = fill(torch.empty(weight.shape, dtype=torch.float32))
    return layer


def run(layer: nn.Module, recipe: Any, count: int, first: Callable[[int], bool | None]) -> list[Tensor]:
    """Microbatches with fresh data, the same for each call; gradients of the inputs."""
    generator = torch.Generator().manual_seed(7)
    grads = []
    dtype = next(layer.parameters()).dtype
    for microbatch in range(count):
        x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x, is_first_microbatch=first(microbatch))
        out.backward(torch.randn(out.shape, generator=generator).to(dtype))
        assert x.grad is not None
        grads.append(x.grad)
    return grads


def added_by_hand(make: Any, recipe: Any, count: int, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """FP32 parameters of the same values, whose gradients are FP32, added in order to `start`."""
    layer, sums = make(), dict(start)
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        x = torch.randn(TOKENS, WIDTH, generator=generator)
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x.requires_grad_())
        out.backward(torch.randn(out.shape, generator=generator))
        for name, weight in weights_of(layer).items():
            sums[name] = sums[name] + weight.grad
            weight.grad = None
    return sums


@RECIPES
@MAKES
@pytest.mark.parametrize("fused", [True, "two_pass"])
def test_exactly_the_weight_gradient_is_added(make: Any, recipe: Any, fused: Any) -> None:
    """To random numbers, not zeros."""
    layer = seeded(partial(make, fuse_wgrad_accumulation=fused))
    with_main_grads(layer, lambda t: t.normal_(0, 10))
    start = {name: weight.main_grad.clone() for name, weight in weights_of(layer).items()}
    buffers = {name: weight.main_grad for name, weight in weights_of(layer).items()}
    plain = seeded(make)
    expected_dx = run(plain, recipe, 3, lambda _: None)
    expected = added_by_hand(lambda: seeded(make), recipe, 3, start)
    dx = run(layer, recipe, 3, lambda _: None)
    for name, weight in weights_of(layer).items():
        assert weight.main_grad is buffers[name] and weight.grad is None
        assert torch.equal(weight.main_grad, expected[name])
    assert_equal(dx, expected_dx)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter.grad, dict(plain.named_parameters())[name].grad)


@DTYPES
@RECIPES
@MAKES
def test_fused_is_two_passes(make: Any, recipe: Any, dtype: torch.dtype) -> None:
    results = []
    for fused in (True, "two_pass"):
        layer = seeded(partial(make, fuse_wgrad_accumulation=fused)).to(dtype)
        torch.manual_seed(3)
        with_main_grads(layer, lambda t: t.normal_())
        dx = run(layer, recipe, 3, lambda m: m == 0)
        results.append([*dx, *(weight.main_grad for weight in weights_of(layer).values())])
    assert_equal(*results)


@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
@pytest.mark.parametrize(
    ("first", "overwrite", "start", "counted"),
    [
        (lambda m: None, False, 5.0, range(3)),
        (lambda m: False, False, 5.0, range(3)),
        (lambda m: m == 0, False, None, range(3)),
        (lambda m: m == 1, False, None, range(1, 3)),
        (lambda m: True, False, None, range(2, 3)),
        (lambda m: None, True, None, range(2, 3)),
        (lambda m: False, True, None, range(2, 3)),
    ],
)
def test_when_main_grad_is_overwritten(
    recipe: Any, first: Any, overwrite: bool, start: float | None, counted: range
) -> None:
    """By True, or by the weight's wish; what was there, NaN here, does not matter then."""
    one = torch.ones(TOKENS, WIDTH)
    layer = Linear(WIDTH, FFN, bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((FFN, WIDTH), torch.nan if start is None else start)
    layer.weight.overwrite_main_grad = overwrite
    if recipe is not None:
        # For is_first_microbatch=False.
        with autocast(recipe=recipe):
            layer(one, is_first_microbatch=True)
    for microbatch in range(3):
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(one, is_first_microbatch=first(microbatch))
        out.backward(torch.full_like(out, 4.0**-microbatch))
    expected = (start or 0) + sum(TOKENS * 4.0**-m for m in counted)
    assert (layer.weight.main_grad == expected).all()


def test_gradients_of_256_and_1_are_257() -> None:
    layer = Linear(16, 16, bias=False, fuse_wgrad_accumulation=True).bfloat16()
    layer.weight.main_grad = torch.zeros(16, 16)
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    x[0] = 1
    for value in (256.0, 1.0):
        layer(x).backward(torch.full((16, 16), value, dtype=torch.bfloat16))
    assert (layer.weight.main_grad == 257).all()


def test_the_sum_is_not_rounded_to_the_weights_dtype() -> None:
    """The product is FP32 in main_grad; a bf16 weight without main_grad gets a bf16 gradient."""
    torch.manual_seed(0)
    x, dy = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, FFN).bfloat16()
    layer = Linear(WIDTH, FFN, fuse_wgrad_accumulation=True).bfloat16()
    layer.weight.main_grad = torch.zeros(FFN, WIDTH)
    layer(x).backward(dy)
    exact = dy.double().t() @ x.double()
    error = (layer.weight.main_grad - exact).norm() / exact.norm()
    assert error < 1e-6
    assert (layer.weight.main_grad.bfloat16() - exact).norm() / exact.norm() > 1e-4


@DTYPES
@RECIPES
@MAKES
@pytest.mark.parametrize("fused", [True, "two_pass"])
def test_a_bf16_main_grad_is_the_fp32_one_rounded(
    make: Any, recipe: Any, dtype: torch.dtype, fused: Any
) -> None:
    """For the gradient of one microbatch."""
    buffers = []
    for convert in (Tensor.float, Tensor.bfloat16):
        layer = seeded(partial(make, fuse_wgrad_accumulation=fused)).to(dtype)
        with_main_grads(layer, lambda t, convert=convert: convert(t.fill_(torch.nan)))
        run(layer, recipe, 1, lambda _: True)
        buffers.append([weight.main_grad for weight in weights_of(layer).values()])
    assert_equal([wide.bfloat16() for wide in buffers[0]], buffers[1])


@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
def test_a_weight_used_twice_in_one_microbatch(recipe: Any) -> None:
    results = []
    for fused in (True, False):
        layer = seeded(lambda f=fused: Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=f))
        layer.weight.main_grad = torch.zeros(WIDTH, WIDTH)
        x = torch.randn(TOKENS, WIDTH)
        with autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(layer(x))
        out.backward(torch.randn(TOKENS, WIDTH))
        results.append(layer.weight.main_grad if fused else layer.weight.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
@MAKES
def test_once_and_not_twice_with_recompute(make: Any, recipe: Any, use_reentrant: bool) -> None:
    results = []
    for recomputes in (False, True):
        layer = seeded(partial(make, fuse_wgrad_accumulation=True))
        with_main_grads(layer, lambda t: t.fill_(2.0))

        def call(x: Tensor, is_first_microbatch: Any, layer: Any = layer, again: bool = recomputes) -> Tensor:
            if not again:
                return layer(x)
            return fp8.checkpoint(layer, x, use_reentrant=use_reentrant)

        layer_as_called = nn.Module()
        layer_as_called.inner, layer_as_called.forward = layer, call
        dx = run(layer_as_called, recipe, 2, lambda _: None)
        results.append([*dx, *(weight.main_grad for weight in weights_of(layer).values())])
    assert_equal(*results)


# ---- the contract with other engines -----------------------------------------------------------------------


@MAKES
def test_hooks_run_and_the_engine_is_told(make: Any) -> None:
    layer = with_main_grads(make(fuse_wgrad_accumulation=True), lambda t: t.zero_())
    called = []
    for name, weight in weights_of(layer).items():
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(lambda p, name=name: called.append((name, p.grad)))
    run(layer, SHORT, 1, lambda _: None)
    # torch 2.13 may make zeros of no gradient; what counts is that nothing real is there to be added.
    assert sorted(name for name, _ in called) == sorted(weights_of(layer))
    assert all(grad is None or not grad.any() for _, grad in called)
    assert all(weight.grad_added_to_main_grad is True for weight in weights_of(layer).values())


def test_a_weight_without_the_mark_gets_none() -> None:
    layer = with_main_grads(Linear(WIDTH, FFN, fuse_wgrad_accumulation=True), lambda t: t.zero_())
    run(layer, None, 1, lambda _: None)
    assert not hasattr(layer.weight, "grad_added_to_main_grad")


def test_a_buffer_that_is_allocated_when_it_is_needed() -> None:
    """Megatron-FSDP's way: `get_main_grad` counts only beside `__fsdp_param__`."""
    layer = Linear(WIDTH, FFN, fuse_wgrad_accumulation=True)
    buffer, calls = torch.zeros(FFN, WIDTH), []
    layer.weight.get_main_grad = lambda: (calls.append(1), buffer)[1]
    x = torch.ones(TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match="no main_grad"):
        layer(x).sum().backward()
    layer.weight.__fsdp_param__ = True
    out = layer(x)
    assert calls == []
    out.sum().backward()
    assert calls == [1] and (buffer == TOKENS).all()


def test_a_slot_that_the_weight_hands_out() -> None:
    """FlatFSDP's way comes first; it decides whether to overwrite, whatever the microbatch."""
    layer = Linear(WIDTH, FFN, fuse_wgrad_accumulation=True)
    slot = torch.full((FFN, WIDTH), torch.nan)
    answers = iter([(slot, True), (slot, False)])
    layer.weight.claim_main_grad = lambda: next(answers)
    layer.weight.main_grad = None
    for first in (False, True):
        layer(torch.ones(TOKENS, WIDTH), is_first_microbatch=first).sum().backward()
    assert (slot == 2 * TOKENS).all()


@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
@MAKES
def test_a_frozen_weight_needs_no_main_grad(make: Any, recipe: Any) -> None:
    layer = make(fuse_wgrad_accumulation=True)
    for weight in weights_of(layer).values():
        weight.requires_grad_(False)
    grads = run(layer, recipe, 2, lambda _: None)
    assert all(grad.isfinite().all() and grad.any() for grad in grads)
    with torch.no_grad(), autocast(enabled=recipe is not None, recipe=recipe):
        layer(torch.ones(TOKENS, WIDTH))


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main_grad", "error", "message"),
    [
        (None, RuntimeError, "no main_grad"),
        (torch.zeros(FFN, WIDTH, dtype=torch.float16), TypeError, "float16"),
        (torch.zeros(FFN, WIDTH, dtype=torch.float64), TypeError, "float64"),
        (torch.zeros(WIDTH, FFN, dtype=torch.bfloat16), ValueError, "shape"),
        (torch.zeros(WIDTH, FFN), ValueError, "shape"),
        (torch.zeros(FFN * WIDTH), ValueError, "shape"),
        (torch.zeros(WIDTH, FFN).t(), ValueError, "strides"),
    ],
)
@pytest.mark.parametrize("recipe", [SHORT, None], ids=["delayed", "high"])
def test_a_main_grad_that_does_not_fit(main_grad: Any, error: Any, message: str, recipe: Any) -> None:
    layer = Linear(WIDTH, FFN, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        layer.weight.main_grad = main_grad
    with pytest.raises(error, match=rf"(?s)Linear\.weight.*{message}|{message}.*Linear\.weight"):
        run(layer, recipe, 1, lambda _: None)


@pytest.mark.parametrize("fused", [True, "two_pass"])
def test_split_parameters_cannot_own_one_main_grad(fused: Any) -> None:
    """Before anything is computed; where nothing is trained there is no gradient to write."""
    layer = Linear(WIDTH, FFN, parameters_split=["q", "k", "v"], fuse_wgrad_accumulation=fused)
    x = torch.randn(TOKENS, WIDTH)
    with pytest.raises(RuntimeError, match=r"q_weight, k_weight, v_weight: one GEMM.*='if_claimed'"):
        layer(x)
    plain = Linear(WIDTH, FFN, parameters_split=["q", "k", "v"])
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))
    layer.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None
