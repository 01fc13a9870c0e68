"""Recompute is bit-equal to no recompute, and leaves the same scales and histories behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from flatfsdp import fp8
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import DotProductAttention, LayerNormMLP, Linear
from tests.support.assertions import assert_equal
from tests.support.fp8_layers import (
    FFN,
    SHORT,
    TOKENS,
    WIDTH,
    Stack,
    Trace,
    assert_same,
    assert_same_state,
    counted_updates,
    fp8_state,
    seeded,
    snapshot,
    train,
)

Call = Callable[..., Tensor]


def plain(block: nn.Module, *args: Any) -> Tensor:
    return block(*args)


checkpointed = fp8.checkpoint
reentrant = partial(fp8.checkpoint, use_reentrant=True)
torchs = partial(torch_checkpoint, use_reentrant=False)
torchs_reentrant = partial(torch_checkpoint, use_reentrant=True)


def selective(block: nn.Module, *args: Any) -> Tensor:
    """A selective checkpoint that asks to keep results of GEMMs, and of our operators."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = "mm" in str(operator) or "flatfsdp" in str(operator)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    kept = partial(create_selective_checkpoint_contexts, policy)
    return torch_checkpoint(block, *args, use_reentrant=False, context_fn=kept)


def whole(call: Call, block: nn.Module, *args: Any, recipe: Any = None) -> Tensor:
    """A block in one checkpoint; with a recipe, autocast is inside it."""

    def run(*args: Any) -> Tensor:
        with autocast(recipe=recipe):
            return block(*args)

    return call(block if recipe is None else run, *args)


def nested(outer: Call, inner: Call, block: nn.Module, *args: Any, recipe: Any = None) -> Tensor:
    """A block in one checkpoint, with its MLP in another one inside."""

    def run(x: Tensor, first: bool | None) -> Tensor:
        with autocast(recipe=recipe) if recipe is not None else nullcontext():
            x = x + block.down(block.up(x, is_first_microbatch=first), is_first_microbatch=first)
            return x + inner(block.mlp, x, first)

    return outer(run, *args)


WAYS = {
    "checkpoint": partial(whole, checkpointed),
    "reentrant": partial(whole, reentrant),
    "nested": partial(nested, checkpointed, checkpointed),
    "reentrant-inside": partial(nested, checkpointed, reentrant),
    "reentrant-outside": partial(nested, reentrant, checkpointed),
    "reentrant-twice": partial(nested, reentrant, reentrant),
    "torch": partial(whole, torchs),
    "torch-reentrant": partial(whole, torchs_reentrant),
    "torch-selective": partial(whole, selective),
    "torch-nested": partial(nested, torchs, torchs),
    "torch-reentrant-outside": partial(nested, torchs_reentrant, torchs),
    "torch-inside-ours": partial(nested, checkpointed, torchs),
    "torch-reentrant-around-ours": partial(nested, torchs_reentrant, checkpointed),
}
RECIPES = {
    "delayed": SHORT,
    "most_recent": DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", margin=1),
    "current": CurrentScaling(),
    "block": BlockScaling(),
    "high": None,
}


@cache
def without_recompute(recipe: str, *, caches: bool, is_inside: bool = False) -> Trace:
    """The training that all ways of recompute are compared with."""
    call = partial(whole, plain, recipe=RECIPES[recipe]) if is_inside else plain
    return train(
        seeded(partial(Stack, call=call)), recipe=None if is_inside else RECIPES[recipe], caches=caches
    )


@pytest.mark.parametrize(
    ("recipe", "caches"),
    [*((recipe, False) for recipe in RECIPES), ("delayed", True)],
    ids=[*RECIPES, "cached-weights"],
)
@pytest.mark.parametrize("way", WAYS)
def test_autocast_outside(way: str, recipe: str, caches: bool) -> None:
    found = train(seeded(partial(Stack, call=WAYS[way])), recipe=RECIPES[recipe], caches=caches)
    assert_same(without_recompute(recipe, caches=caches), found)


@pytest.mark.parametrize(
    ("recipe", "caches"),
    [("delayed", False), ("current", False), ("block", False), ("delayed", True)],
    ids=["delayed", "current", "block", "cached-weights"],
)
@pytest.mark.parametrize("way", WAYS)
def test_autocast_inside(way: str, recipe: str, caches: bool) -> None:
    call = partial(WAYS[way], recipe=RECIPES[recipe])
    found = train(seeded(partial(Stack, call=call)), recipe=None, caches=caches)
    assert ("blocks.0.up.fp8_forward_scale" in found.state) == (recipe == "delayed")
    assert_same(without_recompute(recipe, caches=caches, is_inside=True), found)


@pytest.mark.parametrize("caches", [False, True], ids=["", "cached-weights"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("call", [plain, checkpointed, reentrant])
def test_mlp_that_saves_only_its_input(call: Call, recipe: str, caches: bool) -> None:
    found = train(seeded(partial(Stack, call=call, checkpoint=True)), recipe=RECIPES[recipe], caches=caches)
    assert_same(without_recompute(recipe, caches=caches), found)


@pytest.mark.parametrize("activation", ["gelu", "geglu", "relu"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("frozen", ["", "fc1_weight", "fc2_weight", "fc1_bias", "layer_norm_weight"])
def test_mlp_that_saves_only_its_input_by_itself(activation: str, normalization: str, frozen: str) -> None:
    options = {"activation": activation, "normalization": normalization, "return_layernorm_output": True}
    grads = []
    for saves in (False, True):
        layer = seeded(partial(LayerNormMLP, WIDTH, FFN, checkpoint=saves, **options))
        x, dy = torch.randn(2, TOKENS, WIDTH).requires_grad_(), torch.randn(2, TOKENS, WIDTH)
        if frozen:
            getattr(layer, frozen).requires_grad_(False)
        for _ in range(2):
            with autocast(recipe=SHORT):
                out, normalized = layer(x)
            (out * dy).sum().backward(retain_graph=True)
            (normalized * dy).sum().backward()
        grads.append([out, normalized, x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
        assert len(grads[-1]) == 3 + len(list(layer.parameters())) - bool(frozen)
    assert_equal(*grads)


# ---- schedules ---------------------------------------------------------------------------------------------


@cache
def pipelined(call: Call, *, caches: bool, order: tuple[int, ...]) -> Trace:
    """Two forwards before their backwards, three steps; activations grow, so that scales change."""
    model = seeded(lambda: Stack(call=call))
    torch.manual_seed(5)
    losses, grads = [], []
    for step in range(3):
        pending = []
        for microbatch in range(2):
            x = torch.randn(TOKENS, WIDTH).mul_(4.0 ** (step + microbatch)).requires_grad_()
            with autocast(recipe=SHORT):
                out = model(x, microbatch == 0 if caches else None)
            pending.append((x, out.square().mean()))
        for index in order:
            x, loss = pending[index]
            loss.backward()
            losses.append(loss.detach())
            grads.append(x.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                grads.append(parameter.grad)
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return Trace(losses, grads, snapshot(model))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["1F1B", "reversed"])
@pytest.mark.parametrize("caches", [False, True], ids=["", "cached-weights"])
@pytest.mark.parametrize("way", WAYS)
def test_forwards_run_ahead_of_backwards(way: str, caches: bool, order: tuple[int, int]) -> None:
    found = pipelined(WAYS[way], caches=caches, order=order)
    assert_same(pipelined(plain, caches=caches, order=order), found)


def test_scales_that_moved_between_forward_and_recompute_do_not_matter() -> None:
    """Scales are updated by forwards alone; an evaluation has other data and a longer history."""
    grads = []
    for disturbed in (False, True):
        model = seeded(lambda: Stack(call=checkpointed))
        x = torch.randn(TOKENS, WIDTH).requires_grad_()
        with autocast(recipe=SHORT):
            out = model(x)
        if disturbed:
            for factor in (100.0, 1e4, 1e-3):
                with autocast(recipe=SHORT):
                    model(torch.randn(TOKENS, WIDTH) * factor)
            with torch.no_grad(), autocast(recipe=DelayedScaling(amax_history_len=8)):
                model(torch.randn(TOKENS, WIDTH) * 100)
        out.square().mean().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
    assert_equal(*grads)


def test_two_backwards_through_one_graph() -> None:
    runs = []
    for call in (plain, checkpointed, torchs, torchs_reentrant):
        model, x = seeded(lambda call=call: Stack(call=call)), torch.randn(TOKENS, WIDTH).requires_grad_()
        with autocast(recipe=SHORT):
            loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        runs.append([x.grad, *(p.grad for p in model.parameters()), *snapshot(model).values()])
    assert_equal(*runs)


def test_a_block_that_is_used_twice() -> None:
    def twice(call: Call) -> Stack:
        model = Stack(call=lambda block, *args: call(block, call(block, *args), *args[1:]))
        return seeded(lambda: model)

    torch.manual_seed(0)
    a = twice(plain)
    others = [twice(checkpointed), twice(torchs)]
    for other in others:
        other.load_state_dict(a.state_dict())
    expected = train(a)
    for other in others:
        assert_same(expected, train(other))


def test_backward_inside_the_region() -> None:
    runs = []
    for call in (plain, checkpointed, reentrant, torchs, torchs_reentrant):
        model = seeded(lambda call=call: Stack(call=call))
        for step in range(3):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with autocast(recipe=SHORT):
                model(x).square().mean().backward()
        runs.append([*snapshot(model).values(), *(p.grad for p in model.parameters())])
    assert_equal(*runs)


def test_backward_inside_the_region_with_another_one_inside_the_checkpoint() -> None:
    states = []
    for call in (plain, checkpointed):
        model = seeded(lambda call=call: Stack(call=partial(whole, call, recipe=SHORT)))
        for _ in range(2):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
            with autocast(recipe=SHORT):
                model(x).square().mean().backward()
        states.append(snapshot(model))
    assert_same_state(*states)


def test_backward_scales_advance_behind_a_recompute() -> None:
    """Transformer Engine had them frozen (issue 1190)."""
    model = seeded(lambda: Stack(call=checkpointed))
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    seen = []
    for factor in (1.0, 64.0):
        with autocast(recipe=SHORT):
            out = model(x)
        out.backward(torch.full_like(out, factor))
        seen.append([v for k, v in fp8_state(model).items() if k.endswith("backward_scale")])
    assert len(seen[0]) == 7
    assert all((after < before).all() for before, after in zip(*seen, strict=True))


def test_updates_are_as_many_as_without_recompute() -> None:
    for call, updates in ((plain, 2), (checkpointed, 2), (WAYS["nested"], 2)):
        model = seeded(lambda call=call: Stack(call=call))
        x = torch.randn(TOKENS, WIDTH).requires_grad_()
        for _ in range(2):
            with counted_updates() as counts:
                with autocast(recipe=SHORT):
                    loss = model(x).sum()
                loss.backward()
            assert len(counts) == updates


@pytest.mark.parametrize("call", [checkpointed, reentrant, torchs, torchs_reentrant])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_with_checkpoints_records_nothing(call: Call, mode: Any) -> None:
    model = seeded(lambda: Stack(call=call))
    train(model, steps=1)
    before = snapshot(model)
    with counted_updates() as counts, mode(), autocast(recipe=SHORT):
        model(torch.randn(TOKENS, WIDTH) * 100)
    assert counts == []
    assert_same_state(snapshot(model), before)


def test_the_weight_is_not_cast_again_if_it_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute after the next step's optimizer would cast another weight."""
    model = seeded(lambda: Stack(call=checkpointed))
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    runs = []
    for spoils in (False, True):
        model.zero_grad()
        x.grad = None
        with autocast(recipe=CurrentScaling()):
            loss = model(x, True).square().mean()
        if spoils:
            weights = [p for n, p in model.blocks.named_parameters() if n.endswith("weight") and p.dim() == 2]
            for weight in weights:
                weight.data = torch.full_like(weight, torch.nan)
        loss.backward()
        runs.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters())])
    assert_equal(*runs)


# ---- what else a checkpoint passes on ----------------------------------------------------------------------


def test_options_keyword_arguments_and_several_results() -> None:
    layer = Linear(WIDTH, FFN)

    def function(x: Tensor, *, factor: float, noise: bool) -> tuple[Tensor, str]:
        x = x + torch.rand_like(x) if noise else x
        return layer(x * factor), "as it is"

    results = []
    for call in (lambda f, *args, **kw: f(*args, **kw), partial(fp8.checkpoint, preserve_rng_state=True)):
        x = torch.ones(TOKENS, WIDTH).requires_grad_()
        torch.manual_seed(3)
        with autocast(recipe=CurrentScaling()):
            out, text = call(function, x, factor=2.0, noise=True)
        assert text == "as it is"
        layer.zero_grad()
        out.square().sum().backward()
        results.append((out, x.grad, layer.weight.grad))
    assert_equal(*results)


def test_an_exception_inside_a_checkpoint_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        layer(x)
        raise KeyError

    layer, other = seeded(lambda: Linear(WIDTH, WIDTH)), seeded(lambda: Linear(WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    with pytest.raises(KeyError), autocast(recipe=SHORT):
        fp8.checkpoint(fail, x)
    for each in (layer, other):
        x.grad = None
        with autocast(recipe=SHORT):
            out = fp8.checkpoint(each, x)
        out.sum().backward()
    assert_same_state(snapshot(layer), snapshot(other))
    assert torch.equal(layer.weight.grad, other.weight.grad)


class Unknown(torch.autograd.Function):
    """Another library's checkpoint: runs its function without gradients, and again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), dy)
        return None, x.grad


@pytest.mark.parametrize("call", [Unknown.apply, torchs_reentrant], ids=["unknown", "eval"])
@pytest.mark.parametrize("inside", [False, True], ids=["autocast-outside", "autocast-inside"])
@pytest.mark.parametrize("layer", [Linear, LayerNormMLP])
def test_a_checkpoint_that_nobody_knows_is_refused(layer: type, inside: bool, call: Any) -> None:
    # In eval mode, the forward of a reentrant checkpoint looks like an evaluation.
    module = layer(WIDTH, FFN).train(call is not torchs_reentrant)
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    if inside:
        out = whole(call, module, x, recipe=SHORT)
    else:
        with autocast(recipe=SHORT):
            out = call(module, x)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint or .* use_reentrant=False"):
        out.sum().backward()


class Tracker:
    """A tracker with its own states, such as Megatron's and Transformer Engine's."""

    def __init__(self) -> None:
        self._states = {"tp": torch.Generator().manual_seed(5).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self._states = dict(states)

    @contextmanager
    def fork(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states["tp"])
        try:
            yield
        finally:
            self._states["tp"] = torch.get_rng_state()
            torch.set_rng_state(outside)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_of_a_tracker_with_states(use_reentrant: bool) -> None:
    """Two blocks, the second of which has drawn before the first is recomputed."""
    call = partial(fp8.checkpoint, use_reentrant=use_reentrant)
    x = torch.randn(8, 2, 2, 8)
    runs = []
    for how in ("plain", "told", "not told", "torch's"):
        tracker = Tracker()
        get: dict[str, Any] = {"get_rng_state_tracker": lambda t=tracker: t}
        blocks = [DotProductAttention(2, 8, attention_dropout=0.5, **get) for _ in range(2)]
        torch.manual_seed(0)
        leaf = out = x.clone().requires_grad_()
        for block in blocks:
            run = lambda x, block=block: block(x, x, x).view_as(x)  # noqa: E731
            if how == "plain":
                out = run(out)
            elif how == "torch's":
                out = torch_checkpoint(run, out, use_reentrant=use_reentrant)
            else:
                out = call(run, out, **(get if how == "told" else {}))
        if how in ("plain", "told"):
            out.square().sum().backward()
            runs.append([out, leaf.grad, tracker.get_states()["tp"]])
            continue
        with pytest.raises(RuntimeError, match=r"a Tracker.*pass it get_rng_state_tracker, too"):
            out.square().sum().backward()
    assert_equal(*runs)


def test_attention_that_is_recomputed_by_itself_keeps_what_it_has_drawn() -> None:
    grads = []
    for recomputes in (False, True):
        tracker = Tracker()
        layer = DotProductAttention(2, 8, attention_dropout=0.5, get_rng_state_tracker=lambda t=tracker: t)
        torch.manual_seed(1)
        x = torch.randn(8, 2, 2, 8, requires_grad=True)
        layer(x, x, x, checkpoint_core_attention=recomputes).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
