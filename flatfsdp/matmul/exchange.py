"""What the ranks that share a linear map send each other.

In:   this rank's rows of a matrix, or its addend of a sum.
Out:  all ranks' rows, or the sum, under way.
Next: `linear_map.py` multiplies before, during and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch_on_host
from flatfsdp.comm.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.tensor_parallel import Mode, TensorParallel


@dataclass(frozen=True)
class Exchange:
    """What the ranks that share a linear map send each other; all that is sent goes through here.

                column          column, sequence    row             row, sequence
        x       is whole        gathered            is split        is split
        y       is split        is split            summed          summed, scattered
        dy      is split        is split            is whole        gathered
        dx      summed          summed, scattered   is split        is split

    The sequence is dimension 0, and with it rows of matrices [tokens, features].

    Attributes:
        mode: None: nothing is exchanged.
    """

    ranks: Ranks
    mode: Mode | None
    sequence_parallel: bool
    overlap: bool = False

    @staticmethod
    def of(parallel: TensorParallel, mode: Mode | None) -> Exchange:
        """The exchange around a linear map that the ranks of a layer share like this; None: they do not."""
        mode = None if parallel.ranks.size == 1 else mode
        return Exchange(parallel.ranks, mode, parallel.sequence_parallel, parallel.overlap)

    @property
    def gathers_input(self) -> bool:
        """Whether x is gathered, in forward and, rather than kept, once more in backward."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def gathers_grad(self) -> bool:
        return self.sequence_parallel and self.mode == "row"

    @property
    def sums_output(self) -> bool:
        return self.mode == "row"

    @property
    def sums_input_grad(self) -> bool:
        return self.mode == "column"

    def start_gather(self, part: Tensor) -> Pending:
        """All ranks' rows."""
        with self._checked(part):
            return start_all_gather(part, self.ranks)

    def start_sum(self, addend: Tensor) -> Pending:
        """The sum over ranks; of this rank's rows where the sequence is split."""
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce
        with self._checked(addend):
            return start(addend, self.ranks)

    def _checked(self, sent: Tensor) -> AbstractContextManager[None]:
        """Ranks whose batches differ raise."""
        return launch_on_host(self.ranks, Identity.counting(Action.EXCHANGE, sent.numel()), sent.device)

    @property
    def splits_rows(self) -> bool:
        """Whether each rank has some rows of the input or of the output."""
        return self.gathers_input or self.gathers_grad

    def tokens(self, rows: int) -> int:
        """Rows the GEMM sees for a local input of `rows` rows."""
        return rows * self.ranks.size if self.gathers_input else rows

    def leading_shape(self, layer: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The output's shape, without its last dimension, for an input of `shape`.

        Raises:
            ValueError: if there is no sequence, or the ranks cannot share it equally.
            RuntimeError: if nobody has said which ranks these are.
        """
        if self.mode is None:
            return tuple(shape[:-1])
        _ = self.ranks.group
        if not self.splits_rows:
            return tuple(shape[:-1])
        if len(shape) < 2:
            raise ValueError(
                f"{layer}: the input has shape {tuple(shape)}; sequence_parallel needs the sequence in front"
            )
        sequence, *others = shape[:-1]
        if self.gathers_input:
            return (sequence * self.ranks.size, *others)
        return (TensorParallel(self.ranks).share(layer, "the sequence length", sequence), *others)


UNSPLIT = Exchange(ALONE, None, False)
"""The exchange of a layer that is not split."""
