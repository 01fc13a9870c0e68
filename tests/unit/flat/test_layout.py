"""FlatLayout: where parameters lie in a flat buffer, for any shapes, alignments and numbers of shards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatfsdp.flat.layout import ELEMENT_ALIGNMENT, FlatLayout, ParamSpec

properties = settings(max_examples=60, deadline=None, derandomize=True)

# Row lengths with a small common multiple keep the buffers of the examples small.
columns = st.sampled_from([1, 2, 3, 4, 6, 8])
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 70)),
    st.tuples(st.integers(0, 300), columns),
    st.tuples(st.integers(0, 40), columns, st.sampled_from([1, 2])),
)
specs = st.lists(shapes, min_size=1, max_size=6).map(
    lambda drawn: [ParamSpec(f"p{i}", shape) for i, shape in enumerate(drawn)]
)
shard_counts = st.integers(1, 5)


@properties
@given(specs)
def test_slots_are_complete_disjoint_aligned_and_in_bounds(specs):
    layout = FlatLayout.pack(specs)
    assert [(s.name, s.shape, s.role) for s in layout.slots] == [(s.name, s.shape, s.role) for s in specs]
    end = 0
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape)
        assert slot.offset >= end, "slots overlap or are out of order"
        assert slot.offset % ELEMENT_ALIGNMENT == 0
        end = slot.end
    assert layout.numel == end <= layout.padded_numel(1)


@properties
@given(specs, shard_counts)
def test_slots_and_gaps_tile_the_padded_buffer_exactly(specs, num_shards):
    layout = FlatLayout.pack(specs)
    covered = torch.zeros(layout.padded_numel(num_shards), dtype=torch.int32)
    for slot in layout.slots:
        covered[slot.offset : slot.end] += 1
    gaps = layout.gaps(num_shards)
    for start, stop in gaps:
        assert start < stop
        covered[start:stop] += 1
    assert covered.eq(1).all()
    assert gaps == sorted(gaps)


@properties
@given(specs, shard_counts)
def test_shards_are_equal_aligned_and_long_enough(specs, num_shards):
    layout = FlatLayout.pack(specs)
    length = layout.shard_numel(num_shards)
    assert length % ELEMENT_ALIGNMENT == 0
    assert layout.padded_numel(num_shards) == length * num_shards
    # Enough, and no more than rounding up asks for.
    assert length * num_shards >= layout.numel
    assert (length - ELEMENT_ALIGNMENT) * num_shards < max(layout.numel, 1)


@properties
@given(specs, shard_counts)
def test_pieces_of_all_ranks_cover_each_slot_once_and_keep_its_alignment(specs, num_shards):
    layout = FlatLayout.pack(specs)
    length = layout.shard_numel(num_shards)
    covered = {slot.name: torch.zeros(slot.numel, dtype=torch.int32) for slot in layout.slots}
    for rank in range(num_shards):
        cursor = 0
        for piece in layout.pieces(rank, num_shards):
            slot, size = piece.slot, piece.stop - piece.start
            covered[slot.name][piece.start : piece.stop] += 1
            assert size > 0
            assert cursor <= piece.shard_offset, "pieces of one shard overlap or are out of order"
            cursor = piece.shard_offset + size
            assert cursor <= length
            # The same element whether it is counted from the shard or from the slot: offsets do not
            # depend on the number of shards.
            assert rank * length + piece.shard_offset == slot.offset + piece.start
            assert piece.start % ELEMENT_ALIGNMENT == 0
            assert piece.stop == slot.numel or piece.stop % ELEMENT_ALIGNMENT == 0
    assert all(counts.eq(1).all() for counts in covered.values())


@properties
@given(specs, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_bounds_of_norms_cover_each_slot_and_are_each_in_one_shard(specs, num_shards):
    """The same ones for all numbers of shards that divide the number of cuts."""
    layout = FlatLayout.pack(specs, cuts=12)
    length = layout.shard_numel(num_shards)
    for slot, bounds in zip(layout.slots, layout.bounds_of_slots, strict=True):
        assert [start for start, _ in bounds] == [slot.offset, *(stop for _, stop in bounds[:-1])]
        assert bounds[-1][1] == slot.end
        assert all(start % ELEMENT_ALIGNMENT == 0 for start, _ in bounds)
        if slot.numel:
            assert all(start // length == (stop - 1) // length for start, stop in bounds)
            assert all(start < stop for start, stop in bounds)
    assert layout.bounds == [*itertools.chain(*layout.bounds_of_slots)]


def test_boundaries_are_at_multiples_of_16_elements():
    layout = FlatLayout.pack([ParamSpec("w", (300, 3))])
    assert layout.pieces(0, 2)[0].stop == 464  # 450 rounded up


def test_a_rank_beyond_the_data_holds_nothing():
    layout = FlatLayout.pack([ParamSpec("w", (16,))])
    assert [len(layout.pieces(rank, 4)) for rank in range(4)] == [1, 0, 0, 0]


@properties
@given(specs, shard_counts)
def test_views_alias_their_ranges(specs, num_shards):
    layout = FlatLayout.pack(specs)
    flat = torch.arange(layout.padded_numel(num_shards), dtype=torch.int64)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == [spec.shape for spec in specs]
    for slot, view in zip(layout.slots, views, strict=True):
        assert torch.equal(view.flatten(), torch.arange(slot.offset, slot.end))
        view.fill_(-1)
    for start, stop in layout.gaps(num_shards):
        assert torch.equal(flat[start:stop], torch.arange(start, stop)), "a view reaches into a gap"
    assert flat.eq(-1).sum() == sum(slot.numel for slot in layout.slots)


@properties
@given(specs, shard_counts)
def test_backward_through_views_fills_slots_and_leaves_zeros_in_gaps(specs, num_shards):
    layout = FlatLayout.pack(specs)
    flat = torch.zeros(layout.padded_numel(num_shards), requires_grad=True)
    torch.stack([(i + 1) * view.sum() for i, view in enumerate(layout.views(flat))]).sum().backward()
    expected = torch.zeros_like(flat)
    for i, slot in enumerate(layout.slots):
        expected[slot.offset : slot.end] = i + 1
    assert torch.equal(flat.grad, expected)


def test_duplicate_names_are_rejected():
    with pytest.raises(ValueError, match=r"two parameters are called 'fc\.weight'"):
        FlatLayout.pack([ParamSpec("fc.weight", (2,)), ParamSpec("fc.weight", (3,))])


def test_an_empty_layout_has_no_elements():
    layout = FlatLayout.pack([])
    assert (layout.numel, layout.padded_numel(3), layout.gaps(3)) == (0, 0, [])
    assert layout.views(torch.empty(0)) == []
    assert layout.pieces(0, 3) == []
