"""Runs of elements as boxes: of whole tensors, and of tensor-parallel parts at their places in the whole."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from flatfsdp.checkpoint.boxes import Box, boxes, boxes_of_part
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.placement import Partition
from flatfsdp.contract.tensor_parallel import part_of


def put(whole: Tensor, box: Box, flat: Tensor) -> int:
    """Fills one box from contiguous elements; returns how many were there already."""
    place = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    filled = int((place >= 0).sum())
    place.copy_(flat[box.start : box.start + box.numel].view(box.sizes))
    return filled


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 1, 5), (2, 3, 4)])
def test_boxes_cover_a_run_once(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    flat = torch.arange(numel)
    for start, stop in product(range(numel + 1), repeat=2):
        whole = torch.full(shape, -1)
        found = list(boxes(shape, start, stop))
        assert len(found) <= 2 * len(shape) - 1
        assert not any(put(whole, box, flat) for box in found)
        expected = torch.full((numel,), -1)
        expected[start:stop] = flat[start:stop]
        assert torch.equal(whole.flatten(), expected)


@pytest.mark.parametrize(
    ("shape", "partition"),
    [
        ((8,), Partition(0, (8,))),
        ((8, 3), Partition(0, (4, 4))),
        ((3, 8), Partition(1, (8,))),
        ((3, 12), Partition(1, (4, 8))),
        ((12, 2, 3), Partition(0, (4, 6, 2))),
        ((2, 8, 3), Partition(1, (2, 6))),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_parts_are_at_their_places(shape: tuple[int, ...], partition: Partition, shards: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found, filled, parts = torch.full(shape, -1), 0, []
    for rank in range(2):
        part = part_of(whole, partition.dim, partition.sizes, Ranks(None, 2, rank))
        parts.append(part)
        assert partition.whole_shape(part.shape) == shape
        assert partition.ranks(part.shape) == 2
        edges = torch.linspace(0, part.numel(), shards + 1).long().tolist()
        for start, stop in pairwise(edges):
            for box in boxes_of_part(part.shape, start, stop, partition, rank, 2):
                filled += put(found, box, part.flatten())
    assert torch.equal(found, whole) and filled == 0
    assert torch.equal(partition.join(parts), whole)


def test_sizes_that_no_number_of_ranks_gives() -> None:
    assert Partition(0, (6, 6)).ranks((5,)) == 0
    assert Partition(0, (3, 5)).ranks((4,)) == 0
    assert Partition(0, (8,)).ranks((0,)) == 0
