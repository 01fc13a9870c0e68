"""`Operand`: one matrix of GEMMs, in the forms that they read; and the weights to be stored in FP8.

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
    """One matrix: either `high`, or FP8 with the inverses of its scales; unused fields are None.

    Attributes:
        high: matrix in FP32, fp16 or bf16 [rows, cols].
        rowwise: matrix in FP8 [rows, cols].
        columnwise: its transpose in FP8 [cols, rows].
        rowwise_inv: factors that turn `rowwise` into values: FP32, one number, or one a block.
        columnwise_inv: the same for `columnwise`.
    """

    high: Tensor | None = None
    rowwise: Tensor | None = None
    columnwise: Tensor | None = None
    rowwise_inv: Tensor | None = None
    columnwise_inv: Tensor | None = None

    @property
    def for_backward(self) -> Operand:
        """The operand without the form that only the forward reads."""
        if self.high is not None:
            return self
        return Operand(columnwise=self.columnwise, columnwise_inv=self.columnwise_inv)


FP8_OPERAND = Attribute[Callable[[], Operand] | None]("fp8_operand", None)
"""Function on a weight that the engine stores in FP8: returns it as GEMMs read it now."""

FP8_WEIGHTS = Attribute[Callable[[], tuple[str, ...]]]("fp8_weights", tuple[str, ...])
"""Method of a layer that names its parameters that only FP8 GEMMs read, so they may be stored in FP8."""
