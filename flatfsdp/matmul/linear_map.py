"""The linear primitive, of which `Linear`, `LayerNormLinear` and `LayerNormMLP` are made.

In:   the input as an `Operand` (a norm or an activation may have cast it already), weight and bias.
Out:  forward: the result, and what to save; backward: the gradients of input, weight and bias.
Next: `layers/` composes it with norms and activations inside one autograd Function each.

    forward    x -> Operand    (cast here, or by the kernel that made x)
                              w -> Operand    once per call, or once per step (`WeightCache.operand`)
               y = x w^T + b
        saved      x for wgrad, w for dgrad: in FP8 one byte per element each; a bf16 weight itself
    backward   dy -> Operand   (cast, transposed and summed for the bias in one pass)
               dx = dy w,  dw = dy^T x, accumulated into main_grad or returned

Tensor-parallel communication (`Exchange`) overlaps with a GEMM if one is left to compute:

        forward    gather x, y = x w^T, sum y
        backward   gather dy, dx = dy w while x is gathered again, dw = dy^T x while dx is summed
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from flatfsdp.comm.collectives import Pending
from flatfsdp.contract.main_grad import claim
from flatfsdp.contract.operand import Operand
from flatfsdp.contract.packed import Wanted, wanted_grads
from flatfsdp.contract.recipe import SplitAccumulator
from flatfsdp.fp8.quantizers import Quantized, Quantizer
from flatfsdp.kernels.cast.column_sum import column_sum as sum_columns
from flatfsdp.matmul import gemms, overlapped
from flatfsdp.matmul.exchange import Exchange

FuseWgrad = bool | Literal["two_pass", "if_claimed"]
"""Whether a layer adds its weight gradient to main_grad itself.

True: in the GEMM.  "two_pass": by an FP32 GEMM and an addition, for comparison.  "if_claimed": True if
FlatFSDP manages the weight when the layer is called, and False in a plain model.
"""


def checked_fuse_wgrad(value: FuseWgrad, layer: str) -> FuseWgrad:
    """Returns the value after checking it.

    Raises:
        ValueError: if it is none of the four.
    """
    if value not in (True, False, "two_pass", "if_claimed"):
        raise ValueError(
            f"{layer}: fuse_wgrad_accumulation is {value!r}, not True, False, 'two_pass' or 'if_claimed'"
        )
    return value


Wgrad = Callable[[], Tensor | None]
"""Computes the gradient and returns it, or adds it to main_grad and returns None."""


class DelayedWgrads:
    """A layer's deferred weight gradients, by the weights' names in messages, the oldest first.

    A pipeline schedule can fill bubbles with these GEMMs, because nothing before the optimizer needs them.
    Their operands are kept until then, and their results have the same bits.
    """

    def __init__(self) -> None:
        self._wgrads: defaultdict[str, deque[Wgrad]] = defaultdict(deque)

    def put(self, name: str, wgrad: Wgrad) -> None:
        """Defers a gradient."""
        self._wgrads[name].append(wgrad)

    @torch.no_grad()
    def compute_oldest(self, name: str, weight: nn.Parameter) -> None:
        """Computes the oldest gradient of a weight.

        Raises:
            RuntimeError: if there is none.
        """
        if not self._wgrads[name]:
            raise RuntimeError(
                f"{name}: no backward has left a weight gradient; call backward_dw() once after each backward"
            )
        grad = self._wgrads[name].popleft()()
        if grad is not None:
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


@dataclass(slots=True)
class LinearCall:
    """The arguments of one call of one linear map besides its tensors, for forward and backward.

    Attributes:
        name: name of the weight, for messages.
        weight: the parameter whose main_grad, or later `.grad`, gets the gradient; None: autograd gets it.
        weight_dtype: dtype of the weight's gradient for autograd.
        dtype: dtype of activations and their gradients.
        split: which GEMMs use split accumulation.
        exchange: the tensor-parallel communication.
        quantizer: casts x; all its rows, if they are gathered.
        grad_quantizer: makes the quantizer of dy, in backward.
        fuse_wgrad: whether the GEMM accumulates the weight's gradient, possibly in two passes.
        is_first_microbatch: True overwrites a plain main_grad.
        stored_weight: returns the weight as FlatFSDP stores it, in backward; None: it is saved.
        needs_input_grad, needs_weight_grad: gradients to compute in backward.
        bias_grad: dtype of the bias's gradient; None: not needed.
        delayed: defers the weight's gradient until `backward_dw`; None: it is computed in backward.
        transposed: whether the weight, and its gradient, is [in, out].
        overlaps: whether GEMMs that wait for communication begin with its first chunk.
        keeps_gathered: whether gathered rows of x are kept for backward instead of being gathered again.
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
        """The quantizer of this rank's rows of x."""
        return self.quantizer.for_rows(self.exchange.ranks) if self.exchange.gathers_input else self.quantizer

    @property
    def wants_columnwise_input(self) -> bool:
        """Whether the cast of x makes the operand of wgrad; after an all-gather it is made from all rows."""
        return self.needs_weight_grad and not self.exchange.gathers_input

    def again(self) -> LinearCall:
        """The same call for recomputation in backward, without recording amaxes."""
        return replace(self, quantizer=self.quantizer.silent(), keeps_gathered=True)


_NOTHING = Operand()


class LinearSaved(NamedTuple):
    """Operands for backward.

    Attributes:
        x: for wgrad, or this rank's rows of it; empty if the weight gets no gradient.
        weight: for dgrad; empty if the input gets no gradient, or if FlatFSDP stores the weight.
    """

    x: Operand
    weight: Operand

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors for `ctx.save_for_backward`."""
        return (*self.x, *self.weight)

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> LinearSaved:
        """Rebuilds it from `ctx.saved_tensors`."""
        middle = len(tensors) // 2
        return LinearSaved(Operand(*tensors[:middle]), Operand(*tensors[middle:]))


class RowsUnderWay(NamedTuple):
    """A running all-gather of an operand's rows, and the quantizer that makes GEMM operands of its result.

    Attributes:
        rows: this rank's rows.
        pending: their all-gather.
        quantizer: the one of all rows (`Quantizer.of_rows`).
    """

    rows: Operand
    pending: Pending
    quantizer: Quantizer

    @staticmethod
    def start(rows: Operand, quantizer: Quantizer, exchange: Exchange) -> RowsUnderWay:
        """Starts the all-gather of `rows`."""
        part = rows.rowwise if rows.high is None else rows.high
        assert part is not None
        return RowsUnderWay(rows, exchange.start_gather(part), quantizer)

    def wait(self, *, rowwise: bool, columnwise: bool) -> Operand:
        """Waits, and returns the operand of all rows."""
        whole = self.pending.wait()
        field = "rowwise" if self.rows.high is None else "high"
        gathered = self.rows._replace(**{field: whole})
        return self.quantizer.of_rows(gathered, rowwise=rowwise, columnwise=columnwise)


def linear_forward(
    x: Operand, weight: Operand, bias: Tensor | None, call: LinearCall
) -> tuple[Tensor, LinearSaved]:
    """Computes x w^T + b, [tokens, out] in call.dtype, and what to save for backward.

    Args:
        x: the input, cast by call.input_quantizer.
        weight: the weight's operand.
        bias: [out], or None.
        call: the linear map.
    """
    added = None if bias is None else bias.to(call.dtype)
    out, saved_x = _multiply(x, weight, added, call)
    return out, LinearSaved(
        saved_x if call.needs_weight_grad else _NOTHING,
        weight.for_backward if call.needs_input_grad and call.stored_weight is None else _NOTHING,
    )


def _multiply(x: Operand, weight: Operand, bias: Tensor | None, call: LinearCall) -> tuple[Tensor, Operand]:
    """Returns the result, and the operand of x that is kept for wgrad."""
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
    """Casts dy [tokens, out] to an operand, empty if no GEMM needs it, with its column sums for the bias.

    If ranks split dy by rows, operand and sums are those of this rank's rows.
    """
    dy = dy.contiguous()
    rowwise, columnwise = call.needs_input_grad, call.needs_weight_grad
    if not (rowwise or columnwise):
        return Quantized(Operand(), None if call.bias_grad is None else sum_columns(dy, call.bias_grad))
    quantizer = call.grad_quantizer()
    # Only the form that is sent: the other is made of all rows, after the all-gather.
    if call.exchange.gathers_grad:
        quantizer, rowwise, columnwise = quantizer.for_rows(call.exchange.ranks), True, False
    return quantizer.cast(dy, rowwise=rowwise, columnwise=columnwise, column_sum=call.bias_grad)


class LinearGrads(NamedTuple):
    """Gradients; None where not needed.

    Attributes:
        x: [tokens, in], in call.dtype.
        weight: [out, in], or [in, out], in the weight's dtype; None once it is in main_grad.
        bias: [out], in the bias's dtype.
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_backward(dy: Quantized, saved: LinearSaved, call: LinearCall, node: Node) -> LinearGrads:
    """Computes the gradients of input and weight; that of the bias is in `dy`.

    Args:
        dy: gradient of the result, from `quantize_grad`.
        saved: operands from the forward.
        call: the linear map.
        node: the running autograd node, one of whose inputs is the weight.
    """
    operand, dbias = dy
    gathering = dx = dweight = None
    if call.needs_weight_grad and call.exchange.gathers_input and not call.keeps_gathered:
        # Before the GEMM of dx, which hides it.
        gathering = RowsUnderWay.start(saved.x, call.quantizer, call.exchange)
    if call.exchange.gathers_grad and (call.needs_input_grad or call.needs_weight_grad):
        operand, dx = _gather_and_start_input_grad(operand, saved, call)
    elif call.needs_input_grad:
        dx = _start_input_grad(operand, saved, call)
    # While dx is summed over the ranks; it is waited for last.
    if call.needs_weight_grad:
        x = saved.x if gathering is None else gathering.wait(rowwise=False, columnwise=True)
        dweight = weight_grad(operand, x, call, node)
    return LinearGrads(None if dx is None else dx.wait(), dweight, dbias)


def _start_input_grad(dy: Operand, saved: LinearSaved, call: LinearCall) -> Pending:
    dx = gemms.dgrad(dy, _weight(saved, call), call.dtype, call.split)
    return call.exchange.start_sum(dx) if call.exchange.sums_input_grad else Pending(dx, None)


def _gather_and_start_input_grad(
    rows: Operand, saved: LinearSaved, call: LinearCall
) -> tuple[Operand, Pending | None]:
    """Returns dy of all ranks' rows, for wgrad, and dx if needed."""
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


def weight_grad(dy: Operand, x: Operand, call: LinearCall, node: Node) -> Tensor | None:
    """The weight's gradient; None if it is in main_grad, deferred, or not needed in this backward."""
    wanted = Wanted.ALL if call.weight is None else wanted_grads(call.weight, node)
    if wanted is Wanted.NONE:
        return None
    # For a weight [in, out] it is x^T dy.
    left, right = (x, dy) if call.transposed else (dy, x)
    if wanted is Wanted.SOME:
        # Autograd gives the requested parts of a pack their gradients.
        return gemms.wgrad(left, right, call.weight_dtype, call.split)
    if call.delayed is not None:
        call.delayed.put(call.name, partial(_compute_weight_grad, left, right, call))
        return None
    return _compute_weight_grad(left, right, call)


def _compute_weight_grad(left: Operand, right: Operand, call: LinearCall) -> Tensor | None:
    """Computes left^T right, accumulated into main_grad or returned."""
    if not call.fuse_wgrad:
        return gemms.wgrad(left, right, call.weight_dtype, call.split)
    assert call.weight is not None
    # Claimed when it is computed, also if it was deferred: whether it is the first one in main_grad depends
    # on the order of computation.
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
