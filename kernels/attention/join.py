"""Query, key and value, or their gradients, joined into one projection [.., .., (heads + 2 groups) * dim].

        interleaved        each group of heads has its queries, its key and its value:  [q.. k v] [q.. k v]
        ... not interleaved    all queries, then all keys, then all values:                 [Q; K; V]

    Attention returns its gradients with arbitrary strides, and three strided copies reach less than half of
    the bandwidth.  Here a program writes several heads of one token and reads each head from its own place.

Bytes per element of p bytes: 2 p.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


def tile(dtype: torch.dtype, heads: int, dim: int) -> Tile:
    """The tile of one program: heads of one token, with all of their elements."""
    return _narrowed(find("join_heads", dtype, heads * dim), heads, dim)


@for_each_shape
def _narrowed(block: Tile, heads: int, dim: int) -> Tile:
    width = power_of_two(dim)
    return block._replace(rows=min(power_of_two(heads), max(1, block.cols // width)), cols=width)


def reference(out: Tensor, query: Tensor, key: Tensor, value: Tensor, interleaved: bool) -> None:
    heads, groups, dim = query.shape[2], key.shape[2], query.shape[3]
    each = heads // groups
    if interleaved:
        grouped = out.unflatten(-1, (groups, each + 2, dim))
        grouped[..., :each, :] = query.unflatten(2, (groups, each))
        grouped[..., each, :] = key
        grouped[..., each + 1, :] = value
    else:
        torch.cat([query, key, value], 2, out=out.unflatten(-1, (-1, dim)))


@jit
def _join_kernel(
    out_ptr,  # packed projection [seq, batch, heads + 2 groups, DIM], any dtype
    query_ptr,  # [seq, batch, heads, DIM], same dtype; strides below are in elements, and 1 in DIM
    key_ptr,  # [seq, batch, groups, DIM], same dtype
    value_ptr,  # [seq, batch, groups, DIM], same dtype
    batch,  # size of the second dimension
    heads,  # of the query
    groups,  # heads of key and of value
    query_seq_stride,
    query_batch_stride,
    query_head_stride,
    key_seq_stride,
    key_batch_stride,
    key_head_stride,
    value_seq_stride,
    value_batch_stride,
    value_head_stride,
    DIM: tl.constexpr,  # elements of a head
    INTERLEAVED: tl.constexpr,  # order heads by group, each with its key and value
    BLOCK_HEADS: tl.constexpr,  # heads of the projection that one program writes
    BLOCK_DIM: tl.constexpr,  # DIM, rounded up to a power of two
):
    """Copy some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    at_seq, at_batch = token // batch, token % batch
    query_ptr += at_seq * query_seq_stride + at_batch * query_batch_stride
    key_ptr += at_seq * key_seq_stride + at_batch * key_batch_stride
    value_ptr += at_seq * value_seq_stride + at_batch * value_batch_stride

    slot = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    if INTERLEAVED:
        each = heads // groups
        at_key = (slot // (each + 2)).to(tl.int64)
        at_value = at_key
        at_query = at_key * each + slot % (each + 2)
        is_query, is_key = slot % (each + 2) < each, slot % (each + 2) == each
    else:
        at_query = slot.to(tl.int64)
        at_key = at_query - heads
        at_value = at_key - groups
        is_query, is_key = slot < heads, slot < heads + groups
    slots = heads + 2 * groups
    col = tl.arange(0, BLOCK_DIM)
    # Columns come before the choice: newer Tritons cannot see through it that the columns are contiguous.
    from_query = (query_ptr + at_query * query_head_stride)[:, None] + col[None, :]
    from_key = (key_ptr + at_key * key_head_stride)[:, None] + col[None, :]
    from_value = (value_ptr + at_value * value_head_stride)[:, None] + col[None, :]
    source = tl.where(is_query[:, None], from_query, tl.where(is_key[:, None], from_key, from_value))
    mask = (slot < slots)[:, None] & (col < DIM)[None, :]
    index = (token * slots + slot)[:, None] * DIM + col[None, :]
    tl.store(out_ptr + index, tl.load(source, mask), mask)


def launch(out: Tensor, query: Tensor, key: Tensor, value: Tensor, interleaved: bool) -> None:
    shape, groups = query.shape, key.shape[2]
    block = tile(query.dtype, shape[2] + 2 * groups, shape[3])
    strides = (query.stride(), key.stride(), value.stride())
    _prepared(shape, groups, strides, interleaved, block)(out, query, key, value)


@for_each_shape
def _prepared(
    shape: tuple[int, ...],
    groups: int,
    strides: tuple[tuple[int, ...], ...],
    interleaved: bool,
    block: Tile,
) -> PreparedKernel:
    """The kernel for one shape and layout.

    Args:
        shape: shape of the query.
        groups: heads of key and value.
        strides: strides of query, key and value.
        interleaved: whether each group of heads is stored as its queries, its key, its value.
        block: the tile of one program.
    """
    seq, batch, heads, dim = shape
    shapes = (shape, *[(seq, batch, groups, dim)] * 2)
    strides = tuple(_strides(each, its) for each, its in zip(shapes, strides, strict=True))
    return PreparedKernel(
        _join_kernel,
        (seq * batch, cdiv(heads + 2 * groups, block.rows)),
        *(batch, heads, groups, *chain(*strides), dim, interleaved, block.rows, block.cols),
        **block.options,
    )


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the first three dimensions; 0, a multiple of anything, for dimensions of size 1."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape[:3], strides, strict=False))


_join_heads = operator(
    "join_heads_(Tensor(a!) out, Tensor query, Tensor key, Tensor value, bool interleaved) -> ()",
    reference=reference,
    launch=launch,
)


def join_heads(query: Tensor, key: Tensor, value: Tensor, *, interleaved: bool) -> Tensor:
    """Copy three tensors of heads into one, [a, b, (heads + 2 groups) * dim], contiguous.

    Args:
        query: [a, b, heads, dim], where a and b are sequence and batch in either order; any dtype, any
            strides except that the last one is 1.
        key: [a, b, groups, dim], likewise; `groups` divides `heads`.
        value: the shape of `key`.
        interleaved: whether each group of heads is stored as its queries, its key, its value.

    Raises:
        ValueError: if shapes, strides, dtypes or devices do not fit.
    """
    if query.dim() != 4 or key.dim() != 4 or key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}; join_heads needs "
            "[a, b, heads, dim] and [a, b, groups, dim], where groups divides heads"
        )
    a, b, heads, dim = query.shape
    groups = key.shape[2]
    dtype, device = query.dtype, query.device
    for name, x, its_heads in (("query", query, heads), ("key", key, groups), ("value", value, groups)):
        shape = (a, b, its_heads, dim)
        if x.shape != shape or x.dtype != dtype or x.device != device or (dim > 1 and x.stride(3) != 1):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}; join_heads "
                f"needs {dtype} {shape} on {device}, the last dimension of stride 1"
            )
    out = query.new_empty(a, b, (heads + 2 * groups) * dim)
    _join_heads(out, query, key, value, interleaved)
    return out
