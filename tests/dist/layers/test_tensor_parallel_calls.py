"""Layers that ranks share: options of one call, and misuse that is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.lib.copy_counter import CopyCounter
from flatfsdp import fp8
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import (
    DotProductAttention,
    Embedding,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
)
from tests.support.assertions import assert_raises
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.split_layers import (
    BATCH,
    COLUMN,
    FFN,
    HEADS,
    MLP,
    OUT,
    ROW,
    SEQUENCE,
    SHORT,
    WIDTH,
    assert_close,
    compare,
    complete_grad,
    events,
    make_pair,
    mine,
    step,
    whole_group,
)

# ---- what may be asked of a call ---------------------------------------------------------------------------


@on_ranks(2)
def test_several_results_and_a_residual() -> None:
    """Several results, and residuals, in FP8 under sequence parallelism."""
    options = {"return_bias": True, "return_layernorm_output": True}
    layers: list[tuple[Any, str, int, float]] = [
        (partial(LayerNormLinear, WIDTH, OUT, parallel_mode="column", **options), "column", OUT, 1e-6),
        (partial(MLP, **options), "both", WIDTH, 1e-3),
    ]
    for make, kind, width, tolerance in layers:
        pair = make_pair(make, kind, (WIDTH, width), True)
        x, residual = torch.randn(2, SEQUENCE, BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
        found = []
        for layer, cut in ((pair.whole, lambda t: t), (pair.split, pair.rows)):
            inputs = [cut(t).clone().requires_grad_() for t in (x, residual)]
            with autocast(recipe=CurrentScaling()):
                out, bias, *others = layer(inputs[0], residual=inputs[1], return_residual=True)
            losses = [(out + bias).square().sum(), *(other.square().sum() for other in others)]
            sum(losses).backward()
            found.append([out, bias, *others, *(t.grad for t in inputs)])
        (out, bias, *others), (own_out, own_bias, *own_others) = found
        assert_close(own_out, pair.output(out), tolerance, "output")
        assert torch.equal(own_bias, pair.columns(bias) if kind == "column" else bias)
        for own, other in zip(own_others, others, strict=True):
            assert_close(own, pair.rows(other), 2 * tolerance, "norm, residual, gradients")
        for (name, whole), part in zip(pair.whole.named_parameters(), pair.split.parameters(), strict=True):
            assert_close(complete_grad(part), mine(whole.grad, part), 2 * tolerance, name)


@on_ranks(2)
def test_frozen_parameters_and_inputs_without_gradient() -> None:
    """Gradients that are not needed are neither computed nor sent."""
    for sequence_parallel in (False, True):
        for frozen in ("layer_norm", "fc1", "fc2", "weight"):
            pair = make_pair(MLP, "both", (WIDTH, WIDTH), sequence_parallel)
            for layer in pair.whole, pair.split:
                for name, parameter in layer.named_parameters():
                    parameter.requires_grad_(frozen not in name)
            compare(pair, SHORT, steps=2, tolerance=1e-3, grad_tolerance=2e-3)
        for make, width in ((COLUMN, WIDTH), (ROW, WIDTH // 2)):
            layer = make(**whole_group(sequence_parallel))
            x = torch.randn(SEQUENCE, BATCH, width)
            with torch.no_grad():
                alone = layer(x)
            with events() as log:
                out = layer(x)
                assert torch.equal(out, alone)
                log.clear()
                out.sum().backward()
            assert "dgrad" not in log and (make is ROW or "sum" not in log)


@on_ranks(2)
def test_cached_weights_and_gradients_in_products() -> None:
    """The same bits in each run, and in two passes, because scales are powers of two.

    Weights cast in the first of two, whose gradients are added to main_grad by the products.
    """
    traces: dict[Any, list[Tensor]] = {}
    for fuse in (True, "two_pass", True):
        make = partial(TransformerLayer, WIDTH, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0)
        make = partial(make, set_parallel_mode=True, fuse_qkv_params=True, fuse_wgrad_accumulation=fuse)
        pair = make_pair(make, "both", (WIDTH, WIDTH), True)
        for parameter in (*pair.whole.parameters(), *pair.split.parameters()):
            if parameter.dim() == 2:
                parameter.main_grad = torch.full_like(parameter, torch.nan)
        trace = []
        generator = torch.Generator().manual_seed(6)
        for first in (True, False):
            # The second one begins with scales of the first one.
            x = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator)
            out, dx = step(pair.whole, x, x, SHORT, is_first_microbatch=first)
            own_out, own_dx = step(pair.split, pair.rows(x), pair.rows(x), SHORT, is_first_microbatch=first)
            assert_close(own_out, pair.rows(out), 1e-3, "output")
            assert_close(own_dx, pair.rows(dx), 1e-2, "gradient of the input")
            trace += [own_out, own_dx]
        for (name, whole), part in zip(pair.whole.named_parameters(), pair.split.parameters(), strict=True):
            grad = whole.main_grad if whole.dim() == 2 else whole.grad
            own = complete_grad(part)
            assert_close(own, mine(grad, part), 1e-2, name)
            trace.append(own)
        before = traces.setdefault("any", trace)
        assert all(torch.equal(a, b) for a, b in zip(before, trace, strict=True)), fuse


# ---- dropout -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_dropout_of_what_a_rank_has_a_part_of(world_size: int) -> None:
    attention = DotProductAttention(
        HEADS, 8, attention_dropout=0.5, attn_mask_type="no_mask", **whole_group()
    )
    torch.manual_seed(0)
    qkv = torch.randn(3, SEQUENCE, BATCH, HEADS // world_size, 8)
    outs = [attention(*qkv), attention(*qkv, checkpoint_core_attention=True)]
    after = torch.rand(3)
    for out in outs:
        mine, other = of_all_ranks(out)
        assert not torch.equal(mine, other)
    assert not torch.equal(*outs)
    assert torch.equal(*of_all_ranks(after))

    make = partial(TransformerLayer, WIDTH, FFN, HEADS, attention_dropout=0.0, hidden_dropout=0.5)
    for sequence_parallel in (False, True):
        torch.manual_seed(1)
        layer = make(set_parallel_mode=True, **whole_group(sequence_parallel))
        x = torch.randn(SEQUENCE, BATCH, WIDTH)
        x[SEQUENCE // 2 :] = x[: SEQUENCE // 2]
        for norm in (layer.self_attention.layernorm_qkv, layer.layernorm_mlp):
            nn.init.zeros_(norm.layer_norm_weight)
        # Both halves of the sequence have the same numbers until some are dropped.
        nn.init.ones_(layer.layernorm_mlp.fc2_bias)
        first, second = of_all_ranks(layer(x[: SEQUENCE // 2]))
        assert torch.equal(first, second) != sequence_parallel
        assert torch.equal(*of_all_ranks(torch.rand(3)))


@on_ranks(2)
def test_a_recomputation_drops_the_same() -> None:
    make = partial(TransformerLayer, WIDTH, FFN, HEADS, hidden_dropout=0.3, attention_dropout=0.3)
    grads = []
    for call in (lambda layer, x, **options: layer(x, **options), fp8.checkpoint):
        for core in (False, True):
            torch.manual_seed(4)
            layer = make(set_parallel_mode=True, **whole_group())
            x = torch.randn(SEQUENCE // 2, BATCH, WIDTH, requires_grad=True)
            with autocast(recipe=SHORT):
                out = call(layer, x, checkpoint_core_attention=core)
            out.square().sum().backward()
            grads.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


# ---- what does not fit -------------------------------------------------------------------------------------


@on_ranks(2)
def test_sizes_that_ranks_cannot_share() -> None:
    constructors: list[tuple[Callable[..., Any], str]] = [
        (partial(Linear, WIDTH, 97, parallel_mode="column"), "Linear: out_features is 97, which 2"),
        (partial(Linear, 63, OUT, parallel_mode="row"), "Linear: in_features is 63"),
        (
            partial(Linear, WIDTH, 66, parallel_mode="column", partition_sizes=(33, 33)),
            "a part of weight is 33",
        ),
        (partial(Linear, WIDTH, 66, parallel_mode="column", partition_sizes=(32, 32)), "add up to 66"),
        (
            partial(LayerNormLinear, WIDTH, OUT, parallel_mode="row"),
            "LayerNormLinear: parallel_mode is 'row'",
        ),
        (partial(LayerNormMLP, WIDTH, 99, set_parallel_mode=True), "ffn_hidden_size is 99"),
        (partial(DotProductAttention, 9, 8), "num_attention_heads is 9"),
        (partial(DotProductAttention, 6, 8, 3), "num_gqa_groups is 3"),
        (partial(MultiheadAttention, 72, 9, set_parallel_mode=True), "num_attention_heads is 9"),
        (partial(MultiheadAttention, WIDTH, HEADS), "needs set_parallel_mode=True"),
        (
            partial(TransformerLayer, WIDTH, FFN, HEADS, set_parallel_mode=True, attn_input_format="bshd"),
            "use 'sbhd'",
        ),
        (partial(Linear, WIDTH, OUT, sequence_parallel=False, tp_overlap=True), "sequence_parallel=True"),
        (partial(Linear, WIDTH, OUT, tp_size=4), "tp_size is 4, and tp_group has 2 ranks"),
    ]
    for make, message in constructors:
        assert_raises(ValueError, message, make, **{**whole_group(), **make.keywords})
    row, column = ROW(**whole_group()), COLUMN(**whole_group())
    uncovered = DelayedScaling(reduce_amax=False)
    with CopyCounter(min_numel=1) as counter:
        with pytest.raises(ValueError, match="Linear: the sequence length is 15, which 2"):
            row(torch.randn(15, BATCH, WIDTH // 2))
        assert_raises(ValueError, "needs the sequence in front", column, torch.randn(WIDTH))
        with pytest.raises(ValueError, match=r"Linear\.weight.*equal scales"), autocast(recipe=uncovered):
            column(torch.randn(SEQUENCE, BATCH, WIDTH))
        with pytest.raises(ValueError, match="tokens is 24"), autocast(recipe=SHORT):
            column(torch.randn(12, WIDTH))
    assert counter.collectives == []


@on_ranks(2)
def test_masks_of_all_heads(rank: int, world_size: int) -> None:
    """A mask of all heads is a mask of this rank's heads, of which it takes its own."""
    make = partial(MultiheadAttention, WIDTH, HEADS, attn_mask_type="arbitrary", attention_dropout=0.0)
    torch.manual_seed(4)
    whole = make()
    torch.manual_seed(4)
    split = make(set_parallel_mode=True, **whole_group(sequence_parallel=False))
    torch.manual_seed(6)
    x = torch.randn(SEQUENCE, BATCH, WIDTH)
    for heads in (HEADS, 1):
        mask = torch.rand(BATCH, heads, SEQUENCE, SEQUENCE) < 0.4
        expected = whole(x, mask)
        out = split(x, mask)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        own = mask if heads == 1 else mask.chunk(world_size, 1)[rank]
        assert torch.equal(split(x, own), out)
    assert_raises(ValueError, "attention_mask has shape", split, x, mask.expand(-1, HEADS - 1, -1, -1))


@on_ranks(2)
def test_parameters_stay_marked() -> None:
    """Marks and values are those of a layer with memory from the start."""
    make = partial(
        TransformerLayer, WIDTH, FFN, HEADS, set_parallel_mode=True, output_layernorm=True, **whole_group()
    )
    torch.manual_seed(2)
    expected = make()
    layer = make(device="meta").to_empty(device="cpu")
    torch.manual_seed(2)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, a), b in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b) and vars(a) == vars(b), name
        assert a.sequence_parallel != a.tensor_model_parallel, name
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    loaded = make(device="meta")
    loaded.load_state_dict(state, assign=True)
    for (name, a), b in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b) and vars(a) == vars(b), name

    table = Embedding(32, 8, device="meta", **whole_group()).to_empty(device="cpu")
    table.reset_parameters()
    assert table.weight.tensor_model_parallel and not table.weight.isnan().any()
    copied = copy.deepcopy(expected)
    for (name, a), b in zip(copied.named_parameters(), expected.named_parameters(), strict=True):
        assert a is not b and torch.equal(a, b[1]) and vars(a) == vars(b[1]), name
    x = torch.randn(SEQUENCE // 2, BATCH, WIDTH)
    assert torch.equal(copied.eval()(x), expected.eval()(x))
    norm = RMSNorm(8, sequence_parallel=True)
    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert other.weight is not norm.weight and vars(other.weight) == vars(norm.weight)
        assert vars(other).keys() == vars(norm).keys()
    norm.weight = nn.Parameter(torch.zeros(8))
    assert norm.weight.sequence_parallel


@on_ranks(2)
def test_groups_are_checked_and_not_kept(rank: int) -> None:
    group = dist.new_group([0, 1])
    with pytest.raises(TypeError, match=r"mesh\['tp'\]\.get_group\(\)"):
        COLUMN(tp_group=init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    assert_raises(TypeError, r"a process group is needed, not \[0, 1\]", COLUMN, tp_group=[0, 1])
    with nullcontext() if rank == 0 else pytest.raises(ValueError, match="this rank is not in the process"):
        COLUMN(tp_group=dist.new_group([0]))
    layer = COLUMN(tp_group=group, sequence_parallel=True)
    with autocast(recipe=SHORT):
        layer(torch.randn(SEQUENCE, WIDTH)).sum().backward()
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del layer, group
    gc.collect()
    assert alive() is None
