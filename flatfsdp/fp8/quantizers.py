"""How one tensor of a layer gets to FP8: a quantizer for each recipe.

In:   a matrix in FP32, fp16 or bf16.
Out:  an `Operand`, and the column sums where they are asked for (a bias gradient is one).
Next: `matmul/gemms.py` multiplies operands.

A kernel that produces the matrix (a norm, an activation) can cast it in the same pass if the scale is known
before: it asks for `fused` and then calls `operand` on what it has written.

Where each of several ranks has rows of one matrix, `for_rows` casts them for the way, and `of_rows` makes of
all of them, gathered, what the matrix itself would have been cast to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch_on_host
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.operand import Operand
from flatfsdp.kernels.cast.block_cast import Block, block_cast
from flatfsdp.kernels.cast.cast import cast, max_abs
from flatfsdp.kernels.cast.column_sum import column_sum as sum_columns
from flatfsdp.kernels.cast.scaling import current_scales
from flatfsdp.kernels.cast.transpose import transpose


class Quantized(NamedTuple):
    operand: Operand
    column_sum: Tensor | None
    """[cols]."""


class Quantizer(Protocol):
    @property
    def fused(self) -> dict[str, Any] | None:
        """Arguments scale, amax and dtype for a kernel that casts what it produces; None: cast it later."""

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        """What a kernel has cast with `fused`."""

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Casts a matrix in the forms that the coming GEMMs read.

        Args:
            x: [rows, cols], contiguous.
            column_sum: dtype of the sums over its rows; None: they are not wanted.
        """

    def silent(self) -> Quantizer:
        """The same casts, and no amax is recorded."""

    def for_rows(self, ranks: Ranks) -> Quantizer:
        """Casts this rank's rows, of a matrix of which each rank has some, into what is gathered."""

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        """The operand of all rows; `gathered` has either `high` or `rowwise`."""


@dataclass(slots=True)
class Unquantized:
    """No cast: GEMMs are in the dtype of the activations.

    Attributes:
        amax: where a calibrating run records the amax; None: nowhere.
    """

    amax: Tensor | None = None

    @property
    def fused(self) -> None:
        return None

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        raise AssertionError("nothing is cast without FP8")

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        if self.amax is not None:
            max_abs(x, self.amax)
        return Quantized(Operand(high=x), None if column_sum is None else sum_columns(x, column_sum))

    def silent(self) -> Unquantized:
        return Unquantized()

    def for_rows(self, ranks: Ranks) -> Unquantized:
        return self

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        return gathered


@dataclass(slots=True)
class Delayed:
    """Delayed scaling: the scale is known.

    Attributes:
        scale, scale_inv: FP32 [1], of one generation.
        amax: FP32 [1], raised by every cast; None: record nothing.
    """

    dtype: torch.dtype
    scale: Tensor
    scale_inv: Tensor
    amax: Tensor | None

    @property
    def fused(self) -> dict[str, Any]:
        return {"scale": self.scale, "amax": self.amax, "dtype": self.dtype}

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        return Operand(None, rowwise, columnwise, self.scale_inv, self.scale_inv)

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        result = cast(
            x,
            self.scale,
            self.dtype,
            amax=self.amax,
            rowwise=rowwise,
            columnwise=columnwise,
            column_sum=column_sum,
        )
        return Quantized(self.operand(result.rowwise, result.columnwise), result.column_sum)

    def silent(self) -> Delayed:
        return Delayed(self.dtype, self.scale, self.scale_inv, None)

    def for_rows(self, ranks: Ranks) -> Delayed:
        # Ranks that share a layer share its scales.
        return self

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        return with_columnwise(gathered) if columnwise else gathered


@dataclass(slots=True)
class Current:
    """Current scaling: the scale comes from the tensor itself, in a pass of its own.

    Attributes:
        ranks: that have rows of the tensor; None: this one alone.
    """

    dtype: torch.dtype
    epsilon: float
    power_of_two: bool
    ranks: Ranks | None = None

    @property
    def fused(self) -> None:
        return None

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        raise AssertionError("current scaling casts when the amax is known")

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        amax = max_abs(x)
        if self.ranks is not None:
            with launch_on_host(self.ranks, Identity.counting(Action.AMAX, amax.numel()), amax.device):
                raise_to_largest(amax, self.ranks)
        scale, scale_inv = current_scales(
            amax,
            _fp8_max(self.dtype, x.device),
            epsilon=self.epsilon,
            power_of_two=self.power_of_two,
        )
        return Delayed(self.dtype, scale, scale_inv, None).cast(
            x, rowwise=rowwise, columnwise=columnwise, column_sum=column_sum
        )

    def silent(self) -> Current:
        return self

    def for_rows(self, ranks: Ranks) -> Current:
        return replace(self, ranks=ranks)

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        return with_columnwise(gathered) if columnwise else gathered


@dataclass(slots=True)
class Blockwise:
    """Block scaling: one scale a block, from the block itself, in the pass that casts."""

    block: Block
    power_of_two: bool

    @property
    def fused(self) -> None:
        return None

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        raise AssertionError("block scaling casts when the amaxes are known")

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        cast = block_cast(
            x, block=self.block, rowwise=rowwise, columnwise=columnwise, power_of_two=self.power_of_two
        )
        operand = Operand(
            None, cast.rowwise, cast.columnwise, cast.rowwise_scale_inv, cast.columnwise_scale_inv
        )
        return Quantized(operand, None if column_sum is None else sum_columns(x, column_sum))

    def silent(self) -> Blockwise:
        return self

    def for_rows(self, ranks: Ranks) -> Unquantized:
        # Columnwise blocks reach over the rows of several ranks.
        return Unquantized()

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        assert gathered.high is not None
        return self.cast(gathered.high, rowwise=rowwise, columnwise=columnwise).operand


def with_columnwise(operand: Operand) -> Operand:
    """Adds what the same cast would have made for dgrad or wgrad; there is one scale for the tensor."""
    assert operand.rowwise is not None
    return operand._replace(columnwise=transpose(operand.rowwise), columnwise_inv=operand.rowwise_inv)


def dequantized(operand: Operand, dtype: torch.dtype) -> Operand:
    """The values that FP8 bytes with one scale stand for, rounded once to `dtype`; no host sync.

    Bytes per element: 3 to widen and 4 to multiply, for bf16.
    """
    assert operand.rowwise is not None and operand.rowwise_inv is not None
    # The product is computed in FP32, the dtype of the inverse.
    return Operand(high=operand.rowwise.to(dtype).mul_(operand.rowwise_inv))


@cache
def _fp8_max(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The largest number of an FP8 format, FP32 [1]; never written."""
    with torch.inference_mode(False):
        return torch.full((1,), torch.finfo(dtype).max, dtype=torch.float32, device=device)
