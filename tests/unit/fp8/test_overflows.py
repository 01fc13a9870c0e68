"""Counts of saturated and non-finite amaxes, by layer and tensor."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, fp8, shard
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Overflows, autocast, count_overflows
from flatfsdp.fp8 import overflows as overflows_module
from flatfsdp.fp8.casts import stateless_casts
from flatfsdp.kernels.cast.scaling import current_scales
from flatfsdp.layers import LayerNormMLP, Linear
from tests.support.fp8_layers import (
    FFN,
    FP8_RECIPES,
    SHORT,
    TOKENS,
    WIDTH,
    Block,
    Stack,
    assert_same,
    counted_updates,
    seeded,
    train,
)

STATELESS = pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["current", "block"])


def step(layer: nn.Module, recipe: Any, x: Tensor, dy: float = 1.0) -> Tensor:
    with autocast(recipe=recipe):
        out = layer(x.requires_grad_())
    out.backward(torch.full_like(out, dy))
    return out.detach()


def steady() -> Tensor:
    """The same numbers each time, so that no amax grows."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def counts(amaxes: int, saturated: int = 0, infinite: int = 0, nan: int = 0) -> dict[str, int]:
    return {"amaxes": amaxes, "saturated": saturated, "infinite": infinite, "nan": nan}


def clean(overflows: Overflows) -> bool:
    """Whether something was counted, and nothing overflowed."""
    amaxes, *others = overflows.totals().values()
    return amaxes > 0 and not any(others)


# ---- what counts -------------------------------------------------------------------------------------------


@FP8_RECIPES
def test_an_infinite_input_that_the_output_hides(recipe: Any) -> None:
    layer = Linear(WIDTH, FFN)
    step(layer, recipe, steady())
    with count_overflows(layer) as overflows:
        step(layer, recipe, steady())
        x = steady()
        x[3, 4] = -math.inf
        assert step(layer, recipe, x).isfinite().all()
    assert overflows.table() == {
        "": {"input": counts(2, saturated=1, infinite=1), "weight": counts(2), "grad_output": counts(2)}
    }
    assert overflows.totals() == counts(6, saturated=1, infinite=1)


@FP8_RECIPES
def test_nan_and_infinity_in_a_gradient(recipe: Any) -> None:
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer) as overflows:
        for dy in (1.0, math.nan, math.inf):
            step(layer, recipe, steady(), dy)
    assert overflows.table()[""]["grad_output"] == counts(3, saturated=1, infinite=1, nan=1)
    assert overflows.table()[""]["input"] == counts(3)


@FP8_RECIPES
def test_a_jump_in_magnitude_saturates_under_delayed_scaling_alone(recipe: Any) -> None:
    layer = Linear(WIDTH, FFN)
    for _ in range(2):
        step(layer, recipe, steady())
    with count_overflows(layer) as overflows:
        for factor in (1.0, 1e4, 1e4):
            step(layer, recipe, factor * steady(), factor)
    jumps = int(recipe is SHORT)
    assert overflows.table()[""] == {
        "input": counts(3, saturated=jumps),
        "weight": counts(3),
        "grad_output": counts(3, saturated=jumps),
    }


@FP8_RECIPES
def test_ordinary_training_is_clean(recipe: Any) -> None:
    model = seeded(Stack)
    for _ in range(2):
        step(model, recipe, steady())
    with count_overflows(model) as overflows:
        for _ in range(3):
            step(model, recipe, steady())
    assert clean(overflows)
    assert overflows.totals() == counts(3 * 3 * 9)


def test_amaxes_enter_with_the_scale_of_their_casts() -> None:
    """Scales are powers of two, so that amax * scale is exact."""
    layer, expected = Linear(WIDTH, FFN), 0
    with count_overflows(layer) as overflows:
        for amax in (1.0, 700.0, 3.0, 1e-3, 0.5, 0.0, 900.0, 900.0, 1e6, 1.0):
            scale = layer.fp8_forward_scale[0].item() if hasattr(layer, "fp8_forward_scale") else 1.0
            expected += amax * scale > 448
            step(layer, SHORT, torch.full((TOKENS, WIDTH), amax))
    assert overflows.table()[""]["input"] == counts(9, saturated=expected) and 2 <= expected <= 5


def test_edges_of_a_scale() -> None:
    layer = Linear(WIDTH, FFN)
    step(layer, SHORT, steady())
    scaling = layer._scalings["forward"]
    scaling.arena.scale.fill_(2.0)
    amaxes = (0.0, 1.0, 224.0, 224.00002, 1e30, math.inf, math.nan, 2.0**-149)
    with count_overflows(layer) as overflows:
        for amax in amaxes:
            scaling.arena.history[0].fill_(amax)
            overflows.before_update(scaling.arena)
    assert overflows.table()[""]["weight"] == counts(7, saturated=3, infinite=1, nan=1)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_scale_of_an_amax_is_never_too_large_for_it(power_of_two: bool) -> None:
    """This includes rounding: amax * scale is above 448 for many of these."""
    layer = Linear(WIDTH, FFN)
    step(layer, SHORT, steady())
    arena = layer._scalings["forward"].arena
    with count_overflows(layer) as overflows:
        for amax in torch.rand(300) * 10.0 ** torch.randint(-30, 30, (300,)):
            arena.history[0].fill_(amax)
            arena.scale.copy_(
                current_scales(arena.history[0], arena.fp8_max, power_of_two=power_of_two).scale
            )
            overflows.before_update(arena)
        before = overflows.totals()
        arena.history[0].mul_(2.0001)
        overflows.before_update(arena)
    assert before == counts(600) and overflows.totals() == counts(602, saturated=2)


def test_all_casts_of_a_region_are_one_amax_with_delayed_scaling() -> None:
    for recipe, expected in ((SHORT, 1), (CurrentScaling(), 3)):
        layer = Linear(WIDTH, FFN)
        with count_overflows(layer) as overflows:
            with autocast(recipe=recipe):
                for _ in range(3):
                    with autocast(recipe=recipe):
                        layer(steady())
        assert overflows.table()[""] == {"input": counts(expected), "weight": counts(expected)}


@FP8_RECIPES
def test_a_weight_of_an_earlier_microbatch_is_not_counted_again(recipe: Any) -> None:
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer) as overflows:
        for first in (True, False, False):
            with autocast(recipe=recipe):
                layer(steady(), is_first_microbatch=first)
    assert overflows.table()[""] == {"input": counts(3), "weight": counts(1)}


def test_evaluation() -> None:
    for recipe, expected in (
        (SHORT, {}),
        (CurrentScaling(), {"": dict.fromkeys(("input", "weight"), counts(1))}),
    ):
        layer = Linear(WIDTH, FFN)
        with count_overflows(layer) as overflows, torch.inference_mode(), autocast(recipe=recipe):
            layer(steady())
        assert overflows.table() == expected


def test_a_forward_that_fails_records_nothing() -> None:
    layer = nn.Sequential(Linear(WIDTH, FFN), Linear(WIDTH, FFN))
    with count_overflows(layer) as overflows:
        with pytest.raises(ValueError, match="last dimension"), autocast(recipe=SHORT):
            layer(torch.full((TOKENS, WIDTH), math.inf))
    assert overflows.table() == {}


# ---- recompute ---------------------------------------------------------------------------------------------


REENTRANT = partial(fp8.checkpoint, use_reentrant=True)


@FP8_RECIPES
@pytest.mark.parametrize(
    "options",
    [
        *({"call": fp8.checkpoint}, {"call": REENTRANT}, {"checkpoint": True}),
        {"call": fp8.checkpoint, "checkpoint": True},
    ],
    ids=["checkpoint", "reentrant", "mlp", "both"],
)
def test_recompute_counts_nothing_twice(options: dict[str, Any], recipe: Any) -> None:
    tables = []
    for each in ({}, options):
        model = seeded(partial(Stack, **each))
        with count_overflows(model) as overflows:
            for factor in (1.0, 1e4):
                x = factor * steady()
                x[0, 0] = math.inf if factor > 1 else factor
                step(model, recipe, x, factor)
        tables.append(overflows.table())
    assert tables[0] == tables[1] and set(tables[0]) > {"head", "blocks.0.mlp"}


# ---- which layers ------------------------------------------------------------------------------------------


@FP8_RECIPES
def test_names_are_those_before_wrapping(recipe: Any) -> None:
    tables = []
    for wraps in (False, True):
        model = seeded(Stack)
        if wraps:
            model = shard(model, by_class(Block, Linear))
        with count_overflows(model) as overflows:
            step(model, recipe, steady())
        tables.append(overflows.table())
    names = {name for name, module in seeded(Stack).named_modules() if hasattr(module, "linear_maps")}
    assert tables[0] == tables[1] and set(tables[0]) == names
    tensors = {f"{name}_{kind}" for name in ("fc1", "fc2") for kind in ("input", "weight", "grad_output")}
    assert set(tables[0]["blocks.1.mlp"]) == tensors
    assert set(tables[0]["head"]) == {"input", "weight", "grad_output"}


@pytest.mark.parametrize("recipe", [SHORT, CurrentScaling()], ids=["delayed", "current"])
def test_weights_that_are_kept_in_fp8_are_not_counted(recipe: Any) -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    model = shard(nn.Sequential(Linear(WIDTH, FFN), Linear(FFN, WIDTH)), precision=precision)
    with count_overflows(model) as overflows:
        step(model, recipe, steady().bfloat16())
    of_each = {"input": counts(1), "grad_output": counts(1)}
    assert overflows.table() == {"0": of_each, "1": of_each}


def test_a_part_of_a_model_and_several_counts() -> None:
    model = seeded(Stack)
    step(model, SHORT, steady())
    with count_overflows(model) as whole:
        step(model, SHORT, steady())
        with count_overflows(model.blocks[1]) as part, count_overflows(model) as again:
            step(model, SHORT, steady())
        step(model, SHORT, steady())
    assert whole.totals() == counts(3 * 27) and again.totals() == counts(27)
    assert part.table() == {
        name.removeprefix("blocks.1."): of_layer
        for name, of_layer in again.table().items()
        if name.startswith("blocks.1.")
    }


@FP8_RECIPES
def test_a_copy_is_not_counted(recipe: Any) -> None:
    model = seeded(Stack)
    step(model, recipe, steady())
    with count_overflows(model) as overflows:
        copied = copy.deepcopy(model)
        step(copied, recipe, torch.full((TOKENS, WIDTH), math.inf))
        assert overflows.table() == {}
        with count_overflows(copied) as of_copy:
            step(copied, recipe, steady())
        step(model, recipe, steady())
    assert overflows.table().keys() == of_copy.table().keys()
    assert overflows.totals()["amaxes"] == 27


def test_arenas_that_are_made_and_merged_while_counting() -> None:
    """Layers in several regions, one of which is not counted."""
    trunk, first, second = (seeded(lambda: Linear(WIDTH, WIDTH), seed) for seed in range(3))
    with count_overflows(nn.ModuleList([trunk, first])) as overflows:
        for factor in (1.0, 1.0, 1e4):
            for head in (first, second):
                with autocast(recipe=SHORT):
                    out = head(trunk(torch.full((TOKENS, WIDTH), factor)))
                out.sum().backward()
        assert trunk._scalings["forward"].arena is second._scalings["forward"].arena
    table = overflows.table()
    assert set(table) == {"0", "1"}
    assert table["0"]["input"] == counts(6, saturated=1)
    assert table["1"]["input"] == counts(3, saturated=1)


def test_buffers_that_are_replaced_while_counting() -> None:
    """Buffers are replaced by another recipe, a move and a checkpoint."""
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer) as overflows:
        step(layer, SHORT, steady())
        step(layer, DelayedScaling(amax_history_len=7), steady())
        layer.to(torch.bfloat16)
        step(layer, SHORT, steady().bfloat16())
        layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        step(layer, SHORT, steady().bfloat16())
    assert overflows.table()[""] == dict.fromkeys(("input", "weight", "grad_output"), counts(4))


def test_a_layer_under_two_names_has_the_first() -> None:
    layer = Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"one": layer, "two": layer})
    with count_overflows(model) as overflows:
        step(layer, SHORT, steady())
    assert set(overflows.table()) == {"one"}


# ---- beginning and end -------------------------------------------------------------------------------------


@FP8_RECIPES
def test_counting_changes_no_bit(recipe: Any) -> None:
    model, plain = seeded(Stack), seeded(Stack)
    with count_overflows(model) as overflows:
        ours = train(model, recipe=recipe)
    assert_same(ours, train(plain, recipe=recipe))
    assert overflows.totals()["amaxes"] > 0


def test_an_update_of_a_whole_model_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = seeded(Stack), []
    add = Overflows._add
    monkeypatch.setattr(Overflows, "_add", lambda *args: (calls.append(args), add(*args)))
    with count_overflows(model), counted_updates() as updates:
        for _ in range(2):
            step(model, SHORT, steady())
    assert [amax.numel() for *_, amax, _ in calls] == updates and len(updates) == 4


@FP8_RECIPES
def test_nothing_is_left_behind(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Stack)
    with count_overflows(model) as overflows:
        step(model, recipe, steady())
    before = overflows.table()
    monkeypatch.setattr(Overflows, "_add", None)
    with counted_updates() as updates:
        step(model, recipe, steady())
    assert len(updates) == (2 if recipe is SHORT else 0)
    assert overflows.table() == before
    for layer in (model.head, model.blocks[0].mlp):
        assert layer.overflow_counters == ()
        assert not any(scaling.arena.observers for scaling in layer._scalings.values())


def test_an_error_ends_it() -> None:
    layer = Linear(WIDTH, FFN)
    step(layer, SHORT, steady())
    with pytest.raises(ValueError, match="last dimension"), count_overflows(layer):
        step(layer, SHORT, torch.zeros(TOKENS, FFN))
    assert layer.overflow_counters == () and not layer._scalings["forward"].arena.observers


def test_an_arena_that_a_counted_layer_has_left_is_left_too() -> None:
    """Another recipe gives one layer its own arena, and the other one stays in theirs."""
    counted, other = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
    with count_overflows(counted):
        step(nn.Sequential(counted, other), SHORT, steady())
        step(counted, DelayedScaling(amax_history_len=7), steady())
        assert other._scalings["forward"].arena.observers
    assert not any(scaling.arena.observers for scaling in other._scalings.values())


@STATELESS
def test_casts_are_the_usual_ones_while_nobody_counts(recipe: Any) -> None:
    layer = LayerNormMLP(WIDTH, FFN)
    with autocast(recipe=recipe):
        usual = stateless_casts(recipe)
        assert all(casts is usual for casts in layer.casts(torch.device("cpu")))
        with count_overflows(layer):
            assert not any(casts is usual for casts in layer.casts(torch.device("cpu")))
        assert all(casts is usual for casts in layer.casts(torch.device("cpu")))


@FP8_RECIPES
def test_a_backward_after_the_end_is_not_counted(recipe: Any) -> None:
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer) as overflows:
        with autocast(recipe=recipe):
            out = layer(steady())
    out.sum().backward()
    assert set(overflows.table()[""]) == {"input", "weight"}


@STATELESS
def test_a_captured_cast_is_refused(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the capture of a CUDA graph."""
    monkeypatch.setattr(overflows_module, "is_captured", lambda device: True)
    layer = Linear(WIDTH, FFN)
    with count_overflows(layer), pytest.raises(RuntimeError, match=r"CUDA graph.*count_overflows"):
        step(layer, recipe, steady())
    step(layer, recipe, steady())


def test_the_text() -> None:
    model = nn.Sequential(Linear(WIDTH, FFN), nn.ReLU(), LayerNormMLP(FFN, WIDTH))
    with count_overflows(model) as overflows:
        assert str(overflows) == "FP8 overflows: of 0 amaxes 0 saturated, 0 infinite, 0 NaN"
        step(model, SHORT, torch.full((TOKENS, WIDTH), math.inf))
        step(model, SHORT, steady(), math.nan)
    title, header, *rows = str(overflows).splitlines()
    totals = overflows.totals()
    assert title == (
        f"FP8 overflows: of 18 amaxes {totals['saturated']} saturated, {totals['infinite']} infinite, "
        f"{totals['nan']} NaN"
    )
    assert header.split() == ["layer", "tensor", "amaxes", "saturated", "infinite", "nan"]
    assert rows[0].split() == ["0", "input", "2", "1", "1", "0"]
    assert len({len(row) for row in (header, *rows)}) == 1
