"""`Embedding`: nn.Embedding whose gradient is added row by row to `main_grad`.

In:   ids [...], int64 or int32;  out: [..., embedding_dim].
Next: the first layer of a model.

Each tensor-parallel rank holds consecutive rows.  It looks up zeros for ids of other ranks, and the results
are summed over the ranks; the sum is exact, because all terms but one are zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.contract.main_grad import CLAIM_MAIN_GRAD, claim
from flatfsdp.contract.tensor_parallel import TensorParallel, are_known, declare_split
from flatfsdp.kernels.grad.embedding import embedding_grad
from flatfsdp.layers.checks import require_bool_or_none
from flatfsdp.layers.shared import Declaring, InitMethod, initialize, new_parameter, normal_init
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.torch_private import once_differentiable, receives_gradient


class Embedding(Declaring):
    """A lookup table that returns one row of `weight` for each id.

    Args:
        num_embeddings: rows of the whole table.
        embedding_dim: columns of the table.
        padding_idx: an id whose row gets no gradient and starts as zeros.
        init_method: fills the table in place; default: normal with standard deviation 0.023.
        params_dtype: dtype of the table; default: torch's default dtype.
        device: device of the table; default: torch's default device.
        fuse_wgrad_accumulation: add the gradient to the table's `main_grad`, FP32 or bf16, touching only the
            rows of the batch's ids, instead of passing autograd a gradient of the whole table.
        tp_group: tensor-parallel ranks that share the table's rows.  All of them get the same ids.
        tp_size: size of the group; may be left out.
        sequence_parallel: each rank returns its part of dimension 0.

    Attributes:
        weight: [num_embeddings / tp_size, embedding_dim].
        exchanges: the tensor-parallel communication of the table, by the parameter's name.

    Raises:
        ValueError: if padding_idx is outside the table, or its rows do not divide evenly over the ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}; the table has {num_embeddings} rows")
        self._parallel = TensorParallel.of("Embedding", tp_group, tp_size, sequence_parallel)
        rows = self._parallel.share("Embedding", "num_embeddings", num_embeddings)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.init_method = normal_init if init_method is None else init_method
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = new_parameter(rows, embedding_dim, dtype=params_dtype, device=device)
        # The rank's lookups are summed like the outputs of a row-parallel linear map.
        self.exchanges = {"weight": Exchange.of(self._parallel, "row")}
        if self._is_split:
            declare_split(self.weight, 0, (num_embeddings,), self._parallel.ranks)
        self.reset_parameters()

    @property
    def _is_split(self) -> bool:
        return self.exchanges["weight"].sums_output

    @property
    def _first_row(self) -> int:
        return self._parallel.ranks.rank * len(self.weight)

    @property
    def _padding_row(self) -> int | None:
        """The local row of the padding id, or None if another rank holds it."""
        row = -1 if self.padding_idx is None else self.padding_idx - self._first_row
        return row if 0 <= row < len(self.weight) else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the table in place; does nothing on the meta device."""
        if not self.weight.is_meta:
            initialize(self.weight, self.init_method, self._parallel.ranks)
            if are_known(self._parallel.ranks) and self._padding_row is not None:
                self.weight[self._padding_row].zero_()

    def forward(self, ids: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Looks up ids [...]: [..., embedding_dim] in the table's dtype.

        Args:
            ids: int64 or int32, of any shape.
            is_first_microbatch: True overwrites a plain `main_grad`, False and None add to it.

        Returns:
            The rows; with `sequence_parallel`, this rank's part of dimension 0.

        Raises:
            TypeError: if is_first_microbatch is not None, True or False.
            IndexError, RuntimeError: if an id is outside the table; on a GPU later, as a failed assertion.
            ValueError: if dimension 0 does not divide evenly over the tensor-parallel ranks.
        """
        require_bool_or_none("Embedding", is_first_microbatch)
        if self._is_split:
            self.exchanges["weight"].leading_shape("Embedding", (*ids.shape, self.embedding_dim))
            ids = self._own_rows(ids)
        rows = look_up(
            self,
            self.weight,
            ids,
            self._padding_row,
            self.fuse_wgrad_accumulation,
            is_split=self._is_split,
            is_first_microbatch=is_first_microbatch,
        )
        return _Sum.apply(rows, self.exchanges["weight"]) if self._is_split else rows

    def _own_rows(self, ids: Tensor) -> Tensor:
        """Local rows of `weight` for these ids, and -1 for ids of other ranks."""
        # Here, because from now on an id outside of the table looks like one of another rank's.
        torch._assert_async(
            ((ids >= 0) & (ids < self.num_embeddings)).all(),
            f"Embedding: an id is outside of the table of {self.num_embeddings} rows",
        )
        row = ids - self._first_row
        return torch.where((row >= 0) & (row < len(self.weight)), row, -1)

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


def look_up(
    owner: nn.Module,
    weight: Tensor,
    ids: Tensor,
    padding_row: int | None,
    fuse_wgrad_accumulation: FuseWgrad,
    *,
    is_split: bool = False,
    is_first_microbatch: bool | None = None,
) -> Tensor:
    """Looks up rows of a table: [...] to [..., embedding_dim].

    Args:
        owner: the layer, for messages.
        weight: [rows, embedding_dim].
        ids: rows of `weight`, of any shape.
        padding_row: a row that gets no gradient.
        fuse_wgrad_accumulation: add the gradient to the table's `main_grad`; "two_pass" does the same as True
            here.
        is_split: whether -1 stands for rows of other ranks, which are looked up as zeros.
        is_first_microbatch: True overwrites a plain `main_grad`, False and None add to it.

    Raises:
        IndexError, RuntimeError: if an id is outside the table; on a GPU later, as a failed assertion.
    """
    fuses = fuse_wgrad_accumulation
    if fuses == "if_claimed":
        fuses = CLAIM_MAIN_GRAD.of(weight) is not None
    if not (fuses and torch.is_grad_enabled() and weight.requires_grad):
        return _rows_of(weight, ids, padding_row, is_split)
    name = f"{type(owner).__name__}.weight"
    return _Embedding.apply(weight, ids, _Spec(name, padding_row, is_split, is_first_microbatch))


def _rows_of(weight: Tensor, rows: Tensor, padding_row: int | None, is_split: bool) -> Tensor:
    """Rows of the weight, with zeros for -1 if the table is split."""
    if not is_split:
        return F.embedding(rows, weight, padding_row)
    found = F.embedding(rows.clamp(min=0), weight, padding_row)
    return found.masked_fill_((rows < 0).unsqueeze(-1), 0.0)


class _Spec(NamedTuple):
    """The arguments of one look-up besides its tensors.

    Attributes:
        name: name of the table, for messages.
        padding_row, is_split, is_first_microbatch: the arguments of `look_up`.
    """

    name: str
    padding_row: int | None
    is_split: bool
    is_first_microbatch: bool | None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, spec: _Spec) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.spec = weight, spec
        return _rows_of(weight, rows, None, spec.is_split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        if receives_gradient(ctx.weight):
            (rows,) = ctx.saved_tensors
            spec: _Spec = ctx.spec
            slot = claim(ctx.weight, spec.name, spec.is_first_microbatch)
            dy = dy.reshape(-1, dy.shape[-1]).contiguous()
            embedding_grad(slot.target, dy, rows.reshape(-1), first=slot.first, padding_idx=spec.padding_row)
        return None, None, None


class _Sum(torch.autograd.Function):
    """Sums the ranks' look-ups, or gives each rank its part of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        if not exchange.sequence_parallel:
            # An all-reduce is in place; a reduce-scatter makes a new tensor.
            ctx.mark_dirty(rows)
        return exchange.start_sum(rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.exchange.gathers_grad:
            dy = ctx.exchange.start_gather(dy.contiguous()).wait()
        return dy, None
