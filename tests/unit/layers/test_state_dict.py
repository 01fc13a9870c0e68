"""FP8 state in state dicts, copies and moves: ordinary FP32 tensors; training continues bit-equal."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import DelayedScaling, Format, autocast
from flatfsdp.layers import (
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
from flatfsdp.layers.norm import L2Normalization
from tests.support.copies import by_pickle, by_torch_save
from tests.support.fp8_layers import (
    FFN,
    SHORT,
    TOKENS,
    WIDTH,
    Stack,
    assert_same,
    assert_same_state,
    fp8_state,
    seeded,
    snapshot,
    train,
)

MOST_RECENT = DelayedScaling(amax_compute_algo="most_recent", amax_history_len=1)
RECIPES = pytest.mark.parametrize("recipe", [SHORT, MOST_RECENT], ids=["max", "most_recent"])


# ---- resume ------------------------------------------------------------------------------------------------


@RECIPES
@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_resume_is_the_uninterrupted_run(recipe: Any, ran_before: bool, assign: bool) -> None:
    model = seeded(Stack)
    train(model, recipe=recipe, seed=1)
    other = seeded(Stack, seed=9)
    if ran_before:
        train(other, recipe=recipe, seed=10)
    result = other.load_state_dict(by_torch_save(model.state_dict(), weights_only=True), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert_same(train(model, recipe=recipe, seed=2), train(other, recipe=recipe, seed=2))


@pytest.mark.parametrize(("old", "new"), [(4, 9), (9, 4), (5, 5), (4, 1), (1, 4)])
def test_another_history_length_after_resume(old: int, new: int) -> None:
    """It acts as if the length had been changed in the running model; scales continue unchanged."""
    recipes = [DelayedScaling(amax_history_len=length) for length in (old, new)]
    model = seeded(Stack)
    train(model, steps=2, recipe=recipes[0], seed=1)
    other = seeded(Stack, seed=9)
    other.load_state_dict(by_torch_save(model.state_dict(), weights_only=True))
    assert_same(train(model, recipe=recipes[1], seed=2), train(other, recipe=recipes[1], seed=2))
    assert other.head.fp8_forward_amax_history.shape == (new, 2)


def test_what_was_loaded_is_not_judged_by_the_recipe_before() -> None:
    """The model has run with another margin and format, which the checkpoint does not record."""
    recipe = DelayedScaling(margin=3, amax_history_len=4, fp8_format=Format.E4M3)
    model, other = seeded(Stack), seeded(Stack, seed=9)
    # The largest update is the oldest one, which the history forgets.
    train(model, steps=1, microbatches=1, recipe=recipe, factor=100.0)
    train(model, steps=1, microbatches=3, recipe=recipe)
    train(other, seed=10)
    other.load_state_dict(by_torch_save(model.state_dict(), weights_only=True))
    assert_same(train(model, recipe=recipe, seed=2), train(other, recipe=recipe, seed=2))


def test_a_state_that_was_loaded_is_saved_unchanged_before_it_is_used() -> None:
    model, other = seeded(Stack), seeded(Stack, seed=9)
    train(model)
    other.load_state_dict(model.state_dict())
    assert_same_state(snapshot(model), snapshot(other))


def test_keys_are_ordinary_tensors() -> None:
    model = seeded(Stack)
    names = set(model.state_dict())
    train(model)
    state = model.state_dict()
    added = {
        f"{layer}.fp8_{direction}_{what}"
        for layer in [f"blocks.{i}.{part}" for i in (0, 1) for part in ("up", "down", "mlp")] + ["head"]
        for direction in ("forward", "backward")
        for what in ("scale", "amax_history")
    }
    assert set(state) == names | added
    for key in added:
        maps = 2 if "mlp" in key else 1
        n = maps * (2 if "forward" in key else 1)
        assert state[key].dtype == torch.float32 and not state[key].requires_grad
        assert state[key].shape == ((n,) if key.endswith("scale") else (4, n))


def test_a_saved_layer_is_no_larger_than_its_tensors() -> None:
    """Scales of a model are adjacent in memory, and torch.save writes whole storages."""
    model = seeded(partial(Stack, blocks=4))
    train(model, steps=1, recipe=DelayedScaling(amax_history_len=256))
    state = model.blocks[0].down.state_dict()
    for key, tensor in state.items():
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes, key


def test_what_was_recorded_since_the_last_update_is_saved_too() -> None:
    """The checkpoint is written inside a region."""
    layer, other = Linear(WIDTH, FFN), Linear(WIDTH, FFN)
    with autocast(recipe=SHORT):
        layer(torch.full((TOKENS, WIDTH), 50.0))
        state = copy.deepcopy(layer.state_dict())
    other.load_state_dict(state)
    with autocast(recipe=SHORT):
        other(torch.ones(TOKENS, WIDTH))
    assert other.fp8_forward_amax_history[-1, 0] == 50


def test_what_is_in_a_state_dict_does_not_change_any_more() -> None:
    """An asynchronous checkpoint writes it while training continues."""
    model = seeded(Stack)
    train(model)
    state = fp8_state(model)
    held = {key: value for key, value in model.state_dict().items() if key in state}
    train(model, seed=4)
    assert_same_state(held, state)
    assert not torch.equal(
        fp8_state(model)["head.fp8_forward_amax_history"], state["head.fp8_forward_amax_history"]
    )


# ---- with and without --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_fp8_state(strict: bool) -> None:
    plain = seeded(Stack, seed=3)
    for model in (seeded(Stack), train_and_return(seeded(Stack))):
        result = model.load_state_dict(plain.state_dict(), strict=strict)
        assert result.missing_keys == result.unexpected_keys == []
        assert torch.equal(model.head.weight, plain.head.weight)
        train(model)


def train_and_return(model: nn.Module) -> nn.Module:
    train(model)
    return model


def test_a_checkpoint_with_fp8_state_into_plain_layers() -> None:
    """It loads into ours without FP8, and the parameters into nn.Linear."""
    model, other = seeded(Stack), seeded(Stack, seed=9)
    train(model)
    other.load_state_dict(model.state_dict())
    x = torch.randn(TOKENS, WIDTH)
    assert torch.equal(model(x), other(x))
    linear = nn.Linear(WIDTH, WIDTH)
    result = linear.load_state_dict(model.head.state_dict(), strict=False)
    assert result.missing_keys == [] and all("fp8" in key for key in result.unexpected_keys)
    assert torch.equal(linear.weight, model.head.weight)


@pytest.mark.parametrize("layer_type", [Linear, LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("ran_before", [False, True])
def test_transformer_engines_extra_state_is_not_read(layer_type: type, ran_before: bool) -> None:
    model = nn.Sequential(layer_type(WIDTH, WIDTH))
    if ran_before:
        with autocast(recipe=SHORT):
            model(torch.randn(TOKENS, WIDTH))
    for extra in (torch.zeros(17, dtype=torch.uint8), io.BytesIO(b"pickled"), None):
        state = {k: v for k, v in model.state_dict().items() if "fp8" not in k}
        state["0._extra_state"] = extra
        result = model.load_state_dict(state)
        assert result.missing_keys == result.unexpected_keys == []


def test_a_checkpoint_of_transformer_engines_layer() -> None:
    """Its norms and attention have such state, too; the layer itself and its attention have none."""
    model = nn.Sequential(TransformerLayer(32, 64, 4, qk_norm_type="RMSNorm"), LayerNorm(32), RMSNorm(32))
    model.append(L2Normalization(32))
    state, names = model.state_dict(), [name for name, module in model.named_modules() if name]
    for name in names:
        if not isinstance(model.get_submodule(name), TransformerLayer | MultiheadAttention):
            state[f"{name}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    assert len(state) == len(model.state_dict()) + len(names) - 2
    assert {f"0.self_attention.{part}._extra_state" for part in ("q_norm", "core_attention")} <= state.keys()
    result = model.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []


def test_other_keys_are_still_reported() -> None:
    layer = Linear(WIDTH, FFN)
    state = layer.state_dict()
    state["fp8_sideways_scale"] = torch.ones(2)
    del state["bias"]
    result = layer.load_state_dict(state, strict=False)
    assert result.missing_keys == ["bias"] and result.unexpected_keys == ["fp8_sideways_scale"]
    with pytest.raises(RuntimeError, match="fp8_sideways_scale"):
        layer.load_state_dict(state)


def test_state_of_another_kind_of_layer_is_refused() -> None:
    mlp, linear = LayerNormMLP(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
    with autocast(recipe=SHORT):
        mlp(torch.randn(TOKENS, WIDTH))
    state = linear.state_dict()
    state.update((k, v) for k, v in mlp.state_dict().items() if "fp8" in k)

    def load_and_run() -> None:
        linear.load_state_dict(state)
        with autocast(recipe=SHORT):
            linear(torch.randn(TOKENS, WIDTH))

    with pytest.raises((RuntimeError, ValueError), match="fp8_forward_scale"):
        load_and_run()


# ---- copies ------------------------------------------------------------------------------------------------


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])


class Pair(nn.Module):
    """A picklable module, unlike one with a local function."""

    def __init__(self) -> None:
        super().__init__()
        self.down = LayerNormLinear(WIDTH, FFN)
        self.up = Linear(FFN, WIDTH)
        self.mlp = LayerNormMLP(WIDTH, FFN)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        first = is_first_microbatch
        x = self.up(self.down(x, is_first_microbatch=first), is_first_microbatch=first)
        return self.mlp(x, is_first_microbatch=first)


@COPIES
@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "used"])
def test_a_copy_trains_like_the_original(copied: Callable[..., nn.Module], ran_before: bool) -> None:
    model = seeded(Pair)
    if ran_before:
        train(model, seed=1, caches=True)
    other = copied(model)
    assert_same_state(snapshot(model), snapshot(other))
    assert_same(train(model, seed=2), train(other, seed=2))


@COPIES
def test_a_copy_is_independent(copied: Callable[..., nn.Module]) -> None:
    """Copies are trained in turns, and alone for comparison; a cached weight is not shared either."""
    model, alone = seeded(Pair), seeded(Pair)
    train(model, seed=1, caches=True)
    train(alone, seed=1, caches=True)
    other = copied(model)
    with autocast(recipe=SHORT), pytest.raises(RuntimeError, match="is_first_microbatch"):
        other.up(torch.randn(TOKENS, FFN), is_first_microbatch=False)
    before = snapshot(model)
    train(other, seed=2)
    assert_same_state(snapshot(model), before)
    changed = snapshot(other)
    assert_same(train(model, seed=3, caches=True), train(alone, seed=3, caches=True))
    assert_same_state(snapshot(other), changed)


def test_a_copy_between_forward_and_backward() -> None:
    model = seeded(Pair)
    train(model)
    with autocast(recipe=SHORT):
        out = model(torch.randn(TOKENS, WIDTH))
    other = copy.deepcopy(model)
    before = snapshot(other)
    out.sum().backward()
    assert_same_state(snapshot(other), before)


# ---- casts and moves ---------------------------------------------------------------------------------------


CASTS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double-and-back": lambda model: model.double().float(),
    "to-dtype": lambda model: model.to(torch.bfloat16),
    "to-device-and-dtype": lambda model: model.to("cpu", torch.float16),
    "to-tensor": lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda model: model.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("loads", [False, True], ids=["ran", "loaded"])
def test_scales_stay_fp32_when_a_model_is_cast(cast: Any, loads: bool) -> None:
    model = seeded(Pair)
    train(model)
    if loads:
        fresh = seeded(Pair)
        fresh.load_state_dict(model.state_dict())
        model = fresh
    before = fp8_state(model)
    cast(model)
    after = fp8_state(model)
    assert {value.dtype for value in after.values()} == {torch.float32}
    assert_same_state(after, before)
    dtype = model.up.weight.dtype
    for _ in range(2):
        with autocast(recipe=SHORT):
            out = model(torch.randn(TOKENS, WIDTH, dtype=dtype))
        out.sum().backward()
    assert out.dtype == model.up.weight.grad.dtype == dtype and out.isfinite().all()
    assert {value.dtype for value in fp8_state(model).values()} == {torch.float32}


def test_a_cast_between_steps_goes_on_with_the_scales() -> None:
    """Through bf16 and back, weights lose bits; scales and histories do not."""
    model = seeded(Pair)
    train(model)
    model.bfloat16().float()
    other = seeded(Pair, seed=9)
    other.load_state_dict(snapshot(model))
    assert_same(train(model, seed=2), train(other, seed=2))


def test_buffers_are_listed_once_and_are_no_parameters() -> None:
    model = seeded(Pair)
    train(model)
    names = [name for name, _ in model.named_buffers()]
    assert len(names) == 12 and all(".fp8_" in name for name in names)
    assert not any("fp8" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("assign", [False, True])
def test_meta_device(assign: bool) -> None:
    with torch.device("meta"):
        model = Pair()
    assert all(p.is_meta for p in model.parameters())
    state = train_and_return(seeded(Pair)).state_dict()
    if not assign:
        model.to_empty(device="cpu")
        for module in model.children():
            module.reset_parameters()
        assert all(p.isfinite().all() for p in model.parameters())
    model.load_state_dict(copy.deepcopy(state), assign=assign)
    other = seeded(Pair)
    other.load_state_dict(state)
    assert_same(train(model), train(other))
