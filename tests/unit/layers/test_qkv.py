from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatfsdp.layers.attention.qkv import HeadsOf, split_qkv
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding, apply_rotary
from tests.support import plain_layers as plain

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
def test_forward_and_backward_against_single_heads(heads: int, groups: int, interleaved: bool) -> None:
    mixed = plain.leaf(5, 3, (heads + 2 * groups) * 8)
    ours = split_qkv(mixed, HeadsOf(heads, groups, 8, interleaved))
    expected = parts(mixed, heads, groups, 8, interleaved)
    for got, wanted in zip(ours, expected, strict=True):
        assert torch.equal(got, wanted)
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


def test_a_wrong_size_is_named() -> None:
    with pytest.raises(ValueError, match="do not fill 63 columns"):
        split_qkv(torch.randn(2, 2, 63), HeadsOf(4, 2, 8, True))


@SHAPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
def test_splits_and_rotates_at_once(
    heads: int, groups: int, interleaved: bool, batch_first: bool, neighbours: bool
) -> None:
    mixed = plain.leaf(5, 3, (heads + 2 * groups) * 8).bfloat16().detach().requires_grad_()
    cos, sin, _ = RotaryPositionEmbedding(6)(8)
    split = split_qkv(mixed, HeadsOf(heads, groups, 8, interleaved))
    query, key = (
        apply_rotary(x, cos, sin, batch_first=batch_first, interleaved=neighbours)
        for x in (split.query, split.key)
    )
    expected = query, key, split.value
    of = HeadsOf(heads, groups, 8, interleaved)
    ours = split_qkv(mixed, of, (cos, sin), batch_first=batch_first, neighbours=neighbours)
    grads = [torch.randn_like(part) for part in expected]
    for got, wanted in zip(ours, expected, strict=True):
        assert torch.equal(got, wanted) and got.shape == wanted.shape
    (got,) = torch.autograd.grad(ours, mixed, grads)
    (wanted,) = torch.autograd.grad(expected, mixed, grads)
    assert torch.equal(got, wanted) and got.is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_attention_saves_is_not_the_pack_projection(interleaved: bool) -> None:
    mixed = plain.leaf(5, 3, 4 * 8)
    cos, sin, _ = RotaryPositionEmbedding(8)(5)
    for part in split_qkv(mixed, HeadsOf(2, 1, 8, interleaved), (cos, sin)):
        assert part.untyped_storage().data_ptr() != mixed.untyped_storage().data_ptr()


def test_a_wrong_size_is_named_with_rope() -> None:
    tables = RotaryPositionEmbedding(8)(4)
    with pytest.raises(ValueError, match="do not fill 63 columns"):
        split_qkv(torch.randn(2, 2, 63), HeadsOf(4, 2, 8, True), tables)
    with pytest.raises(ValueError, match="x needs at least 5 rows"):
        split_qkv(torch.randn(5, 2, 64), HeadsOf(4, 2, 8, False), tables)
