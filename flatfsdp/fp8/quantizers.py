"""Quantizers, which cast the tensors of a layer to FP8; one class per recipe.

In:   a matrix in FP32, fp16 or bf16.
Out:  an `Operand`, and the column sums if requested (a bias gradient is one).
Next: `matmul/gemms.py` multiplies operands.

A kernel that produces the matrix (a norm, an activation) can cast it in the same pass if the scale is already
known: it reads `fused`, and passes the result to `operand`.

Where ranks share a matrix by rows, `for_rows` gives the quantizer of a rank's rows before the all-gather.
`of_rows` then makes the operand that casting the whole matrix would have given.
"""

from __future__ import annotations

from abc import abstractmethod
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
    """An operand, with column sums of the matrix if requested."""

    operand: Operand
    column_sum: Tensor | None
    """[cols]"""


class Quantizer(Protocol):
    """Casts one tensor of a layer in each call.

    The defaults are those of a cast that records nothing, and is the same for some rows as for all.
    """

    __slots__ = ()

    @property
    def fused(self) -> dict[str, Any] | None:
        """Arguments scale, amax and dtype for a kernel that casts its own result; None: cast it later."""
        return None

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        """The operand from the result of a kernel that cast with `fused`."""
        raise AssertionError(f"{type(self).__name__} has no cast to fuse")

    @abstractmethod
    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Casts a matrix to the forms that the following GEMMs read.

        Args:
            x: [rows, cols], contiguous.
            rowwise: whether the row-major form is needed.
            columnwise: whether the transposed form is needed.
            column_sum: dtype of the sums over its rows; None: not needed.
        """

    def silent(self) -> Quantizer:
        """The quantizer for a recomputation: the first run has recorded the amaxes."""
        return self

    def for_rows(self, ranks: Ranks) -> Quantizer:
        """The quantizer for this rank's rows of a matrix shared by rows, before the all-gather."""
        return self

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        """The operand of all gathered rows; `gathered` has either `high` or `rowwise`."""
        return with_columnwise(gathered) if columnwise else gathered


@dataclass(slots=True)
class Unquantized(Quantizer):
    """No cast: GEMMs run in the dtype of the activations.

    Attributes:
        amax: where a calibrating run records the amax; None: nowhere.
    """

    amax: Tensor | None = None

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Returns the matrix itself; records its amax in a calibrating run."""
        if self.amax is not None:
            max_abs(x, self.amax)
        return Quantized(Operand(high=x), None if column_sum is None else sum_columns(x, column_sum))

    def silent(self) -> Unquantized:
        """One without `amax`."""
        return Unquantized()

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        """The gathered rows themselves."""
        return gathered


@dataclass(slots=True)
class Delayed(Quantizer):
    """Delayed scaling: the scale is known before the cast, and ranks that share a layer have the same.

    Attributes:
        dtype: the FP8 format.
        scale, scale_inv: FP32 [1], of one generation.
        amax: FP32 [1], raised by every cast; None: record nothing.
    """

    dtype: torch.dtype
    scale: Tensor
    scale_inv: Tensor
    amax: Tensor | None

    @property
    def fused(self) -> dict[str, Any]:
        """The scale, amax and dtype for a kernel that casts its own result."""
        return {"scale": self.scale, "amax": self.amax, "dtype": self.dtype}

    def operand(self, rowwise: Tensor | None, columnwise: Tensor | None) -> Operand:
        """The operand of a cast with this scale."""
        return Operand(None, rowwise, columnwise, self.scale_inv, self.scale_inv)

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Casts with the known scale, in one pass."""
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
        """The same scales for a recomputation, whose casts leave no amax in the history."""
        return Delayed(self.dtype, self.scale, self.scale_inv, None)


@dataclass(slots=True)
class Current(Quantizer):
    """Current scaling: the scale comes from the tensor itself, in a separate pass.

    Attributes:
        dtype: the FP8 format.
        epsilon: smallest amax.
        power_of_two: whether scales are rounded down to powers of two.
        margin: the scale is divided by 2^margin; only in the first casts of delayed scaling.
        amax: as in `Delayed`; only in the first casts of delayed scaling.
        ranks: ranks that share the tensor by rows; None: this one alone.
    """

    dtype: torch.dtype
    epsilon: float
    power_of_two: bool
    margin: float = 0.0
    amax: Tensor | None = None
    ranks: Ranks | None = None

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Finds the amax, over all `ranks`, and casts with its scale."""
        amax = max_abs(x)
        # The rank's own amax enters the history; its update takes the largest of all ranks that share scales.
        if self.amax is not None:
            torch.maximum(self.amax, amax, out=self.amax)
        # Before the scale: rows of one matrix are gathered as bytes, which only one scale can widen.
        if self.ranks is not None:
            with launch_on_host(self.ranks, Identity.counting(Action.AMAX, amax.numel()), amax.device):
                raise_to_largest(amax, self.ranks)
        scale, scale_inv = current_scales(
            amax,
            _fp8_max(self.dtype, self.margin, x.device),
            epsilon=self.epsilon,
            power_of_two=self.power_of_two,
        )
        return Delayed(self.dtype, scale, scale_inv, None).cast(
            x, rowwise=rowwise, columnwise=columnwise, column_sum=column_sum
        )

    def silent(self) -> Current:
        """The same for a recomputation, whose casts leave no amax in the history."""
        return self if self.amax is None else replace(self, amax=None)

    def for_rows(self, ranks: Ranks) -> Current:
        """The same with an amax over `ranks`."""
        return replace(self, ranks=ranks)


@dataclass(slots=True)
class Blockwise(Quantizer):
    """Block scaling: one scale per block, computed in the pass that casts it."""

    block: Block
    power_of_two: bool

    def cast(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, column_sum: torch.dtype | None = None
    ) -> Quantized:
        """Casts each block with its own scale, in one pass."""
        cast = block_cast(
            x, block=self.block, rowwise=rowwise, columnwise=columnwise, power_of_two=self.power_of_two
        )
        operand = Operand(
            None, cast.rowwise, cast.columnwise, cast.rowwise_scale_inv, cast.columnwise_scale_inv
        )
        return Quantized(operand, None if column_sum is None else sum_columns(x, column_sum))

    def for_rows(self, ranks: Ranks) -> Unquantized:
        """No cast: rows are gathered in the dtype of the activations."""
        # Columnwise blocks span the rows of several ranks.
        return Unquantized()

    def of_rows(self, gathered: Operand, *, rowwise: bool, columnwise: bool) -> Operand:
        """Casts the gathered rows."""
        assert gathered.high is not None
        return self.cast(gathered.high, rowwise=rowwise, columnwise=columnwise).operand


def with_columnwise(operand: Operand) -> Operand:
    """Adds the transposed form that the same cast would have made; the tensor has a single scale."""
    assert operand.rowwise is not None
    return operand._replace(columnwise=transpose(operand.rowwise), columnwise_inv=operand.rowwise_inv)


def dequantized(operand: Operand, dtype: torch.dtype) -> Operand:
    """Widens FP8 bytes with one scale, rounded once to `dtype`; no host sync.

    Bytes per element: 3 to widen and 4 to multiply, for bf16.
    """
    assert operand.rowwise is not None and operand.rowwise_inv is not None
    # The multiplication is in FP32, the dtype of the inverse.
    return Operand(high=operand.rowwise.to(dtype).mul_(operand.rowwise_inv))


@cache
def _fp8_max(dtype: torch.dtype, margin: float, device: torch.device) -> Tensor:
    """The largest number of an FP8 format, divided by 2^margin, FP32 [1]; never written."""
    with torch.inference_mode(False):
        return torch.full((1,), torch.finfo(dtype).max / 2**margin, dtype=torch.float32, device=device)
