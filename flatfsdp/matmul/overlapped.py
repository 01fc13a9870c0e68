"""GEMMs that overlap with the all-gather of their input or the reduce-scatter of their result, over NVLink.

In:   operands, as in `gemms`, and the ranks that share their rows or addends.
Out:  the result of an all-gather and a GEMM, or of a GEMM and a reduce-scatter.
Next: `linear_map.py` calls these if there is nothing else to compute meanwhile.

torch.ops.symm_mem splits rows into one chunk per rank.  The copy engine copies a chunk from or to another
rank's memory while the previous or next chunk is multiplied.  GEMMs with fewer rows may add in another order,
and sums over ranks are in FP32 and rounded once, so results differ in the last digits from those of `gemms`
and NCCL; they are the same in every run.

PyTorch keeps one buffer per group in memory shared by all its GPUs: as large as the largest gathered rows, or
as two chunks.  NVLink multicast is not used; TORCH_SYMM_MEM_DISABLE_MULTICAST=1 keeps PyTorch from setting it
up.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import Operand
from flatfsdp.contract.recipe import SplitAccumulator


def is_available(device: torch.device) -> bool:
    """Whether a device supports this; elsewhere communication and GEMMs run one after the other."""
    return device.type == "cuda"


Gathered = tuple[Tensor, Operand]
"""The result of a GEMM, and its first operand with all ranks' rows, in the form that was sent."""


def gather_and_fprop(
    rows: Operand,
    weight: Operand,
    bias: Tensor | None,
    dtype: torch.dtype,
    split: SplitAccumulator,
    ranks: Ranks,
) -> Gathered:
    """Computes x w^T + b, [tokens, out], where each rank has `rows` of x."""
    second = _turned(weight.rowwise if weight.high is None else weight.high)
    return _gather_and_multiply(rows, second, weight.rowwise_inv, bias, dtype, split.fprop, ranks)


def gather_and_dgrad(
    rows: Operand, weight: Operand, dtype: torch.dtype, split: SplitAccumulator, ranks: Ranks
) -> Gathered:
    """Computes dy w, [tokens, in], where each rank has `rows` of dy."""
    second = _turned(weight.columnwise) if weight.high is None else weight.high
    return _gather_and_multiply(rows, second, weight.columnwise_inv, None, dtype, split.dgrad, ranks)


def fprop_and_scatter(
    x: Operand, weight: Operand, dtype: torch.dtype, split: SplitAccumulator, ranks: Ranks
) -> Tensor:
    """This rank's rows of the sum over ranks of x w^T, [tokens / ranks, out]."""
    if x.high is not None:
        return _ops().fused_matmul_reduce_scatter(x.high, _turned(weight.high), "sum", 0, ranks.name)
    assert x.rowwise is not None and weight.rowwise is not None
    shape = [x.rowwise.shape[0], weight.rowwise.shape[0]]
    return _ops().fused_scaled_matmul_reduce_scatter(
        *(x.rowwise, _turned(weight.rowwise), x.rowwise_inv, weight.rowwise_inv),
        *("sum", 0, 0, ranks.name, shape),
        out_dtype=dtype,
        use_fast_accum=not split.fprop,
    )


def _gather_and_multiply(
    rows: Operand,
    second: Tensor,
    second_inv: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    split: bool,
    ranks: Ranks,
) -> Gathered:
    """Multiplies the rows of all ranks by `second`, [k, n]."""
    if rows.high is not None:
        whole, (out,) = _ops().fused_all_gather_matmul(rows.high, [second], 0, ranks.name)
        return out if bias is None else out.add_(bias), Operand(high=whole)
    # FP8 GEMMs with an FP32 result support no bias.
    own_bias = None if dtype == torch.float32 else bias
    whole, (out,) = _ops().fused_all_gather_scaled_matmul(
        *(rows.rowwise, [second], rows.rowwise_inv, [second_inv], 0, ranks.name),
        *([own_bias], [None], [dtype], [not split]),
    )
    if bias is not None and own_bias is None:
        out.add_(bias)
    return out, rows._replace(rowwise=whole)


def _turned(weight: Tensor | None) -> Tensor:
    """A [k, n] view of [n, k]."""
    assert weight is not None
    return weight.t()


@cache
def _ops() -> Any:
    import torch.distributed._symmetric_memory

    return torch.ops.symm_mem
