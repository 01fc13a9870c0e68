"""Casts of many weights' shards to FP8, one scale per weight: amaxes, then the cast, each in one launch.

For each of n tensors, `rounded(x)` being float(x to bf16), or to whatever a layer computes in:

    max_abs_many:  amax[i]   = max(amax[i], max |rounded(source)|);  NaN wins
    cast_many:     target[i] = clamp(rounded(source) * scale[i], -max, max) to FP8;  NaN stays NaN

A shard may end anywhere in a weight, so a rank has pieces of weights: it finds their amaxes, the ranks reduce
them, and each casts its own pieces by the same scales.  Rounding first gives the bits of a layer that casts
its own weight: those of `cast.max_abs` and `cast.cast` on the rounded tensor.

Bytes per element, source of p bytes: p for the amax, p + 1 for the cast.

Addresses and sizes are passed in one table (`kept_table`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.outputs import (
    FP8_DTYPES,
    HIGH_DTYPES,
    check_like,
    magnitude_bits,
    raise_amax,
    saturate,
    write_outputs,
)
from flatfsdp.kernels.shared.tables import are_aligned, first_blocks, kept_table, tensor_of_block
from flatfsdp.kernels.shared.tiles import Tile, find, power_of_two
from flatfsdp.kernels.shared.triton import PreparedKernel, cdiv, for_each_shape, jit, tl, triton_dtype


def max_abs_reference(amax: Tensor, tensors: list[Tensor], through: torch.dtype) -> None:
    for slot, tensor in zip(amax, tensors, strict=True):
        write_outputs(tensor.to(through).float(), None, None, None, None, slot)


@jit
def _max_abs_block(tensor_ptr, offset, mask):
    """The `magnitude_bits` of the largest element in a block."""
    return tl.max(magnitude_bits(tl.load(tensor_ptr + offset, mask, 0.0).to(tl.float32)))


@jit
def _max_abs_many_kernel(
    amax_ptr,  # amax of each tensor [n], FP32, raised in place
    table_ptr,  # [3, n], int64: number of each tensor's first block, address, elements
    n,  # number of tensors
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    DTYPE: tl.constexpr,  # dtype of the tensors
    THROUGH: tl.constexpr,  # dtype that elements are rounded to first
    ALIGNED: tl.constexpr,  # all addresses are multiples of 16
    BLOCK: tl.constexpr,  # elements of one program
):
    """Raise an amax by one block of its tensor."""
    # From the end: what the optimizer wrote last is still in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor = tensor_of_block(table_ptr, n, block, N_POW2)
    row_ptr = table_ptr + tensor
    start = (block - tl.load(row_ptr)) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    tensor_ptr = tl.load(row_ptr + n).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # Triton derives this for arguments, but not for loaded addresses.
        tensor_ptr = tl.multiple_of(tensor_ptr, 16)
    numel = tl.load(row_ptr + 2 * n)
    if start + BLOCK <= numel:
        # With a uniform mask, loads are as wide as possible.
        largest = _max_abs_block(tensor_ptr, offset, tl.full([BLOCK], 1, tl.int1))
    else:
        largest = _max_abs_block(tensor_ptr, offset, offset < numel)
    # Rounding is monotonic, so it is enough to round the largest.
    rounded = largest.to(tl.float32, bitcast=True).to(THROUGH).to(tl.float32)
    raise_amax(amax_ptr + tensor, magnitude_bits(rounded))


def max_abs_launch(amax: Tensor, tensors: list[Tensor], through: torch.dtype) -> None:
    tile = find("max_abs_many", torch.float32, 1)
    sizes = [tensor.numel() for tensor in tensors]
    starts, blocks = first_blocks([cdiv(size, tile.cols) for size in sizes])
    fields = [starts, [tensor.data_ptr() for tensor in tensors], sizes]
    dtype, n = tensors[0].dtype, len(tensors)
    start = _prepared_max_abs(blocks, n, dtype, through, are_aligned(fields[1]), tile)
    start(amax, kept_table(fields, amax.device))


@for_each_shape
def _prepared_max_abs(
    blocks: int, n: int, dtype: torch.dtype, through: torch.dtype, aligned: bool, tile: Tile
) -> PreparedKernel:
    return PreparedKernel(
        _max_abs_many_kernel,
        (blocks,),
        *(n, power_of_two(n), triton_dtype(dtype), triton_dtype(through), aligned, tile.cols),
        **tile.options,
    )


_max_abs_many = operator(
    "max_abs_many_(Tensor(a!) amax, Tensor[] tensors, ScalarType through) -> ()",
    reference=max_abs_reference,
    launch=max_abs_launch,
)


def max_abs_many(tensors: Sequence[Tensor], amax: Tensor, *, through: torch.dtype) -> None:
    """Raise each amax to the largest magnitude in its tensor, in place: one launch on CUDA.

    Bit-equal to `cast.max_abs` on each `tensor.to(through)`.

    Args:
        tensors: [numel] each, any of them possibly empty; contiguous, of one dtype, FP32, bf16 or fp16.
        amax: FP32 [len(tensors)], never negative; amax[i] is raised to max |tensors[i]| if that is larger,
            and becomes NaN if tensors[i] holds one.
        through: dtype that elements are rounded to first: torch.bfloat16, float16, or float32 for no
            rounding.

    Raises:
        ValueError: if a tensor's dtype, shape, device or layout does not fit.
    """
    _check_rounding(through)
    if not tensors:
        return
    _check_vectors("tensors", tensors, HIGH_DTYPES, tensors[0].device)
    check_like("amax", amax, tensors[0], (len(tensors),), torch.float32)
    _max_abs_many(amax, list(tensors), through)


def cast_reference(scale: Tensor, sources: list[Tensor], targets: list[Tensor], through: torch.dtype) -> None:
    for factor, source, target in zip(scale, sources, targets, strict=True):
        write_outputs(source.to(through).float(), None, target, None, factor, None)


@jit
def _cast_block(source_ptr, target_ptr, scale, offset, mask, THROUGH: tl.constexpr):
    """Cast a block, at `offset` from both pointers."""
    source = tl.load(source_ptr + offset, mask, 0.0).to(tl.float32)
    scaled = source.to(THROUGH).to(tl.float32) * scale
    tl.store(target_ptr + offset, saturate(scaled, target_ptr.dtype.element_ty), mask)


@jit
def _cast_many_kernel(
    scale_ptr,  # scale of each tensor [n], FP32
    table_ptr,  # [4, n], int64: number of each tensor's first block, source, target, elements
    n,  # number of tensors
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
    SOURCE: tl.constexpr,  # dtype of the sources
    TARGET: tl.constexpr,  # dtype of the targets, an FP8 format
    THROUGH: tl.constexpr,  # dtype that elements are rounded to first
    ALIGNED: tl.constexpr,  # all addresses are multiples of 16
    BLOCK: tl.constexpr,  # elements of one program
):
    """Cast one block of one source."""
    block = tl.program_id(0)
    tensor = tensor_of_block(table_ptr, n, block, N_POW2)
    row_ptr = table_ptr + tensor
    start = (block - tl.load(row_ptr)) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    source_ptr = tl.load(row_ptr + n).to(tl.pointer_type(SOURCE))
    target_ptr = tl.load(row_ptr + 2 * n).to(tl.pointer_type(TARGET))
    if ALIGNED:
        # Triton derives this for arguments, but not for loaded addresses.
        source_ptr = tl.multiple_of(source_ptr, 16)
        target_ptr = tl.multiple_of(target_ptr, 16)
    numel = tl.load(row_ptr + 3 * n)
    scale = tl.load(scale_ptr + tensor)
    if start + BLOCK <= numel:
        # With a uniform mask, loads are as wide as possible.
        _cast_block(source_ptr, target_ptr, scale, offset, tl.full([BLOCK], 1, tl.int1), THROUGH)
    else:
        _cast_block(source_ptr, target_ptr, scale, offset, offset < numel, THROUGH)


def cast_launch(scale: Tensor, sources: list[Tensor], targets: list[Tensor], through: torch.dtype) -> None:
    tile = find("cast_many", torch.float32, 1)
    sizes = [source.numel() for source in sources]
    starts, blocks = first_blocks([cdiv(size, tile.cols) for size in sizes])
    fields = [
        starts,
        [source.data_ptr() for source in sources],
        [target.data_ptr() for target in targets],
        sizes,
    ]
    dtypes = (sources[0].dtype, targets[0].dtype, through)
    start = _prepared_cast(blocks, len(sources), dtypes, are_aligned(*fields[1:3]), tile)
    start(scale, kept_table(fields, scale.device))


@for_each_shape
def _prepared_cast(
    blocks: int, n: int, dtypes: tuple[torch.dtype, ...], aligned: bool, tile: Tile
) -> PreparedKernel:
    return PreparedKernel(
        _cast_many_kernel,
        (blocks,),
        *(n, power_of_two(n), *map(triton_dtype, dtypes), aligned, tile.cols),
        **tile.options,
    )


_cast_many = operator(
    "cast_many_(Tensor scale, Tensor[] sources, Tensor(a!)[] targets, ScalarType through) -> ()",
    reference=cast_reference,
    launch=cast_launch,
)


def cast_many(
    sources: Sequence[Tensor], targets: Sequence[Tensor], scale: Tensor, *, through: torch.dtype
) -> None:
    """Cast each source to its FP8 target, in place: one launch on CUDA.

    Bit-equal to `cast.cast` on each `source.to(through)`.

    Args:
        sources: [numel] each, any of them possibly empty; contiguous, of one dtype, FP32, bf16 or fp16.
        targets: contiguous and of their sources' shapes; all torch.float8_e4m3fn or all torch.float8_e5m2.
        scale: FP32 [len(sources)]; targets[i] is sources[i] times scale[i].
        through: dtype that elements are rounded to first: torch.bfloat16, float16, or float32 for no
            rounding.

    Raises:
        ValueError: if the lists differ in length, or a tensor's dtype, shape, device or layout does not fit.
    """
    if len(sources) != len(targets):
        raise ValueError(
            f"cast_many got {len(sources)} sources and {len(targets)} targets; each source needs a target"
        )
    _check_rounding(through)
    if not sources:
        return
    device = sources[0].device
    _check_vectors("sources", sources, HIGH_DTYPES, device)
    _check_vectors("targets", targets, FP8_DTYPES, device)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.numel() != target.numel():
            raise ValueError(
                f"targets[{index}] has {target.numel()} elements, but sources[{index}] has {source.numel()}; "
                "cast_many needs the same number"
            )
    check_like("scale", scale, sources[0], (len(sources),), torch.float32)
    _cast_many(scale, list(sources), list(targets), through)


def _check_rounding(through: torch.dtype) -> None:
    if through not in HIGH_DTYPES:
        raise ValueError(f"through is {through}; elements are rounded to torch.bfloat16, float16 or float32")


def _check_vectors(
    name: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    dtype = tensors[0].dtype
    if dtype not in dtypes:
        raise ValueError(f"{name}[0] is {dtype}; it must be {' or '.join(map(str, dtypes))}")
    for index, tensor in enumerate(tensors):
        is_like_first = tensor.dtype == dtype and tensor.device == device
        if not is_like_first or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}[{index}] is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()} on {tensor.device}; it must be contiguous, one-dimensional, and {dtype} "
                f"like {name}[0], on {device}"
            )
