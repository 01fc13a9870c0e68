from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from flatfsdp.layers.attention.heads import HeadsOf, split_qkv
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding, apply_rotary
from tests.support import plain_layers as plain
from tests.support.assertions import assert_equal

SHAPES = pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])


def parts(mixed: Tensor, heads: int, groups: int, dim: int, interleaved: bool) -> tuple[Tensor, ...]:
    """Splits head by head."""
    rows = mixed.unflatten(-1, (-1, dim)).unbind(-2)
    each = heads // groups
    if interleaved:
        runs = [rows[g * (each + 2) : (g + 1) * (each + 2)] for g in range(groups)]
        query = [head for run in runs for head in run[:each]]
        key, value = [run[each] for run in runs], [run[each + 1] for run in runs]
    else:
        query, key, value = rows[:heads], rows[heads : heads + groups], rows[heads + groups :]
    return tuple(torch.stack(tuple(some), -2) for some in (query, key, value))


@SHAPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("neighbours", [None, False, True], ids=["no rope", "halves", "neighbours"])
def test_splits_and_rotates_at_once(
    heads: int, groups: int, interleaved: bool, batch_first: bool, neighbours: bool | None
) -> None:
    """Results and gradients are those of single heads, each rotated by itself."""
    dtype = torch.float32 if neighbours is None else torch.bfloat16
    mixed = plain.leaf(5, 3, (heads + 2 * groups) * 8, dtype=dtype)
    of, tables = HeadsOf(heads, groups, 8, interleaved), RotaryPositionEmbedding(6)(8)[:2]
    query, key, value = parts(mixed, heads, groups, 8, interleaved)
    if neighbours is None:
        ours = split_qkv(mixed, of)
    else:
        turned = partial(apply_rotary, cos=tables[0], sin=tables[1], batch_first=batch_first)
        query, key = (turned(x, interleaved=neighbours) for x in (query, key))
        ours = split_qkv(mixed, of, tables, batch_first=batch_first, neighbours=neighbours)
    expected = query, key, value
    assert_equal(ours, expected)
    grads = [torch.randn_like(part) for part in expected]
    (got,) = torch.autograd.grad(ours, mixed, grads)
    (wanted,) = torch.autograd.grad(expected, mixed, grads)
    assert torch.equal(got, wanted) and got.is_contiguous()


@SHAPES
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_are_views(heads: int, groups: int, interleaved: bool) -> None:
    mixed = torch.randn(5, 3, (heads + 2 * groups) * 8)
    query, key, value = split_qkv(mixed, HeadsOf(heads, groups, 8, interleaved))
    memory = mixed.untyped_storage().data_ptr()
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == memory
    is_copied = interleaved and 1 < groups < heads
    assert (query.untyped_storage().data_ptr() != memory) == is_copied


def test_a_part_without_a_gradient_counts_as_zero() -> None:
    mixed = plain.leaf(2, 2, 24)
    split_qkv(mixed, HeadsOf(1, 1, 8, False)).value.sum().backward()
    assert mixed.grad is not None
    assert torch.equal(mixed.grad[..., 16:], torch.ones(2, 2, 8))
    assert torch.equal(mixed.grad[..., :16], torch.zeros(2, 2, 16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_attention_saves_is_not_the_pack_projection(interleaved: bool) -> None:
    mixed = plain.leaf(5, 3, 4 * 8)
    cos, sin, _ = RotaryPositionEmbedding(8)(5)
    for part in split_qkv(mixed, HeadsOf(2, 1, 8, interleaved), (cos, sin)):
        assert part.untyped_storage().data_ptr() != mixed.untyped_storage().data_ptr()


def test_a_wrong_size_is_named() -> None:
    tables = RotaryPositionEmbedding(8)(4)
    for given in (None, tables):
        with pytest.raises(ValueError, match="do not fill 63 columns"):
            split_qkv(torch.randn(2, 2, 63), HeadsOf(4, 2, 8, True), given)
    with pytest.raises(ValueError, match="x needs at least 5 rows"):
        split_qkv(torch.randn(5, 2, 64), HeadsOf(4, 2, 8, False), tables)
