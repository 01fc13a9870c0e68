"""Layers and calls compute the same, whoever owns the parameters."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.contract.packed import PACKED_PARTS, leave_packed
from flatfsdp.fp8 import BlockScaling, CurrentScaling, autocast
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear, LinearCrossEntropy
from flatfsdp.layers.attention.heads import HeadsOf, add_to_slices, heads_of_projection
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding, apply_rotary
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import linear, norm_linear, prepare
from flatfsdp.layers.embedding import look_up
from flatfsdp.layers.loss.cross_entropy import Reduction
from flatfsdp.layers.loss.linear_cross_entropy import linear_cross_entropy
from tests.support.assertions import assert_equal
from tests.support.copies import by_pickle
from tests.support.foreign_layers import (
    FFN,
    WIDTH,
    Foreign,
    Owner,
    claimed,
    gradients,
    norm_mlp_of,
    owner,
    turned,
    two_calls,
)
from tests.support.fp8_layers import RECIPES, SHORT, TOKENS
from tests.support.plain_layers import EPS, error, trained


@RECIPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_of_foreign_parameters(recipe: Any, dtype: torch.dtype) -> None:
    foreign = owner().to(dtype)
    layer = LayerNormMLP(
        WIDTH,
        FFN,
        activation="swiglu",
        normalization="RMSNorm",
        params_dtype=dtype,
        return_layernorm_output=True,
    )
    layer.fc1_bias = None
    with torch.no_grad():
        values = (foreign.norm.weight, foreign.up.weight, foreign.down.weight, foreign.down.bias)
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.copy_(value)
    x = torch.randn(TOKENS, WIDTH).to(dtype)
    ours = gradients(foreign, x, partial(norm_mlp_of, foreign), recipe)
    theirs = gradients(layer, x, lambda x: layer(x, residual=x * 2, return_residual=True), recipe)
    assert_equal(ours, theirs)


@RECIPES
def test_two_maps_of_one_owner_are_two_layers(recipe: Any) -> None:
    """Attention's projections: scales are prepared once for both."""
    foreign = owner()
    first = LayerNormLinear(WIDTH, 2 * FFN, normalization="RMSNorm", bias=False)
    second = Linear(FFN, WIDTH)
    # In the order of the foreign model's parameters.
    layers = nn.ParameterList((first.layer_norm_weight, first.weight, second.weight, second.bias))
    with torch.no_grad():
        for parameter, value in zip(layers, foreign.parameters(), strict=True):
            parameter.copy_(value)
    x = torch.randn(2, TOKENS // 2, WIDTH)

    def both(x: Tensor) -> tuple[Tensor, ...]:
        mixed, summed = first(x, return_residual=True)
        return second(mixed[..., :FFN]), summed.view(-1, WIDTH)

    assert_equal(
        gradients(foreign, x, partial(two_calls, foreign), recipe), gradients(layers, x, both, recipe)
    )


def test_what_becomes_an_owner_is_itself_again() -> None:
    module: Any = Foreign()
    before, keys = dict(vars(module)), list(module.state_dict())
    module.__class__ = Owner
    module._become(fuse_wgrad_accumulation="if_claimed")
    module.allows_fp8 = True
    assert list(module.state_dict()) == keys and isinstance(module.up, nn.Linear)
    with autocast(recipe=SHORT):
        norm_mlp_of(module, torch.randn(TOKENS, WIDTH))[0].sum().backward()
    assert "fp8_forward_scale" in module.state_dict()
    assert module.state_dict()["fp8_forward_scale"].shape == (4,)
    module._resign()
    module.__class__ = Foreign
    assert vars(module) == before and list(module.state_dict()) == keys


def test_sizes_that_do_not_suit_fp8_are_named_by_the_owners_maps() -> None:
    module: Any = owner()
    module.down = nn.Linear(FFN, 20)
    with (
        autocast(recipe=CurrentScaling()),
        pytest.raises(ValueError, match=r"Owner\.down_weight.*out_features is 20"),
    ):
        two_calls(module, torch.randn(TOKENS, WIDTH))


# ---- where gradients go ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["high", "current"])
def test_if_claimed_fuses_where_an_engine_has_the_weight(recipe: Any) -> None:
    """Fusion is decided when the layer is called, for each map separately."""
    x = torch.randn(TOKENS, WIDTH)
    fused, plain = owner(fuse_wgrad_accumulation="if_claimed"), owner()
    buffer = claimed(fused.up.weight)
    ours, theirs = (gradients(m, x, partial(two_calls, m), recipe) for m in (fused, plain))
    assert fused.up.weight.grad is None
    assert torch.equal(buffer, plain.up.weight.grad)
    assert torch.equal(fused.down.weight.grad, plain.down.weight.grad)
    assert_equal([t for t in ours if t is not None][:-3], theirs[:-4])
    del fused.up.weight.claim_main_grad
    gradients(fused, x, partial(two_calls, fused), recipe)
    assert torch.equal(fused.up.weight.grad, buffer)


def test_if_claimed_needs_no_engine() -> None:
    layer, plain = Linear(4, 6, fuse_wgrad_accumulation="if_claimed"), Linear(4, 6)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4)
    for each in (layer, plain):
        each(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [True, "if_claimed"])
@pytest.mark.parametrize("recipe", [None, SHORT], ids=["high", "delayed"])
def test_parameters_that_an_engine_has_joined(bias: bool, fused: Any, recipe: Any) -> None:
    """One GEMM reads the engine's tensor, and writes to its buffer; nothing is concatenated."""
    split = Linear(WIDTH, FFN, bias=bias, parameters_split=["q", "k", "v"], fuse_wgrad_accumulation=fused)
    whole = Linear(WIDTH, FFN, bias=bias)
    packs = split.packed_parameters()
    assert [pack.name for pack in packs] == (["weight", "bias"] if bias else ["weight"])
    with torch.no_grad():
        for pack in packs:
            torch.cat(pack.tensors(), out=getattr(whole, pack.name))
    engine = {pack.name: torch.cat(pack.tensors()).detach().requires_grad_() for pack in packs}
    for name, tensor in engine.items():
        leave_packed(split, name, lambda tensor=tensor: tensor)
    buffer = claimed(engine["weight"])
    for part in split.parameters():
        part.data.fill_(torch.nan)
    x = torch.randn(TOKENS, WIDTH)
    ours = gradients(split, x, lambda x: (split(x),), recipe)
    theirs = gradients(whole, x, lambda x: (whole(x),), recipe)
    assert_equal(ours[:4], theirs[:4])
    assert engine["weight"].grad is None and torch.equal(buffer, whole.weight.grad)
    if bias:
        assert torch.equal(engine["bias"].grad, whole.bias.grad)


def test_of_split_parameters_the_pack_may_be_kept_in_fp8() -> None:
    """This needs each of them to have a size that suits FP8."""
    assert Linear(32, 48, parameters_split=["q", "k", "v"]).fp8_weights() == ("weight",)
    assert Linear(32, 64, parameters_split={"q": 40, "k": 24}).fp8_weights() == ()
    assert Linear(32, 48).fp8_weights() == ("weight",) and Linear(32, 40).fp8_weights() == ()


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_of_split_parameters_has_its_own(copied: Callable[[nn.Module], Any]) -> None:
    layer = Linear(4, 6, parameters_split=["a", "b"])
    other = copied(layer)
    with torch.no_grad():
        layer.a_weight.fill_(torch.nan)
    assert all(module is other for pack in other.packed_parameters() for module, _ in pack.parts)
    assert other(torch.randn(3, 4)).isfinite().all()


def test_split_parameters_are_freed_with_their_layer() -> None:
    layer = Linear(4, 6, parameters_split=["a", "b"])
    layer(torch.randn(3, 4)).sum().backward()
    weight = weakref.ref(layer.a_weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


def test_one_parameter_is_no_pack() -> None:
    assert Linear(4, 6).packed_parameters() == Linear(4, 6, parameters_split=["q"]).packed_parameters() == ()


# ---- weights [in, out] ----------------------------------------------------------------------------------

TENSOR_SCALING = pytest.mark.parametrize(
    "recipe", [None, SHORT, CurrentScaling()], ids=["high", "delayed", "current"]
)


def turned_back(module: Owner, tensors: list[Tensor]) -> list[Tensor]:
    """Gradients of parameters, the last of `tensors`, as if no weight were transposed."""
    *others, norm, up, down, bias = tensors
    return [*others, norm, up.t(), down.t(), bias]


@TENSOR_SCALING
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", [two_calls, norm_mlp_of])
def test_a_transposed_weight_is_the_weight(recipe: Any, dtype: torch.dtype, call: Any) -> None:
    plain, other = owner().to(dtype), turned().to(dtype)
    x = torch.randn(TOKENS, WIDTH).to(dtype)
    theirs = gradients(plain, x, partial(call, plain), recipe)
    ours = turned_back(other, gradients(other, x, partial(call, other), recipe))
    for one, expected in zip(ours, theirs, strict=True):
        assert one.shape == expected.shape and one.dtype == expected.dtype
        assert error(one, expected) < EPS[dtype]


@TENSOR_SCALING
@pytest.mark.parametrize("fused", [True, "two_pass"])
def test_the_gradient_of_a_transposed_weight_lands_as_it_lies(recipe: Any, fused: Any) -> None:
    module, plain = turned(fuse_wgrad_accumulation=fused), turned()
    buffers = [claimed(layer.weight) for layer in (module.up, module.down)]
    x = torch.randn(TOKENS, WIDTH)
    gradients_of_parameters = gradients(plain, x, partial(two_calls, plain), recipe)[-4:]
    gradients(module, x, partial(two_calls, module), recipe)
    assert module.up.weight.grad is None and module.down.weight.grad is None
    assert_equal(buffers, gradients_of_parameters[1:3])


def test_a_backward_to_some_parts_of_a_transposed_pack() -> None:
    module = turned(fuse_wgrad_accumulation=True)
    parts = [nn.Parameter(part.detach().clone()) for part in module.up.weight.split([WIDTH // 2] * 2)]
    x, weight = torch.randn(TOKENS, WIDTH), torch.cat(parts)
    (expected,) = torch.autograd.grad((x @ weight).square().sum(), parts[:1])
    PACKED_PARTS.leave(weight, tuple(parts))
    buffer = claimed(weight)
    up = MapOf("up_weight", weight, None, transposed=True)
    out = linear(prepare(module, x, up, module.maps[1]))
    out.square().sum().backward(inputs=parts[:1])
    assert error(parts[0].grad, expected) < EPS[torch.float32]
    assert parts[1].grad is None and not buffer.any()


@pytest.mark.parametrize("first", [True, None])
def test_a_transposed_weight_that_evaluation_has_cast_serves_the_backward(first: bool | None) -> None:
    """It was kept by a forward without gradients, which reads only one form of it."""
    module, recipe = turned(), CurrentScaling()
    x = torch.randn(TOKENS, WIDTH)

    def call(x: Tensor, first: bool | None) -> Tensor:
        up, down = module.maps
        return norm_linear(prepare(module, x, up, down, is_first_microbatch=first), module.norm_of).out

    with autocast(recipe=recipe):
        with torch.no_grad():
            expected = call(x, first)
        out = call(x.requires_grad_(), None if first is None else False)
    assert torch.equal(out, expected)
    out.sum().backward()
    with autocast(recipe=recipe):
        again = call(x2 := x.detach().requires_grad_(), None)
    again.sum().backward()
    assert torch.equal(x.grad, x2.grad)


def test_block_scaling_does_not_cast_transposed_weights() -> None:
    with (
        autocast(recipe=BlockScaling()),
        pytest.raises(ValueError, match=r"Turned\.up_weight .*BlockScaling"),
    ):
        two_calls(turned(), torch.randn(TOKENS, WIDTH))


def test_sizes_of_transposed_weights() -> None:
    module = turned()
    module.down.weight = nn.Parameter(torch.randn(FFN, 20))
    with (
        autocast(recipe=CurrentScaling()),
        pytest.raises(ValueError, match=r"Turned\.down_weight.*out_features is 20"),
    ):
        two_calls(module, torch.randn(TOKENS, WIDTH))
    with pytest.raises(ValueError, match=r"\(16, 20\).* is not 32"):
        two_calls(module, torch.randn(16, 20))


# ---- the head -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
def test_a_head_of_foreign_parameters(chunk_tokens: int | None, kind: Any) -> None:
    class Head(nn.Linear, MatmulLayer):
        linear_maps = ("weight",)
        allows_fp8 = False

    foreign: Any = nn.Linear(16, 40, bias=False)
    layer = LinearCrossEntropy(16, 40, reduction=kind, chunk_tokens=chunk_tokens)
    layer.load_state_dict(foreign.state_dict())
    foreign.__class__ = Head
    foreign._become()
    x, ids = torch.randn(3, 7, 16), torch.randint(0, 40, (3, 7))
    ids[1] = -100
    of = MapOf("weight", foreign.weight, None)
    how = Reduction(-100, kind)
    found = []
    for each in (
        lambda x: linear_cross_entropy(prepare(foreign, x, of), ids, how, chunk_tokens),
        lambda x: layer(x, ids),
    ):
        leaf = x.clone().requires_grad_()
        loss = each(leaf)
        loss.sum().backward()
        found.append((loss, leaf.grad))
    assert_equal([*found[0], foreign.weight.grad], [*found[1], layer.weight.grad])


# ---- around attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, SHORT], ids=["high", "delayed"])
def test_additions_to_slices_of_a_projection_copy_nothing(recipe: Any) -> None:
    """Adapters of query and value make such additions."""
    layer, x = Linear(WIDTH, 2 * FFN), torch.randn(2, TOKENS, WIDTH)
    low_rank = torch.randn(2, TOKENS, 16, requires_grad=True), torch.randn(2, TOKENS, 32, requires_grad=True)
    with autocast(enabled=recipe is not None, recipe=recipe):
        mixed, apart = layer(x), layer(x)
    passing: list[Tensor] = []
    mixed.register_hook(passing.append)
    for delta in low_rank:
        delta.register_hook(passing.append)
    out = add_to_slices(mixed, [(0, low_rank[0]), (2 * FFN - 32, low_rank[1])])
    assert out.data_ptr() == mixed.data_ptr()
    gap = torch.zeros(2, TOKENS, 2 * FFN - 48)
    expected = apart + torch.cat([low_rank[0], gap, low_rank[1]], -1)
    assert torch.equal(out, expected)
    dy = torch.randn_like(out)
    ours = torch.autograd.grad(out, (layer.weight, *low_rank), dy)
    assert {grad.untyped_storage().data_ptr() for grad in passing} == {dy.untyped_storage().data_ptr()}
    theirs = torch.autograd.grad(expected, (layer.weight, *low_rank), dy)
    if recipe is None:
        assert_equal(ours, theirs)
    assert_equal(ours[1:], theirs[1:])


def test_additions_of_another_dtype_are_rounded_once() -> None:
    mixed, delta = torch.randn(4, 8).bfloat16(), torch.randn(4, 3, requires_grad=True)
    expected = (mixed[:, 2:5].float() + delta).bfloat16()
    out = add_to_slices(mixed.clone(), [(2, delta)])
    assert torch.equal(out[:, 2:5], expected) and torch.equal(out[:, 5:], mixed[:, 5:])
    out.float().sum().backward()
    assert delta.grad is not None and delta.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("start", "shape"), [(6, (4, 3)), (-1, (4, 3)), (0, (4, 9)), (0, (3, 3)), (0, (2, 2, 3))]
)
def test_additions_that_do_not_fit(start: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"from column -?\d on does not fit into \(4, 8\)"):
        add_to_slices(torch.randn(4, 8), [(start, torch.randn(shape))])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("with_tables", [True, False])
def test_heads_are_normed_before_or_after_they_turn(norm_first: bool, with_tables: bool) -> None:
    """Each head is normalized by itself, as in Qwen3; an element-wise gain does not commute with rotation."""
    of = HeadsOf(4, 2, 8, interleaved=False)
    mixed = torch.randn(2, 5, 64, requires_grad=True)
    q_norm, k_norm = trained(nn.RMSNorm(8, eps=1e-6)), trained(nn.RMSNorm(8, eps=1e-6))
    tables = RotaryPositionEmbedding(8)(5) if with_tables else None
    ours = heads_of_projection(
        mixed, of, tables, batch_first=True, q_norm=q_norm, k_norm=k_norm, norm_first=norm_first
    )
    parts = mixed.unflatten(-1, (8, 8)).split((4, 2, 2), dim=-2)

    def turned(x: Tensor) -> Tensor:
        return x if tables is None else apply_rotary(x, *tables[:2], batch_first=True)

    def of_head(x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return turned(norm(x)) if norm_first else norm(turned(x))

    theirs = (of_head(parts[0], q_norm), of_head(parts[1], k_norm), parts[2])
    assert_equal(ours, theirs)
    weights = [torch.randn_like(part) for part in ours]
    grads = [
        torch.autograd.grad([(p * w).sum() for p, w in zip(each, weights, strict=True)], mixed)
        for each in (ours, theirs)
    ]
    torch.testing.assert_close(*grads)


# ---- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding_row", [None, 3])
def test_a_table_of_a_foreign_model(padding_row: int | None) -> None:
    table = nn.Embedding(10, 4, padding_idx=padding_row)
    ids = torch.tensor([[1, 3, 1], [9, 0, 3]])
    dy = torch.randn(2, 3, 4)
    expected = table(ids)
    expected.backward(dy)
    grad = table.weight.grad
    table.weight.grad = None
    found = look_up(table, table.weight, ids, padding_row, "if_claimed")
    assert torch.equal(found, expected)
    found.backward(dy)
    assert torch.equal(table.weight.grad, grad)
    table.weight.grad, buffer = None, claimed(table.weight)
    found = look_up(table, table.weight, ids, padding_row, "if_claimed")
    found.backward(dy)
    assert table.weight.grad is None
    assert torch.equal(found, expected) and torch.equal(buffer, grad)


def test_a_table_without_a_buffer_is_named() -> None:
    table = nn.Embedding(10, 4)
    out = look_up(table, table.weight, torch.tensor([1]), None, True)
    with pytest.raises(RuntimeError, match=r"Embedding\.weight has no main_grad"):
        out.sum().backward()
