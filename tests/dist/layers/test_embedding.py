"""An embedding whose rows are split over ranks equals the whole one, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.layers import Embedding
from tests.support.ranks import on_ranks

ROWS, COLS = 24, 16


def pair(seed: int, **options: Any) -> tuple[Embedding, Embedding]:
    """The whole table, and this rank's part, with main_grads that hold something."""
    tables = []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(seed)
        parallel = {"tp_group": group, "sequence_parallel": options["sequence_parallel"]} if group else {}
        layer = Embedding(
            ROWS,
            COLS,
            options["padding_idx"],
            params_dtype=options["dtype"],
            fuse_wgrad_accumulation=options["fused"],
            **parallel,
        )
        layer.weight.main_grad = torch.full(layer.weight.shape, 0.5)
        tables.append(layer)
    whole, part = tables
    return whole, part


def grad(layer: Embedding) -> Tensor:
    found = layer.weight.main_grad if layer.fuse_wgrad_accumulation else layer.weight.grad
    assert found is not None
    return found


def splits(rank: int, world_size: int, **options: Any) -> None:
    torch.manual_seed(3)
    ranks = Ranks.of(dist.group.WORLD)
    whole, part = pair(7, **options)
    weight = part.weight
    assert weight.tensor_model_parallel and weight.partition_dim == 0 and weight.partition_sizes == (ROWS,)

    def own(of_whole: Tensor) -> Tensor:
        return part_of(of_whole, 0, (ROWS,), ranks)

    assert torch.equal(weight, own(whole.weight))
    for microbatch in range(3):
        ids = torch.randint(0, ROWS, (8, 3))
        if microbatch == 1:
            # No row of the last rank's.
            ids %= ROWS // world_size
        expected, out = whole(ids, microbatch == 0), part(ids, microbatch == 0)
        dy = torch.randn_like(expected)
        expected.backward(dy)
        if options["sequence_parallel"]:
            expected, dy = expected.chunk(world_size)[rank], dy.chunk(world_size)[rank]
        assert torch.equal(out, expected) and out.dtype == options["dtype"]
        out.backward(dy)
        assert torch.equal(grad(part), own(grad(whole)))
    with torch.no_grad():
        assert not part(torch.zeros(8, 1, dtype=torch.int32)).requires_grad


@on_ranks(2, 4)
def test_values_and_gradients_are_those_of_the_whole_table(rank: int, world_size: int) -> None:
    for number in range(16):
        splits(
            rank,
            world_size,
            fused=bool(number & 1),
            sequence_parallel=bool(number & 2),
            padding_idx=5 if number & 4 else None,
            dtype=torch.bfloat16 if number & 8 else torch.float32,
        )


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="Embedding: num_embeddings is 25, which 2 tensor-parallel ranks"):
        Embedding(25, 16, tp_group=group)
    with pytest.raises(ValueError, match="Embedding: tp_size is 4, and tp_group has 2 ranks"):
        Embedding(24, 16, tp_group=group, tp_size=4)
    layer = Embedding(24, 16, tp_group=group, sequence_parallel=True)
    with pytest.raises(ValueError, match="Embedding: the sequence length is 3"):
        layer(torch.zeros(3, 2, dtype=torch.int64))
    for bad in (24, -1):
        with pytest.raises(RuntimeError, match="an id is outside of the table of 24 rows"):
            layer(torch.tensor([[0], [bad]]))
