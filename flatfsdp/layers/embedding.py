"""`Embedding`: nn.Embedding whose gradient is added to an FP32 `main_grad` row by row.

In:   ids [...], int64 or int32;  out: [..., embedding_dim].
Next: the first layer of a model.

Tensor-parallel ranks have consecutive rows each.  A rank looks up zeros for the ids of others, and what it
looks up is summed over the ranks: exactly, as all but one have zeros.
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
from flatfsdp.layers.parameters import InitMethod, new_parameter, normal_init
from flatfsdp.layers.shared import Declaring, initialize
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.torch_private import once_differentiable, receives_gradient


class Embedding(Declaring):
    """One row of `weight` for each id.

    Args:
        num_embeddings, embedding_dim: shape of the whole table.
        padding_idx: an id whose row gets no gradient, and starts as zeros.
        init_method: fills the table in place; default: normal with standard deviation 0.023.
        params_dtype, device: of the table.
        fuse_wgrad_accumulation: add the gradient to the FP32 `main_grad` of the table, of which only the rows
            of the batch's ids are touched, instead of giving autograd a gradient of the whole table.
        tp_group: ranks that share the table's rows.  All of them get the same ids.
        tp_size: of the group; may be left out.
        sequence_parallel: each rank returns its part of dimension 0.

    Attributes:
        weight: [num_embeddings / tp_size, embedding_dim].

    Raises:
        ValueError: if padding_idx is outside of the table, or the ranks cannot share its rows equally.
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
        # The summed rows of a linear map that is split by its input.
        self._exchange = Exchange.of(self._parallel, "row")
        if self._is_split:
            declare_split(self.weight, 0, (num_embeddings,), self._parallel.ranks)
        self.reset_parameters()

    @property
    def exchanges(self) -> dict[str, Exchange]:
        return {"weight": self._exchange}

    @property
    def _is_split(self) -> bool:
        return self._exchange.sums_output

    @property
    def _first_row(self) -> int:
        return self._parallel.ranks.rank * len(self.weight)

    @property
    def _padding_row(self) -> int | None:
        """The padding id's row, if it is one of this rank's."""
        row = -1 if self.padding_idx is None else self.padding_idx - self._first_row
        return row if 0 <= row < len(self.weight) else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the table where it is; nothing on the meta device."""
        if not self.weight.is_meta:
            initialize(self.weight, self.init_method, self._parallel.ranks)
            if are_known(self._parallel.ranks) and self._padding_row is not None:
                self.weight[self._padding_row].zero_()

    def forward(self, ids: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[...] to [..., embedding_dim], in the table's dtype; with `sequence_parallel` part of dimension 0.

        Args:
            is_first_microbatch: True overwrites a plain `main_grad`, as in `Linear`.

        Raises:
            TypeError: if is_first_microbatch is something else than None, True and False.
            IndexError, RuntimeError: if an id is outside of the table; on a GPU as a failed assertion, later.
            ValueError: if tensor-parallel ranks cannot share dimension 0 equally.
        """
        require_bool_or_none("Embedding", is_first_microbatch)
        if self._is_split:
            self._exchange.leading_shape("Embedding", (*ids.shape, self.embedding_dim))
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
        return _Sum.apply(rows, self._exchange) if self._is_split else rows

    def _own_rows(self, ids: Tensor) -> Tensor:
        """Rows of `weight`, and -1 for the ids of other ranks."""
        torch._assert_async(
            ((ids >= 0) & (ids < self.num_embeddings)).all(),
            f"Embedding: an id is outside of the table of {self.num_embeddings} rows",
        )
        row = ids - self._first_row
        return torch.where((row >= 0) & (row < len(self.weight)), row, -1)

    def extra_repr(self) -> str:
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
    """Rows of a table: [...] to [..., embedding_dim].

    Args:
        owner: the layer, for messages.
        weight: [rows, embedding_dim].
        padding_row: gets no gradient.
        fuse_wgrad_accumulation: add the gradient to the table's FP32 `main_grad`; see `Embedding`.  There is
            one way to do so, "two_pass" too.
        is_split: -1 stands for rows of other ranks, and gives zeros.
        is_first_microbatch: see `Embedding.forward`.

    Raises:
        IndexError, RuntimeError: if an id is outside of the table; on a GPU as a failed assertion, later.
    """
    fuses = fuse_wgrad_accumulation
    if fuses == "if_claimed":
        fuses = CLAIM_MAIN_GRAD.of(weight) is not None
    if not (fuses and torch.is_grad_enabled() and weight.requires_grad):
        return _rows_of(weight, ids, padding_row, is_split)
    name = f"{type(owner).__name__}.weight"
    return _Embedding.apply(weight, ids, _Spec(name, padding_row, is_split, is_first_microbatch))


def _rows_of(weight: Tensor, rows: Tensor, padding_row: int | None, is_split: bool) -> Tensor:
    """Rows of the weight, and zeros for -1 if the table is split."""
    if not is_split:
        return F.embedding(rows, weight, padding_row)
    found = F.embedding(rows.clamp(min=0), weight, padding_row)
    return found.masked_fill_((rows < 0).unsqueeze(-1), 0.0)


class _Spec(NamedTuple):
    """What one look-up needs besides tensors.

    Attributes:
        name: of the table, for messages.
        padding_row, is_split, is_first_microbatch: see `look_up`.
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
    """Sums what ranks have looked up, or gives each its part of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        if not exchange.sequence_parallel:
            ctx.mark_dirty(rows)
        return exchange.start_sum(rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.exchange.gathers_grad:
            dy = ctx.exchange.start_gather(dy.contiguous()).wait()
        return dy, None
