"""`Embedding`: nn.Embedding whose gradient is added to an FP32 `main_grad` row by row.

In:   ids [...], int64 or int32;  out: [..., embedding_dim].
Next: the first layer of a model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatfsdp.autograd import receives_gradient
from flatfsdp.fp8.main_grad import claim
from flatfsdp.kernels.embedding import embedding_grad
from flatfsdp.layers.parameters import InitMethod, new_parameter, normal_init


class Embedding(nn.Module):
    """One row of `weight` for each id.

    Args:
        num_embeddings, embedding_dim: shape of the table.
        padding_idx: an id whose row gets no gradient, and starts as zeros.
        init_method: fills the table in place; default: normal with standard deviation 0.023.
        params_dtype, device: of the table.
        fuse_wgrad_accumulation: add the gradient to the FP32 `main_grad` of the table, of which only the rows
            of the batch's ids are touched, instead of giving autograd a gradient of the whole table.

    Attributes:
        weight: [num_embeddings, embedding_dim].
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
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}; the table has {num_embeddings} rows")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.init_method = normal_init if init_method is None else init_method
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.weight = new_parameter(num_embeddings, embedding_dim, dtype=params_dtype, device=device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the table where it is; nothing on the meta device."""
        if not self.weight.is_meta:
            self.init_method(self.weight)
            if self.padding_idx is not None:
                self.weight[self.padding_idx].zero_()

    def forward(self, ids: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[...] to [..., embedding_dim], in the table's dtype.

        Args:
            is_first_microbatch: True overwrites a plain `main_grad`, as in `Linear`.
        """
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled() and self.weight.requires_grad:
            return _Embedding.apply(self.weight, ids, self.padding_idx, is_first_microbatch)
        return F.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None, is_first_microbatch: bool | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding_idx, ctx.is_first_microbatch = weight, padding_idx, is_first_microbatch
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
        if not receives_gradient(ctx.weight):
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        slot = claim(ctx.weight, "Embedding.weight", ctx.is_first_microbatch)
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        embedding_grad(slot.target, rows, ids.reshape(-1), first=slot.first, padding_idx=ctx.padding_idx)
        return None, None, None, None
