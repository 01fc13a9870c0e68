"""All-gather of an operand whose rows are split over ranks by sequence parallelism.

In:   this rank's rows as an `Operand`, cast by `Quantizer.for_rows`; in FP8 one byte per element is sent.
Out:  an `Operand` of all rows, in the forms that GEMMs read.
Next: `linear_map.py` runs GEMMs while the rows are in flight.
"""

from __future__ import annotations

from typing import NamedTuple

from flatfsdp.comm.collectives import Pending
from flatfsdp.contract.operand import Operand
from flatfsdp.fp8.quantizers import Quantizer
from flatfsdp.matmul.exchange import Exchange


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
