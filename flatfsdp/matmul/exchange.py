"""`Exchange`: the tensor-parallel communication around a linear map.

In:   this rank's rows of a matrix, or its addend of a sum.
Out:  all ranks' rows, or the sum, in flight.
Next: `linear_map.py` multiplies before, during and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch_on_host
from flatfsdp.comm.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.tensor_parallel import Mode, TensorParallel


@dataclass(frozen=True)
class Exchange:
    """The tensor-parallel communication of a linear map; all of it goes through here.

                column          column, sequence    row             row, sequence
        x       is whole        gathered            is split        is split
        y       is split        is split            summed          summed, scattered
        dy      is split        is split            is whole        gathered
        dx      summed          summed, scattered   is split        is split

    The sequence is dimension 0, and therefore splits the rows of matrices [tokens, features].

    Attributes:
        ranks: the tensor-parallel ranks.
        mode: "column", "row", or None: no communication.
        sequence_parallel: whether activations are split over the ranks along the sequence.
        overlap: whether to overlap communication with the GEMM that needs it.
    """

    ranks: Ranks
    mode: Mode | None
    sequence_parallel: bool
    overlap: bool = False

    @staticmethod
    def of(parallel: TensorParallel, mode: Mode | None) -> Exchange:
        """The exchange of a linear map that a layer's ranks split by `mode`; None: not at all."""
        mode = None if parallel.ranks.size == 1 else mode
        return Exchange(parallel.ranks, mode, parallel.sequence_parallel, parallel.overlap)

    @cached_property
    def gathers_input(self) -> bool:
        """Whether x is gathered, in forward and, instead of being kept, again in backward."""
        return self.sequence_parallel and self.mode == "column"

    @cached_property
    def gathers_grad(self) -> bool:
        """Whether dy is gathered in backward, as each rank has some of its rows."""
        return self.sequence_parallel and self.mode == "row"

    @cached_property
    def sums_output(self) -> bool:
        """Whether y is summed over ranks."""
        return self.mode == "row"

    @cached_property
    def sums_input_grad(self) -> bool:
        """Whether dx is summed over ranks."""
        return self.mode == "column"

    def start_gather(self, part: Tensor) -> Pending:
        """Starts the all-gather of all ranks' rows."""
        with self._checked(part):
            return start_all_gather(part, self.ranks)

    def start_sum(self, addend: Tensor) -> Pending:
        """Starts the sum over ranks; each gets its own rows if the sequence is split."""
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce
        with self._checked(addend):
            return start(addend, self.ranks)

    def _checked(self, sent: Tensor) -> AbstractContextManager[None]:
        """Context in which ranks whose batches differ raise."""
        return launch_on_host(self.ranks, Identity.counting(Action.EXCHANGE, sent.numel()), sent.device)

    @cached_property
    def splits_rows(self) -> bool:
        """Whether each rank has some rows of the input or of the output."""
        return self.gathers_input or self.gathers_grad

    def tokens(self, rows: int) -> int:
        """Rows the GEMM sees for a local input of `rows` rows."""
        return rows * self.ranks.size if self.gathers_input else rows

    def leading_shape(self, layer: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The output's shape, without its last dimension, for an input of `shape`.

        Raises:
            ValueError: if there is no sequence dimension, or its length does not divide evenly over the
                ranks.
            RuntimeError: if the tensor-parallel group has not been set.
        """
        if self.mode is None:
            return tuple(shape[:-1])
        # Raises if the ranks are not known yet.
        _ = self.ranks.group
        if not self.splits_rows:
            return tuple(shape[:-1])
        if len(shape) < 2:
            raise ValueError(f"{layer}: sequence_parallel needs the sequence in front, not {tuple(shape)}")
        sequence, *others = shape[:-1]
        if self.gathers_input:
            return (sequence * self.ranks.size, *others)
        return (TensorParallel(self.ranks).share(layer, "the sequence length", sequence), *others)


UNSPLIT = Exchange(ALONE, None, False)
"""The exchange of a layer that is not split."""
