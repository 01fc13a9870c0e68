"""Lists of tensors as kernels take them: one table of addresses and sizes, on the device.

So one compiled kernel serves lists of any length.  The blocks of all tensors are numbered consecutively; a
program counts the tensors that start at or before its block, which is one load of n numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from itertools import accumulate as running_sums
from itertools import chain
from operator import or_

import torch
from torch import Tensor

from flatfsdp.kernels.shared.triton import jit, tl

LOAD_BYTES = 16
"""Width of the widest load; tensors that start at multiples of it are read and written at full speed."""


def device_table(
    fields: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Make a table [fields, n] on `device` without waiting for the device.

    On CUDA it goes through pinned memory, copied on the current stream.  The pinned tensor need not be kept:
    PyTorch's host allocator reuses its memory only after the copy.  The table may be dropped after a launch
    on the same stream, like any temporary.  Do not capture this in a CUDA graph, which would repeat the copy
    from memory that is reused by then.
    """
    table = torch.tensor(fields, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def kept_table(fields: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A `device_table` that is kept for later calls with the same fields.

    In a training loop the same tensors have the same addresses again, and making a table takes the host
    longer than launching a kernel.  Each stream has its own, because other streams do not wait for the copy.
    While a CUDA graph is captured, the copy is made immediately on another stream, and the table is kept for
    good, because replays read it.
    """
    rows = tuple(map(tuple, fields))
    if device.type != "cuda":
        return _kept_table(rows, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return _table_of_graphs(rows, device)
    return _kept_table(rows, device, torch._C._cuda_getCurrentRawStream(device.index))


@lru_cache(maxsize=1024)
def _kept_table(fields: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    return device_table(fields, device)


@cache
def _table_of_graphs(fields: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    # The one stream that is never captured; others come from a pool, and may be part of the capture.
    beside = torch.cuda.default_stream(device)
    with torch.cuda.stream(beside):
        table = device_table(fields, device)
    beside.synchronize()
    return table


def first_blocks(counts: Sequence[int]) -> tuple[list[int], int]:
    """The number of each tensor's first block, if all blocks are numbered consecutively, and their count."""
    ends = list(running_sums(counts))
    return [0, *ends[:-1]], ends[-1]


def is_aligned(*tensors: Tensor) -> bool:
    """Whether all tensors start at multiples of the widest load."""
    return are_aligned([tensor.data_ptr() for tensor in tensors])


def are_aligned(*rows: Sequence[int]) -> bool:
    """Whether all numbers, addresses or sizes, are multiples of the widest load."""
    return reduce(or_, chain(*rows), 0) % LOAD_BYTES == 0


@jit
def tensor_of_block(
    first_blocks_ptr,  # number of each tensor's first block [n], int64: the first row of a table
    n,  # number of tensors
    block,  # number of a block
    N_POW2: tl.constexpr,  # n, rounded up to a power of two
):
    """The index of the tensor to which a block belongs."""
    index = tl.arange(0, N_POW2)
    start = tl.load(first_blocks_ptr + index, index < n, 0)
    return tl.sum(((index < n) & (start <= block)).to(tl.int32)) - 1
