"""Tensors kept for backward: only those that it reads, in FP8 if it reads them in FP8."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.fp8.quantizers import Delayed
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear
from tests.support.assertions import saved_by
from tests.support.fp8_layers import FFN, SHORT, TOKENS, WIDTH

E4M3 = torch.float8_e4m3fn
RECIPES = pytest.mark.parametrize("recipe", [SHORT, CurrentScaling()], ids=["delayed", "current"])


def saved(
    layer: nn.Module,
    recipe: Any,
    *,
    input_grad: bool,
    trained: Any = None,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of saved tensors with more than one element; `trained` parameters, None for all."""
    layer = layer.to(dtype)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=input_grad)
    with autocast(enabled=recipe is not None, recipe=recipe):
        out, found = saved_by(layer, x)
    result = sorted(((tuple(t.shape), t.dtype) for t in found if t.numel() > 1), key=str)
    if out.requires_grad:
        out.sum().backward()
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is not None) == (trained is None or name in trained), name
        assert (x.grad is not None) == input_grad
    return result


X_T, W_T = ((WIDTH, TOKENS), E4M3), ((WIDTH, FFN), E4M3)
ACT_T, FC2_T = ((FFN, TOKENS), E4M3), ((FFN, WIDTH), E4M3)
FC1, FC2 = ((FFN, WIDTH), E4M3), ((WIDTH, FFN), E4M3)


def norm_of(dtype: torch.dtype) -> list[Any]:
    """The tensors that the backward of a LayerNorm reads."""
    statistics = ((TOKENS,), torch.float32)
    return [((TOKENS, WIDTH), dtype), ((WIDTH,), dtype), statistics, statistics]


NORM = ("layer_norm_weight", "layer_norm_bias")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize(
    ("trained", "input_grad", "expected"),
    [
        (("weight", "bias"), True, [(TOKENS, WIDTH), (FFN, WIDTH)]),
        (("weight",), False, [(TOKENS, WIDTH)]),
        ((), True, [(FFN, WIDTH)]),
        (("bias",), False, []),
    ],
)
def test_linear_without_fp8(dtype: torch.dtype, trained: Any, input_grad: bool, expected: Any) -> None:
    found = saved(Linear(WIDTH, FFN), None, input_grad=input_grad, trained=trained, dtype=dtype)
    assert found == sorted(((shape, dtype) for shape in expected), key=str)


@RECIPES
@DTYPES
@pytest.mark.parametrize(
    ("make", "trained", "input_grad", "reads", "expected"),
    [
        (Linear, ("weight", "bias"), True, "", [X_T, W_T]),
        (Linear, ("weight", "bias"), False, "", [X_T]),
        (Linear, ("weight",), False, "", [X_T]),
        (Linear, (), True, "", [W_T]),
        (Linear, ("bias",), True, "", [W_T]),
        (Linear, ("bias",), False, "", []),
        (Linear, (), False, "", []),
        (LayerNormLinear, None, True, "norm", [X_T, W_T]),
        (LayerNormLinear, None, False, "norm", [X_T, W_T]),
        (LayerNormLinear, NORM, False, "norm", [W_T]),
        (LayerNormLinear, (), True, "norm", [W_T]),
        (LayerNormLinear, ("weight",), False, "", [X_T]),
        (LayerNormLinear, ("bias",), False, "", []),
        (LayerNormMLP, None, True, "norm, hidden", [X_T, W_T, ACT_T, FC2_T]),
        (LayerNormMLP, None, False, "norm, hidden", [X_T, W_T, ACT_T, FC2_T]),
        (LayerNormMLP, (), True, "norm, hidden", [W_T, FC2_T]),
        (LayerNormMLP, ("fc1_weight",), True, "norm, hidden", [X_T, W_T, FC2_T]),
        (LayerNormMLP, ("fc2_weight",), True, "norm, hidden", [W_T, ACT_T, FC2_T]),
        (LayerNormMLP, ("fc1_weight",), False, "hidden", [X_T, FC2_T]),
        (LayerNormMLP, ("fc1_bias",), False, "hidden", [FC2_T]),
        (LayerNormMLP, ("fc2_weight",), False, "", [ACT_T]),
        (LayerNormMLP, ("fc2_bias",), False, "", []),
    ],
)
def test_layers_in_fp8(
    recipe: Any,
    dtype: torch.dtype,
    make: Any,
    trained: Any,
    input_grad: bool,
    reads: str,
    expected: list[Any],
) -> None:
    """Besides FP8: what the norm's backward reads, and the hidden values before the activation."""
    found = saved(make(WIDTH, FFN), recipe, input_grad=input_grad, trained=trained, dtype=dtype)
    hidden = [((TOKENS, FFN), dtype)] * ("hidden" in reads)
    assert found == sorted(expected + hidden + norm_of(dtype) * ("norm" in reads), key=str)


@RECIPES
def test_an_mlp_that_saves_only_its_input(recipe: Any) -> None:
    """It saves no activation but the input, and weights, which cost nothing if they are cached."""
    found = saved(LayerNormMLP(WIDTH, FFN, checkpoint=True), recipe, input_grad=True)
    parameters = [((WIDTH,), torch.float32)] * 2 + [((FFN,), torch.float32)]
    assert found == sorted([((TOKENS, WIDTH), torch.float32), FC1, W_T, FC2_T, *parameters], key=str)


def test_cached_weights_are_saved_by_reference() -> None:
    """Microbatches share them: many open forwards of a pipeline hold one copy."""
    layer = Linear(WIDTH, FFN)
    storages = set()
    for first in (True, False, False):
        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        with autocast(recipe=SHORT):
            _, found = saved_by(layer, x, is_first_microbatch=first)
        (weight,) = (t for t in found if t.shape == (WIDTH, FFN))
        storages.add(weight.untyped_storage().data_ptr())
    assert len(storages) == 1


def test_a_joined_weight_does_not_outlive_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(WIDTH, FFN, bias=False, parameters_split=["q", "k", "v"])
    joined, layer_shape = [], (FFN, WIDTH)
    cat = torch.cat

    def spy(tensors: list[Tensor]) -> Tensor:
        out = cat(tensors)
        if out.shape == layer_shape:
            joined.append(weakref.ref(out))
        return out

    monkeypatch.setattr(torch, "cat", spy)
    with autocast(recipe=SHORT):
        out = layer(torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert len(joined) == 1 and joined[0]() is None
    out.sum().backward()


@RECIPES
def test_a_graph_that_is_dropped_drops_what_it_saved(recipe: Any) -> None:
    """No cycle keeps activations until the garbage collector runs."""
    layer = nn.Sequential(LayerNormLinear(WIDTH, FFN), Linear(FFN, WIDTH), LayerNormMLP(WIDTH, FFN))
    found: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == E4M3:
            found.append(weakref.ref(tensor))
        return tensor

    x = torch.randn(TOKENS, WIDTH)
    for does_backward in (False, True):
        found.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with autocast(recipe=recipe):
                out = layer(x)
        assert any(reference() is not None for reference in found)
        if does_backward:
            out.sum().backward()
        del out
        assert [reference() for reference in found if reference() is not None] == []


@pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear])
@pytest.mark.parametrize(("trains", "input_grad"), [(True, True), (True, False), (False, True)])
def test_nothing_is_transposed_that_no_product_reads(
    layer_type: type, trains: bool, input_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a frozen weight neither input nor gradient is; the weight only if the input gets a gradient."""
    layer, transposed = layer_type(WIDTH, FFN), []
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trains and name == "weight")
    operand = Delayed.operand

    def spy(self: Delayed, rowwise: Tensor | None, columnwise: Tensor | None) -> Any:
        if columnwise is not None:
            transposed.append(tuple(columnwise.shape))
        return operand(self, rowwise, columnwise)

    monkeypatch.setattr(Delayed, "operand", spy)
    with autocast(recipe=SHORT):
        out = layer(torch.randn(TOKENS, WIDTH, requires_grad=input_grad))
    out.sum().backward()
    weight, x, dy = (WIDTH, FFN), (WIDTH, TOKENS), (FFN, TOKENS)
    assert sorted(transposed) == sorted([weight] * input_grad + [x, dy] * trains)


def test_an_evaluation_keeps_nothing() -> None:
    layer = LayerNormMLP(WIDTH, FFN)
    with torch.no_grad(), autocast(recipe=SHORT):
        out = layer(torch.randn(TOKENS, WIDTH))
    assert out.grad_fn is None and layer._weight_cache.kept == {}
