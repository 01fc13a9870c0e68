"""The linear primitive: what `Linear`, `LayerNormLinear` and `LayerNormMLP` are made of.

In:   the input as an `Operand` (a norm or an activation may have cast it already), weight and bias.
Out:  forward the result, and what to save; backward the gradients of input, weight and bias.
Next: `layers/` composes it with norms and activations inside one autograd Function each.

    forward    x -> Operand    (cast here, or by the kernel that made x)
               w -> Operand    once a call, or once a step (`WeightCache.operand`)
               y = x w^T + b
    saved      x for wgrad, w for dgrad: FP8, one byte an element each; a bf16 weight itself
    backward   dy -> Operand   (cast, transposed and summed for the bias in one pass)
               dx = dy w,  dw = dy^T x, accumulated into main_grad or returned

What the ranks of a tensor-parallel layer send each other (`Exchange`) is on its way during a GEMM where
one is left to compute:

    forward    x gathered, y = x w^T, y summed
    backward   dy gathered, dx = dy w during x gathered once more, dw = dy^T x during dx summed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatfsdp.comm.collectives import Pending
from flatfsdp.contract.joint import Wanted, wanted_grads
from flatfsdp.contract.main_grad import claim
from flatfsdp.contract.operand import Operand
from flatfsdp.fp8.quantizers import Quantized, Quantizer
from flatfsdp.fp8.recipe import SplitAccumulator
from flatfsdp.kernels.cast.column_sum import column_sum as sum_columns
from flatfsdp.matmul import gemms, overlapped
from flatfsdp.matmul.delayed_wgrad import DelayedWgrads
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.gathered_rows import RowsUnderWay

FuseWgrad = bool | Literal["two_pass", "if_claimed"]
"""Whether a layer adds its weight gradient to main_grad itself.

"two_pass": in an FP32 GEMM and an addition, for comparison, rather than in the GEMM.  "if_claimed": where
FlatFSDP has the weight when the layer is called, and not in a plain model.
"""


def checked_fuse_wgrad(value: FuseWgrad, layer: str) -> FuseWgrad:
    """The value, checked.

    Raises:
        ValueError: if it is none of the four.
    """
    if value not in (True, False, "two_pass", "if_claimed"):
        raise ValueError(
            f"{layer}: fuse_wgrad_accumulation is {value!r}; it must be True, False, 'two_pass' or "
            "'if_claimed'"
        )
    return value


@dataclass(slots=True)
class LinearCall:
    """One call of one linear map; what forward and backward need besides tensors.

    Attributes:
        name: of the weight, for messages.
        weight: the parameter to whose main_grad, or later `.grad`, the gradient goes; None: autograd gets it.
        dtype: of activations and their gradients.
        exchange: what is gathered and summed over tensor-parallel ranks.
        quantizer: of x; of all its rows, where they are gathered.
        grad_quantizer: makes the quantizer of dy, when backward comes to it.
        stored_weight: gives the weight as FlatFSDP keeps it, when backward comes to it; None: it is saved.
        needs_input_grad, needs_weight_grad: what is to be computed in backward.
        bias_grad: dtype of the bias's gradient; None: it is not to be computed.
        delayed: takes the weight's gradient, until `backward_dw`; None: it is computed in backward.
        transposed: whether the weight is [in, out], and so is its gradient.
        overlaps: whether GEMMs that wait for something sent begin with its first chunk.
        keeps_gathered: whether gathered rows of x are kept for backward, not gathered once more.
    """

    name: str
    weight: Tensor | None
    weight_dtype: torch.dtype
    dtype: torch.dtype
    split: SplitAccumulator
    exchange: Exchange
    quantizer: Quantizer
    grad_quantizer: Callable[[], Quantizer]
    fuse_wgrad: bool | Literal["two_pass"]
    is_first_microbatch: bool | None
    stored_weight: Callable[[], Operand] | None
    needs_input_grad: bool
    needs_weight_grad: bool
    bias_grad: torch.dtype | None
    delayed: DelayedWgrads | None = None
    transposed: bool = False
    overlaps: bool = False
    keeps_gathered: bool = False

    @property
    def input_quantizer(self) -> Quantizer:
        """The quantizer of the rows of x that this rank has."""
        return self.quantizer.for_rows(self.exchange.ranks) if self.exchange.gathers_input else self.quantizer

    @property
    def wants_columnwise_input(self) -> bool:
        """Whether the cast of x is to make what wgrad reads, which after a gather is made of all rows."""
        return self.needs_weight_grad and not self.exchange.gathers_input

    def again(self) -> LinearCall:
        """For computing the same once more, in backward: no amax is recorded again."""
        return replace(self, quantizer=self.quantizer.silent(), keeps_gathered=True)


class LinearSaved(NamedTuple):
    """What backward reads.

    Attributes:
        x: for wgrad, or this rank's rows of it; empty if the weight gets no gradient.
        weight: for dgrad; empty if the input gets no gradient, or if FlatFSDP keeps the weight.
    """

    x: Operand
    weight: Operand

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """For `ctx.save_for_backward`."""
        return (*self.x, *self.weight)

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> LinearSaved:
        """The same again, from what `ctx.saved_tensors` gives back of `tensors`."""
        middle = len(tensors) // 2
        return LinearSaved(Operand(*tensors[:middle]), Operand(*tensors[middle:]))


def linear_forward(
    x: Operand, weight: Operand, bias: Tensor | None, call: LinearCall
) -> tuple[Tensor, LinearSaved]:
    """x w^T + b, [tokens, out] in call.dtype.

    Args:
        x: cast by call.input_quantizer.
    """
    nothing = Operand()
    added = None if bias is None else bias.to(call.dtype)
    out, saved_x = _multiply(x, weight, added, call)
    return out, LinearSaved(
        saved_x if call.needs_weight_grad else nothing,
        weight.for_backward if call.needs_input_grad and call.stored_weight is None else nothing,
    )


def _multiply(x: Operand, weight: Operand, bias: Tensor | None, call: LinearCall) -> tuple[Tensor, Operand]:
    """The result, and what is kept of x for wgrad."""
    exchange, dtype, split = call.exchange, call.dtype, call.split
    if exchange.gathers_input:
        columnwise = call.keeps_gathered and call.needs_weight_grad
        if call.overlaps:
            out, gathered = overlapped.gather_and_fprop(x, weight, bias, dtype, split, exchange.ranks)
            whole = call.quantizer.of_rows(gathered, rowwise=True, columnwise=columnwise)
        else:
            whole = RowsUnderWay.start(x, call.quantizer, exchange).wait(rowwise=True, columnwise=columnwise)
            out = gemms.fprop(whole, weight, bias, dtype, split)
        return out, whole.for_backward if call.keeps_gathered else x
    if not exchange.sums_output:
        return gemms.fprop(x, weight, bias, dtype, split), x.for_backward
    if call.overlaps:
        out = overlapped.fprop_and_scatter(x, weight, dtype, split, exchange.ranks)
    else:
        out = exchange.start_sum(gemms.fprop(x, weight, None, dtype, split)).wait()
    # All ranks have the same bias, which is added once.
    return out if bias is None else out.add_(bias), x.for_backward


def quantize_grad(dy: Tensor, call: LinearCall) -> Quantized:
    """dy [tokens, out] as an Operand, empty if no GEMM needs it, and its column sums for the bias.

    Where ranks have rows of dy each, so do the operand and the sums.
    """
    dy = dy.contiguous()
    rowwise, columnwise = call.needs_input_grad, call.needs_weight_grad
    if not (rowwise or columnwise):
        return Quantized(Operand(), None if call.bias_grad is None else sum_columns(dy, call.bias_grad))
    quantizer = call.grad_quantizer()
    if call.exchange.gathers_grad:
        quantizer, rowwise, columnwise = quantizer.for_rows(call.exchange.ranks), True, False
    return quantizer.cast(dy, rowwise=rowwise, columnwise=columnwise, column_sum=call.bias_grad)


class LinearGrads(NamedTuple):
    """What backward returns; None: not needed.

    Attributes:
        x: [tokens, in], in call.dtype.
        weight: [out, in], or [in, out], in the weight's dtype; None once it is in main_grad.
        bias: [out], in the bias's dtype.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_backward(dy: Quantized, saved: LinearSaved, call: LinearCall) -> LinearGrads:
    """Gradients of input, weight and bias; the last one is in `dy`."""
    operand, dbias = dy
    gathering = dx = dweight = None
    if call.needs_weight_grad and call.exchange.gathers_input and not call.keeps_gathered:
        gathering = RowsUnderWay.start(saved.x, call.quantizer, call.exchange)
    if call.exchange.gathers_grad and (call.needs_input_grad or call.needs_weight_grad):
        operand, dx = _gather_and_start_input_grad(operand, saved, call)
    elif call.needs_input_grad:
        dx = _start_input_grad(operand, saved, call)
    if call.needs_weight_grad:
        x = saved.x if gathering is None else gathering.wait(rowwise=False, columnwise=True)
        dweight = weight_grad(operand, x, call)
    return LinearGrads(None if dx is None else dx.wait(), dweight, dbias)


def _start_input_grad(dy: Operand, saved: LinearSaved, call: LinearCall) -> Pending:
    dx = gemms.dgrad(dy, _weight(saved, call), call.dtype, call.split)
    return call.exchange.start_sum(dx) if call.exchange.sums_input_grad else Pending(dx, None)


def _gather_and_start_input_grad(
    rows: Operand, saved: LinearSaved, call: LinearCall
) -> tuple[Operand, Pending | None]:
    """dy of all ranks' rows, for wgrad, and dx if that is needed."""
    quantizer, exchange = call.grad_quantizer(), call.exchange
    rowwise, columnwise = call.needs_input_grad, call.needs_weight_grad
    if call.overlaps and rowwise:
        dx, gathered = overlapped.gather_and_dgrad(
            rows, _weight(saved, call), call.dtype, call.split, exchange.ranks
        )
        return quantizer.of_rows(gathered, rowwise=False, columnwise=columnwise), Pending(dx, None)
    dy = RowsUnderWay.start(rows, quantizer, exchange).wait(rowwise=rowwise, columnwise=columnwise)
    return dy, _start_input_grad(dy, saved, call) if rowwise else None


def _weight(saved: LinearSaved, call: LinearCall) -> Operand:
    return saved.weight if call.stored_weight is None else call.stored_weight()


def weight_grad(dy: Operand, x: Operand, call: LinearCall) -> Tensor | None:
    """The weight's gradient; None: it is in main_grad, left for later, or this backward asks for none."""
    wanted = Wanted.ALL if call.weight is None else wanted_grads(call.weight)
    if wanted is Wanted.NONE:
        return None
    # Of a weight [in, out] it is x^T dy.
    left, right = (x, dy) if call.transposed else (dy, x)
    if wanted is Wanted.SOME:
        # autograd gives those parts of a joint their gradients that it is asked for.
        return gemms.wgrad(left, right, call.weight_dtype, call.split)
    if call.delayed is not None:
        call.delayed.put(call.name, partial(_compute_weight_grad, left, right, call))
        return None
    return _compute_weight_grad(left, right, call)


def _compute_weight_grad(left: Operand, right: Operand, call: LinearCall) -> Tensor | None:
    """left^T right, accumulated into main_grad, or returned."""
    if not call.fuse_wgrad:
        return gemms.wgrad(left, right, call.weight_dtype, call.split)
    assert call.weight is not None
    slot = claim(call.weight, call.name, call.is_first_microbatch)
    gemms.accumulate_wgrad(
        slot.target,
        left,
        right,
        call.split,
        first=slot.first,
        two_passes=call.fuse_wgrad == "two_pass",
    )
    return None
