"""Rotary position embedding, forward and backward, of queries or keys.

Each pair (a, b) of a head at position s rotates by an angle whose cosine and sine are in the tables:

    a' = a cos - b sin,  b' = b cos + a sin        the gradient rotates back: `inverse` flips the sign of sin

A pair is (x[i], x[i + n]) of the first 2 n elements of a head, or (x[2 i], x[2 i + 1]) if `interleaved`; n is
the width of the tables.  Elements after the first 2 n are unchanged.  Su et al., RoFormer (2021); halves as
in GPT-NeoX, interleaved as in GPT-J.

Bytes per element of p bytes: 2 p, in place or not; the tables add 4 / heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import HIGH_DTYPES, check_like
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl


def tile(dtype: torch.dtype, heads: int, pairs: int) -> Tile:
    """The tile of one program: heads of one token, with all of their pairs."""
    return _narrowed(find("rope", dtype, heads * pairs), heads, pairs)


@for_each_shape
def _narrowed(block: Tile, heads: int, pairs: int) -> Tile:
    width = power_of_two(pairs)
    rows = min(power_of_two(heads), max(1, block.cols // width))
    return block._replace(rows=rows, cols=width, warps=min(block.warps, max(1, rows * width // 512)))


def reference(
    out: Tensor,
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch_first: bool,
    interleaved: bool,
    inverse: bool,
) -> None:
    source = out if x is None else x
    seq, pairs = source.shape[1 if batch_first else 0], cos.shape[1]
    shape = (1, seq, 1, pairs) if batch_first else (seq, 1, 1, pairs)
    cosine, sine = cos[:seq].view(shape), sin[:seq].view(shape)
    if inverse:
        sine = -sine
    value = source[..., : 2 * pairs].float()
    a, b = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, -1)
    turned = (a * cosine - b * sine, b * cosine + a * sine)
    out[..., : 2 * pairs] = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    if x is not None:
        out[..., 2 * pairs :] = x[..., 2 * pairs :]


@jit
def _rope_kernel(
    x_ptr,  # input [seq, batch, heads, dim], FP32, fp16 or bf16; strides below are in elements, and 1 in dim
    out_ptr,  # result, like x; may be x itself
    cos_ptr,  # cosine of each position and pair [seq, PAIRS], FP32
    sin_ptr,  # sine, likewise
    batch,  # size of the second dimension
    heads,
    x_seq_stride,
    x_batch_stride,
    x_head_stride,
    out_seq_stride,
    out_batch_stride,
    out_head_stride,
    PAIRS: tl.constexpr,  # pairs of a head that turn
    TAIL: tl.constexpr,  # elements behind them that are copied; 0 in place
    INTERLEAVED: tl.constexpr,  # pairs are neighbours; otherwise halves
    INVERSE: tl.constexpr,  # turn back
    BLOCK_HEADS: tl.constexpr,  # heads of one token that one program takes
    BLOCK_PAIRS: tl.constexpr,  # PAIRS, rounded up to a power of two
    BLOCK_TAIL: tl.constexpr,  # TAIL, likewise
):
    """Rotate some heads of one token."""
    at_seq = (tl.program_id(0) // batch).to(tl.int64)
    at_batch = (tl.program_id(0) % batch).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    x_ptr += at_seq * x_seq_stride + at_batch * x_batch_stride
    out_ptr += at_seq * out_seq_stride + at_batch * out_batch_stride
    x_head = (head * x_head_stride)[:, None]
    out_head = (head * out_head_stride)[:, None]
    head_mask = (head < heads)[:, None]

    pair = tl.arange(0, BLOCK_PAIRS)
    cos = tl.load(cos_ptr + at_seq * PAIRS + pair, pair < PAIRS, 0.0)[None, :]
    sin = tl.load(sin_ptr + at_seq * PAIRS + pair, pair < PAIRS, 0.0)[None, :]
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
        mask = head_mask & (both < 2 * PAIRS)
        x = tl.load(x_ptr + x_head + both, mask, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [BLOCK_HEADS, BLOCK_PAIRS, 2]))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
        turned = tl.reshape(turned, [BLOCK_HEADS, 2 * BLOCK_PAIRS])
        tl.store(out_ptr + out_head + both, turned.to(out_ptr.dtype.element_ty), mask)
    else:
        mask = head_mask & (pair < PAIRS)[None, :]
        a = tl.load(x_ptr + x_head + pair[None, :], mask, 0.0).to(tl.float32)
        b = tl.load(x_ptr + x_head + PAIRS + pair[None, :], mask, 0.0).to(tl.float32)
        first = (a * cos - b * sin).to(out_ptr.dtype.element_ty)
        second = (b * cos + a * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_head + pair[None, :], first, mask)
        tl.store(out_ptr + out_head + PAIRS + pair[None, :], second, mask)
    if TAIL > 0:
        rest = tl.arange(0, BLOCK_TAIL)[None, :]
        mask = head_mask & (rest < TAIL)
        tail = tl.load(x_ptr + x_head + 2 * PAIRS + rest, mask)
        tl.store(out_ptr + out_head + 2 * PAIRS + rest, tail, mask)


def launch(
    out: Tensor,
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    batch_first: bool,
    interleaved: bool,
    inverse: bool,
) -> None:
    source = out if x is None else x
    seq, batch, heads, dim = source.shape
    seq_stride, batch_stride, head_stride, _ = source.stride()
    out_seq_stride, out_batch_stride, out_head_stride, _ = out.stride()
    if batch_first:
        seq, batch = batch, seq
        seq_stride, batch_stride = batch_stride, seq_stride
        out_seq_stride, out_batch_stride = out_batch_stride, out_seq_stride
    pairs = cos.shape[1]
    tail = 0 if x is None else dim - 2 * pairs
    strides = (seq_stride, batch_stride, head_stride, out_seq_stride, out_batch_stride, out_head_stride)
    form = (pairs, tail, interleaved, inverse)
    block = tile(source.dtype, heads, pairs)
    _prepared(seq, batch, heads, strides, form, block)(source, out, cos, sin)


@for_each_shape
def _prepared(
    seq: int,
    batch: int,
    heads: int,
    strides: tuple[int, ...],
    form: tuple[int, int, bool, bool],
    block: Tile,
) -> PreparedKernel:
    """The kernel for one shape and layout.

    Args:
        seq: length of the sequence.
        batch: number of sequences.
        heads: number of heads.
        strides: strides of sequence, batch and heads, first of the source and then of the result.
        form: pairs, elements after them, whether pairs are interleaved, whether angles are negated.
        block: the tile of one program.
    """
    tail = form[1]
    return PreparedKernel(
        _rope_kernel,
        (seq * batch, cdiv(heads, block.rows)),
        *(batch, heads, *strides, *form, block.rows, block.cols, power_of_two(tail)),
        **block.options,
    )


_rope = operator(
    "rope_(Tensor(a!) out, Tensor? x, Tensor cos, Tensor sin, bool batch_first, bool interleaved, "
    "bool inverse) -> ()",
    reference=reference,
    launch=launch,
)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    batch_first: bool = False,
    interleaved: bool = False,
    inverse: bool = False,
    in_place: bool = False,
) -> Tensor:
    """Rotate queries or keys by their positions, or their gradients back.

    Args:
        x: [seq, batch, heads, dim], or [batch, seq, heads, dim] if `batch_first`; FP32, FP16 or bf16.  Only
            its last stride has to be 1, so it may be a slice of a packed projection.
        cos: FP32 [at least seq, n], contiguous; the first 2 n <= dim elements of each head are rotated.
        sin: the shape of `cos`.
        batch_first: whether the batch is the first dimension.
        interleaved: pairs are neighbouring elements instead of one from each half.
        inverse: rotate by the negative angle, for the gradient.
        in_place: write into x and return it; otherwise return a contiguous tensor.

    Raises:
        ValueError: if shapes, strides or dtypes do not fit.
    """
    if x.dim() != 4 or x.dtype not in HIGH_DTYPES or x.stride(3) != 1:
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}; rope needs 4 dimensions, "
            "the last of stride 1, in FP32, FP16 or bf16"
        )
    seq, dim = x.shape[1 if batch_first else 0], x.shape[3]
    if cos.dim() != 2 or cos.shape[0] < seq or not 0 < 2 * cos.shape[1] <= dim:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)}; x needs at least {seq} rows of 1 to {dim // 2} columns"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_like(name, table, x, (cos.shape[0], cos.shape[1]), torch.float32)
    out = x if in_place else x.new_empty(x.shape)
    _rope(out, None if in_place else x, cos, sin, batch_first, interleaved, inverse)
    return out
