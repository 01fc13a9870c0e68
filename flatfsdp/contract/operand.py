"""One matrix of a GEMM, in the forms that the coming GEMMs read; and which weights are kept in FP8.

rowwise      [rows, cols]   y = x w^T reads x and w like this
columnwise   [cols, rows]   dx = dy w reads w, dw = dy^T x reads dy and x like this: Hopper's FP8 GEMMs
                            take both operands along the dimension that is summed over
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flatfsdp.contract.attribute import Attribute


class Operand(NamedTuple):
    """Either `high`, or FP8 with its scales' inverses; what is not there is None.

    Attributes:
        high: FP32, fp16 or bf16 [rows, cols].
        rowwise: FP8 [rows, cols].
        columnwise: FP8 [cols, rows].
        rowwise_inv: FP32, one number, or one a block: what `rowwise` has to be multiplied with.
        columnwise_inv: the same for `columnwise`.
    """

    high: Tensor | None = None
    rowwise: Tensor | None = None
    columnwise: Tensor | None = None
    rowwise_inv: Tensor | None = None
    columnwise_inv: Tensor | None = None

    @property
    def for_backward(self) -> Operand:
        """Without what only the forward reads."""
        if self.high is not None:
            return self
        return Operand(columnwise=self.columnwise, columnwise_inv=self.columnwise_inv)


FP8_OPERAND = Attribute[Callable[[], Operand] | None]("fp8_operand", None)
"""Left on a weight by the engine, which keeps it in FP8: the weight as GEMMs read it now."""

FP8_WEIGHTS = Attribute[Callable[[], tuple[str, ...]]]("fp8_weights", tuple[str, ...])
"""A layer's method: names of its parameters that only FP8 GEMMs read, so that they may be kept in FP8."""
