"""Packs of a flat layout: neighbours without a gap, and nothing else changes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatfsdp.flat.layout import ELEMENT_ALIGNMENT, FlatLayout, ParamSpec
from flatfsdp.flat.pack_candidates import why_not_pack

properties = settings(max_examples=80, deadline=None, derandomize=True)

members = st.tuples(
    st.sampled_from([(), (8,), (16, 3)]),
    st.lists(st.sampled_from([1, 2, 8, 16, 17, 32]), min_size=2, max_size=4),
)
wanted = st.lists(members, min_size=1, max_size=4)


def specs_of(drawn: list[tuple[tuple[int, ...], list[int]]]) -> list[list[ParamSpec]]:
    return [
        [ParamSpec(f"j{j}.p{p}", (rows, *row)) for p, rows in enumerate(sizes)]
        for j, (row, sizes) in enumerate(drawn)
    ]


@properties
@given(wanted, st.integers(1, 3))
def test_joints_are_neighbours_without_a_gap(drawn, num_shards):
    groups = specs_of(drawn)
    flat_specs = [spec for group in groups for spec in group]
    asked = [(f"j{j}", [spec.name for spec in group]) for j, group in enumerate(groups)]
    layout, plain = FlatLayout.pack(flat_specs, asked), FlatLayout.pack(flat_specs)
    # Slots, and so shards and checkpoints, do not know of packs.
    assert layout.slots == plain.slots and layout.pieces(0, num_shards) == plain.pieces(0, num_shards)
    found = {pack.name: pack for pack in layout.packs}
    for (name, parts), group in zip(asked, groups, strict=True):
        shapes = [spec.shape for spec in group]
        fits = all(math.prod(shape) % ELEMENT_ALIGNMENT == 0 for shape in shapes[:-1])
        assert (name in found) is fits is (why_not_pack(shapes, ELEMENT_ALIGNMENT) is None)
        if fits:
            pack = found[name]
            assert [slot.name for slot in layout.slots[pack.first : pack.last]] == parts
            assert pack.numel == sum(map(math.prod, shapes)) and pack.shape[1:] == shapes[0][1:]
    covered = [slot for run in layout.runs for slot in run.slots]
    assert covered == list(range(len(layout.slots)))
    assert tuple(run for run in layout.runs if len(run.slots) > 1) == layout.packs


@properties
@given(wanted)
def test_a_packs_view_is_its_parts_views_one_below_the_other(drawn):
    groups = specs_of(drawn)
    asked = [(f"j{j}", [spec.name for spec in group]) for j, group in enumerate(groups)]
    layout = FlatLayout.pack([spec for group in groups for spec in group], asked)
    flat = torch.arange(layout.padded_numel(2))
    parts = layout.views(flat)
    for pack, view in zip(layout.packs, layout.pack_views(flat), strict=True):
        rows = view.split([parts[slot].shape[0] for slot in pack.slots])
        for row, slot in zip(rows, pack.slots, strict=True):
            assert torch.equal(row, parts[slot]) and row.data_ptr() == parts[slot].data_ptr()


def test_parameters_that_are_no_neighbours_are_left_out():
    specs = [ParamSpec(name, (16, 4)) for name in "abc"]
    assert FlatLayout.pack(specs, [("ac", ["a", "c"])]).packs == ()
    assert FlatLayout.pack(specs, [("ba", ["b", "a"])]).packs == ()
    assert FlatLayout.pack(specs, [("cd", ["c", "d"])]).packs == ()
    assert [pack.slots for pack in FlatLayout.pack(specs, [("bc", ["b", "c"])]).packs] == [range(1, 3)]


def test_why_parameters_are_no_pack():
    assert "different shapes" in why_not_pack([(16, 4), (16, 8)], 16)
    assert "scalar" in why_not_pack([(), (16,)], 16)
    assert "multiple of 16" in why_not_pack([(17, 3), (16, 3)], 16)
    assert why_not_pack([(16, 3), (17, 3)], 16) is None
