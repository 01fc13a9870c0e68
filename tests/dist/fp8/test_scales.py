"""FP8 over ranks: one maximum for all of them, and training that is the same bits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatfsdp import Debug, Precision, by_class, fp8, microbatches, shard
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear, convert
from tests.support.fp8_layers import (
    SHORT,
    WIDTH,
    Block,
    Stack,
    assert_same_state,
    fp8_state,
    seeded,
    snapshot,
)
from tests.support.fp8_training import batch, build, counted_reductions, same_on_all_ranks
from tests.support.meshes import REPLICATED
from tests.support.models import FLAGS, same, update
from tests.support.plain_layers import error
from tests.support.ranks import on_ranks

# ---- reductions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_one_reduction_a_forward_and_one_a_backward(rank: int, recompute: bool) -> None:
    """There is one reduction a forward and one a backward, however many layers; none in an evaluation."""
    model = seeded(partial(Stack, blocks=3, **({"call": fp8.checkpoint} if recompute else {})))
    forward = (torch.Size([3 * 8 + 2]), dist.ReduceOp.MAX)
    backward = (torch.Size([3 * 4 + 1]), dist.ReduceOp.MAX)
    for step in range(4):
        with counted_reductions() as calls:
            with autocast(recipe=SHORT):
                with autocast(recipe=SHORT):
                    out = model(batch(rank, step).requires_grad_())
            after_forward = list(calls)
            out.sum().backward()
        # In the first step ranks also compare their layers.
        assert step == 0 or (after_forward == [forward] and calls == [forward, backward])
    with counted_reductions() as calls:
        with torch.no_grad(), autocast(recipe=SHORT):
            model(batch(rank))
        with autocast(recipe=CurrentScaling()):
            out = model(batch(rank))
        out.sum().backward()
        model(batch(rank)).sum().backward()
    assert calls == []


@pytest.mark.parametrize(
    ("world_size", "value", "expected"),
    [(2, 1000.0, 0.25), (3, 1000.0, 0.25), (2, math.inf, 1.0), (2, math.nan, 1.0)],
)
@on_ranks()
def test_an_outlier_on_the_last_rank_counts_on_all(
    rank: int, world_size: int, value: float, expected: float
) -> None:
    """One number in the input and in the gradient; one of no use keeps the scale as it was."""
    model = nn.Sequential(Linear(WIDTH, WIDTH), LayerNormMLP(WIDTH, WIDTH), Linear(WIDTH, WIDTH))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    for step in range(2):
        x, dy = batch(rank, step), batch(rank, 10 + step)
        if rank == world_size - 1:
            x[3, 4], dy[5, 6] = value, -value
        with autocast(recipe=SHORT):
            out = model(x)
        out.backward(dy)
        state = list(fp8_state(model).values())
        assert len(state) == 12 and same_on_all_ranks(state)
    for history in (model[0].fp8_forward_amax_history, model[2].fp8_backward_amax_history):
        assert str(history[-1, 0].item()) == str(value)
    assert model[0].fp8_forward_scale[0] == expected


@on_ranks(2)
def test_who_shares_scales(rank: int, world_size: int) -> None:
    """Without reduction, and with groups of one rank each."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    alone, grouped, everyone = (seeded(lambda: Linear(WIDTH, WIDTH)) for _ in range(3))
    x = batch(0, scale=16.0**rank)
    with counted_reductions() as calls, autocast(recipe=DelayedScaling(reduce_amax=False)):
        alone(x)
    assert calls == []
    with autocast(recipe=DelayedScaling(), amax_reduction_group=groups[rank]):
        grouped(x)
    with autocast(recipe=DelayedScaling()):
        everyone(x)
    assert torch.equal(alone.fp8_forward_scale, grouped.fp8_forward_scale)
    ratio = alone.fp8_forward_scale / everyone.fp8_forward_scale
    assert ratio.tolist() == [16.0 ** (world_size - 1 - rank), 1.0]


L, MLP = Linear, LayerNormMLP


@pytest.mark.parametrize(
    "layers", [([L, L], [L, L, L]), ([L], [L, L]), ([L, L], [L]), ([MLP, L], [L, MLP]), ([MLP, L], [L, L])]
)
@on_ranks(2, timeout=60.0)
def test_ranks_with_other_layers_raise_on_all_ranks(rank: int, layers: Any) -> None:
    model = nn.Sequential(*(kind(WIDTH, WIDTH) for kind in layers[rank]))
    with pytest.raises(RuntimeError, match="not the same on all ranks"), autocast(recipe=SHORT):
        model(batch(rank))


@on_ranks(2)
def test_ranks_with_other_recipes_raise_on_all_ranks(rank: int) -> None:
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4, margin=rank)
    with pytest.raises(RuntimeError, match=r"margin=0.*margin=1"), autocast(recipe=recipe):
        Linear(WIDTH, WIDTH)(batch(rank))


@on_ranks(2)
def test_a_rank_without_tokens(rank: int) -> None:
    """A rank without tokens takes part, too."""
    model = seeded(lambda: nn.Sequential(Linear(WIDTH, WIDTH), LayerNormMLP(WIDTH, WIDTH)))
    for step in range(3):
        x = batch(rank, step)[: 0 if rank == 0 else None].requires_grad_()
        with autocast(recipe=SHORT):
            out = model(x)
        out.sum().backward()
        assert same_on_all_ranks(list(fp8_state(model).values()))
    assert all((value[2:] > 0).all() for key, value in fp8_state(model).items() if "history" in key)


# ---- FlatFSDP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        REPLICATED,
        {"flag": False},
        {"debug": Debug(poison_on_free=True)},
    ],
    ids=["zero3", "zero2", "dp", "off", "poisoned"],
)
@on_ranks(2)
def test_two_ranks_are_one_process_with_both_batches(rank: int, world_size: int, options: Any) -> None:
    """Both ranks' batches in one region and one backward have the same maxima, sums and so the same bits."""
    model, plain = build(**options), seeded(Stack)
    parameters = list(plain.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    for step in range(3):
        with autocast(recipe=SHORT):
            loss = model(batch(rank, step) * 2.0**step).square().mean()
        loss.backward()
        update(optimizer)
        with autocast(recipe=SHORT, amax_reduction_group=alone):
            losses = [plain(batch(r, step) * 2.0**step).square().mean() for r in range(world_size)]
        sum(losses).backward()
        assert torch.equal(loss, losses[rank])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.25 * (parameter.grad / world_size)
                parameter.grad = None
        assert_same_state(model.state_dict(), plain.state_dict())


@FLAGS
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [SHORT, CurrentScaling()], ids=["delayed", "current"])
@on_ranks(2)
def test_recompute_of_sharded_blocks(rank: int, flag: bool, reentrant: bool, recipe: Any) -> None:
    """Weights that are gathered again for the recompute, and freed in between."""
    runs = []
    for call in (None, True):
        model = seeded(Stack)
        if call:
            model.call = lambda block, *args: fp8.checkpoint(block, *args, use_reentrant=reentrant)
        options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=True)}
        wrapped = shard(model, by_class(Block), **options)
        inputs = [batch(rank, step).requires_grad_() for step in range(3)]
        for x in inputs:
            with autocast(recipe=recipe):
                loss = wrapped(x).square().mean()
            loss.backward()
        runs.append([*(x.grad for x in inputs), *(p.grad for p in wrapped.parameters())])
        runs[-1] += fp8_state(wrapped).values()
    assert same(*runs)


@FLAGS
@on_ranks(2)
def test_bf16_compute_and_fp8_products(rank: int, flag: bool) -> None:
    """Training is close to FP32: mean gradients differ by no more than what the casts cost."""
    grads = []
    for recipe, precision in ((SHORT, Precision(compute=torch.bfloat16)), (None, Precision())):
        model = build(flag=flag, precision=precision)
        for _ in range(2):
            model.zero_grad()
            with autocast(enabled=recipe is not None, recipe=recipe):
                loss = model(batch(rank)).float().square().mean()
            loss.backward()
        grads.append(torch.cat([p.grad for p in model.parameters()]))
    assert 1e-3 < error(*grads) < 0.15


@FLAGS
@on_ranks(2)
def test_a_converted_model(rank: int, flag: bool) -> None:
    """nn.Linear converted before wrapping: without autocast the same bits as before."""
    runs = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        if converts:
            convert(model, lambda linear, name: True, fuse_wgrad_accumulation=True)
        wrapped = shard(model, optimize_backward_concat=flag)
        for x in microbatches(wrapped, [batch(rank, m) for m in range(3)]):
            wrapped(x).square().mean().backward()
        runs.append([p.grad.clone() for p in wrapped.parameters()])
    assert same(*runs)


@on_ranks(2)
def test_layers_that_join_later(rank: int) -> None:
    """Layers of one unit whose state appears at different times: the second one later."""
    model = nn.ModuleList([LayerNormLinear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)])
    alone = seeded(lambda: Linear(WIDTH, WIDTH))
    model[1].load_state_dict(alone.state_dict())
    for step in range(4):
        with autocast(recipe=SHORT):
            out = model[0](batch(rank, step))
            if step >= 2:
                model[1](batch(rank, step))
        out.sum().backward()
    for step in (2, 3):
        with autocast(recipe=SHORT):
            alone(batch(rank, step))
    assert_same_state(snapshot(model[1]), snapshot(alone))
