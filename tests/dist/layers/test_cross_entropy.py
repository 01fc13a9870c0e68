"""`cross_entropy` of a vocabulary that is split over ranks, and `LinearCrossEntropy` in FlatFSDP."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, microbatches, shard
from flatfsdp.layers import Embedding, Linear, LinearCrossEntropy, cross_entropy
from tests.support.models import Trace, grads_of, same_trace, update
from tests.support.ranks import on_ranks
from tests.support.split_layers import assert_close, mine

VOCAB, WIDTH = 64, 24


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same on all ranks: large logits, one token ignored, targets in every part."""
    logits = (torch.randn(33, VOCAB, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    targets = torch.arange(33) * 2 % VOCAB
    targets[5] = -100
    return logits, targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 4)
def test_a_split_vocabulary_has_the_loss_of_the_whole(rank: int, world_size: int, dtype: torch.dtype) -> None:
    group = dist.new_group(range(world_size))
    mine = slice(rank * VOCAB // world_size, (rank + 1) * VOCAB // world_size)
    for reduction, inplace in (("mean", True), ("sum", False), ("none", False)):
        whole, targets = batch(dtype)
        part = whole[:, mine].clone().requires_grad_()
        whole.requires_grad_()
        expected = cross_entropy(whole, targets, reduction=reduction)
        loss = cross_entropy(part * 1, targets, reduction=reduction, tp_group=group, inplace_backward=inplace)
        assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6)
        losses = [torch.empty_like(loss) for _ in range(world_size)]
        dist.all_gather(losses, loss.detach(), group=group)
        assert all(torch.equal(loss, other) for other in losses)
        dloss = torch.arange(1.0, 1 + expected.numel()).view_as(expected)
        loss.backward(dloss)
        expected.backward(dloss)
        error = (part.grad.double() - whole.grad[:, mine].double()).norm() / whole.grad.double().norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@on_ranks(2)
def test_infinities_and_nan_in_parts(rank: int, world_size: int) -> None:
    """A part with nothing but -infinity adds nothing; infinity or NaN in one part is NaN on all ranks."""
    group = dist.new_group(range(world_size))
    whole = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    whole[0, : VOCAB // 2] = -torch.inf
    whole[1, 3], whole[2, -1] = torch.inf, torch.nan
    whole[3] = -torch.inf
    targets = torch.full((4,), VOCAB - 1)
    part = whole[:, rank * VOCAB // 2 : (rank + 1) * VOCAB // 2]
    loss = cross_entropy(part, targets, reduction="none", tp_group=group)
    expected = F.cross_entropy(whole, targets, reduction="none")
    assert expected.isnan().tolist() == [False, True, True, True]
    assert torch.allclose(loss, expected, equal_nan=True)


@on_ranks(2)
def test_a_target_outside_of_all_parts_raises_on_every_rank(world_size: int) -> None:
    group = dist.new_group(range(world_size))
    with pytest.raises(RuntimeError, match="outside of the vocabulary of 64"):
        cross_entropy(torch.randn(3, VOCAB // world_size), torch.tensor([0, VOCAB, 1]), tp_group=group)


# ---- the head of a split vocabulary ------------------------------------------------------------------------


class Shared(NamedTuple):
    """A head that ranks share, and one that they all have; the same values."""

    split: LinearCrossEntropy
    whole: LinearCrossEntropy


def heads(dtype: torch.dtype, **options: Any) -> Shared:
    options["params_dtype"] = dtype
    torch.manual_seed(3)
    split = LinearCrossEntropy(WIDTH, VOCAB, parallel_mode="column", **options, tp_group=dist.group.WORLD)
    options.pop("sequence_parallel", None)
    torch.manual_seed(3)
    whole = LinearCrossEntropy(WIDTH, VOCAB, **options)
    assert torch.equal(split.weight, mine(whole.weight, split.weight))
    for layer in (split, whole):
        layer.weight.data.mul_(30)
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    return Shared(split, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 4)
def test_a_head_that_ranks_share_has_the_numbers_of_one(rank: int, world_size: int, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(8, 3, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(VOCAB, (8, 3), generator=generator)
    targets[2, 1] = -100
    rounding = 2e-6 if dtype == torch.float32 else 1e-2
    for sequence_parallel, chunk_tokens, fused, reduction in (
        (False, None, True, "mean"),
        (True, None, False, "mean"),
        (False, 5, False, "none"),
        (True, 5, True, "sum"),
    ):
        options = {"chunk_tokens": chunk_tokens, "fuse_wgrad_accumulation": fused, "reduction": reduction}
        layers = heads(dtype, sequence_parallel=sequence_parallel, **options)
        leaf = x.clone().requires_grad_()
        expected = layers.whole(leaf, targets)
        part = x.chunk(world_size)[rank] if sequence_parallel else x
        own = part.clone().requires_grad_()
        logits = layers.split(own)
        assert logits.shape == (8, 3, VOCAB // world_size)
        loss = layers.split(own, targets)
        assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-6)
        dloss = torch.arange(1.0, 1 + loss.numel()).view_as(loss)
        loss.backward(dloss)
        expected.backward(dloss)
        dx = leaf.grad.chunk(world_size)[rank] if sequence_parallel else leaf.grad
        ours, theirs = (layer.weight.main_grad if fused else layer.weight.grad for layer in layers)
        assert_close(own.grad, dx, rounding, "gradient of the input")
        assert_close(ours, mine(theirs, layers.split.weight), rounding, "gradient of the weight")


@on_ranks(2)
def test_a_head_that_ranks_do_not_share(rank: int) -> None:
    """Ranks that share other layers, but not the head, have a loss each."""
    torch.manual_seed(rank)
    layer = LinearCrossEntropy(WIDTH, VOCAB, tp_group=dist.group.WORLD)
    x, targets = torch.randn(4, WIDTH), torch.randint(VOCAB, (4,))
    assert torch.equal(layer(x, targets), cross_entropy(layer(x), targets))


# ---- the head and its loss in FlatFSDP ---------------------------------------------------------------------


class Net(nn.Module):
    """Tokens to the loss of predicting them.

    Args:
        options: of the head; None for a `Linear` and the loss of its logits.
        ties: the head and the embedding share a weight.
    """

    def __init__(self, options: dict[str, Any] | None, fused: Any = True, ties: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, WIDTH, fuse_wgrad_accumulation=bool(fused))
        self.norm = nn.LayerNorm(WIDTH)
        if options is None:
            self.head = Linear(WIDTH, VOCAB, bias=False, fuse_wgrad_accumulation=fused)
        else:
            self.head = LinearCrossEntropy(WIDTH, VOCAB, fuse_wgrad_accumulation=fused, **options)
        if ties:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, targets = self.norm(self.embedding(tokens[:-1])), tokens[1:]
        if isinstance(self.head, LinearCrossEntropy):
            return self.head(x, targets)
        return cross_entropy(self.head(x), targets)


def train(rank: int, net: dict[str, Any], **options: Any) -> Trace:
    """The head is a unit of its own, unless its weight is also another layer's."""
    torch.manual_seed(0)
    options["precision"] = Precision(compute=torch.bfloat16)
    whole = Net(**net)
    model = shard(whole, **options) if net.get("ties") else shard(whole, by_class(Linear), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        batches = [torch.randint(VOCAB, (12,), generator=generator) for _ in range(3)]
        for tokens in microbatches(model, batches):
            loss = model(tokens)
            (loss * 8).backward()
            losses.append(loss.detach())
        grads += grads_of(model)
        update(optimizer)
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], [])


@pytest.mark.parametrize("flag", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("net", [{}, {"ties": True}, {"fused": False}], ids=["fused", "tied", "unfused"])
@on_ranks(2)
def test_the_same_bits_as_a_linear_and_the_loss_of_its_logits(rank: int, flag: bool, net: Any) -> None:
    options = {"optimize_backward_concat": flag, "debug": Debug(poison_on_free=True)}
    traces = [train(rank, {"options": head, **net}, **options) for head in ({}, None)]
    assert same_trace(*traces) == dict.fromkeys(Trace._fields, True)


@pytest.mark.parametrize("fused", [False, True, "two_pass"])
@on_ranks(2)
def test_chunks_change_gradients_by_rounding_only(rank: int, fused: Any) -> None:
    net = {"options": {"chunk_tokens": 4}, "fused": fused}
    traces = [
        train(rank, net, optimize_backward_concat=flag, debug=Debug(poison_on_free=True))
        for flag in (False, True)
    ]
    assert same_trace(*traces) == dict.fromkeys(Trace._fields, True)
    whole = train(rank, {"options": {}, "fused": fused})
    # The first step; its gradients, added up in another order, make the second one a little different.
    assert torch.equal(torch.stack(traces[0].losses[:3]), torch.stack(whole.losses[:3]))
    grads = zip(traces[0].grads, whole.grads, strict=True)
    assert all((ours - theirs).norm() <= 1e-2 * theirs.norm() for ours, theirs in grads)
