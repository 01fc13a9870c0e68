"""What `Linear` and `LayerNormLinear` have in common: options, parameters, and one call of the primitive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.fp8.linear import FuseWgrad, LinearCall, checked_fuse_wgrad
from flatfsdp.fp8.module import FP8Module, Roles, activation_dtype
from flatfsdp.fp8.operand import Operand
from flatfsdp.layers.parameters import InitMethod, new_parameter, normal_init, require_no_tensor_parallelism


class LinearOptions(TypedDict, total=False):
    """Keyword arguments of `Linear` and `LayerNormLinear`, with Transformer Engine's names.

    Attributes:
        return_bias: do not add the bias but return (out, bias), for a later fused bias + dropout + add.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        params_dtype: of the parameters; default: torch's default dtype.
        device: of the parameters; "meta" to initialise them later with `reset_parameters`.
        fuse_wgrad_accumulation: add the weight's gradient to its FP32 `main_grad` in the product itself, and
            give autograd none.  Needs FlatFSDP, or a weight with a `main_grad`.  "two_pass" gives the same
            bits with power-of-two scales, through an FP32 temporary.
        parameters_split: the weight's rows, and the bias, as several parameters: names, or names and
            numbers of rows.  Named <name>_weight and <name>_bias.  Not with fuse_wgrad_accumulation.
        parallel_mode: "column", "row" or None.
        tp_group, tp_size, sequence_parallel: only one rank for now.
    """

    return_bias: bool
    init_method: InitMethod | None
    params_dtype: torch.dtype | None
    device: torch.device | str | None
    fuse_wgrad_accumulation: FuseWgrad
    parameters_split: Mapping[str, int] | Sequence[str] | None
    parallel_mode: str | None
    tp_group: dist.ProcessGroup | None
    tp_size: int
    sequence_parallel: bool


class Prepared(NamedTuple):
    """One call: the input as a matrix, the parameters, and what the linear primitive takes.

    Attributes:
        x: [tokens, in_features], contiguous, in the dtype of the activations.
        added_bias: the bias that the product adds; None with `return_bias`.
        operand: the weight.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    added_bias: Tensor | None
    operand: Operand
    roles: Roles
    call: LinearCall


class Projection(FP8Module):
    """Holds weight [out_features, in_features] and bias [out_features], in one piece or split by rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        fuse_wgrad_accumulation: FuseWgrad = False,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        parallel_mode: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require_no_tensor_parallelism(
            name, tp_group=tp_group, tp_size=tp_size, sequence_parallel=sequence_parallel
        )
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(
                f"{name}: parallel_mode is {parallel_mode!r}; it must be None, 'column' or 'row'"
            )
        if parameters_split is not None and fuse_wgrad_accumulation:
            raise ValueError(
                f"{name}: parameters_split with fuse_wgrad_accumulation: one product cannot write to the "
                "main_grad of several parameters; leave one of them out"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = checked_fuse_wgrad(fuse_wgrad_accumulation, name)
        self.init_method = normal_init if init_method is None else init_method
        self._prefixes = _rows(name, parameters_split, out_features)
        for prefix, rows in self._prefixes.items():
            weight = new_parameter(rows, in_features, dtype=params_dtype, device=device)
            added = new_parameter(rows, dtype=params_dtype, device=device) if bias else None
            self.register_parameter(f"{prefix}weight", weight)
            self.register_parameter(f"{prefix}bias", added)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters where they are; nothing on the meta device."""
        for prefix in self._prefixes:
            weight, bias = getattr(self, f"{prefix}weight"), getattr(self, f"{prefix}bias")
            if not weight.is_meta:
                self.init_method(weight)
                if bias is not None:
                    bias.zero_()

    def prepare(
        self, inp: Tensor, is_first_microbatch: bool | None, *, also_trained: Sequence[Tensor | None] = ()
    ) -> Prepared:
        """
        Args:
            also_trained: parameters in front of the product, which need its input's gradient.

        Raises:
            ValueError, TypeError, RuntimeError: see `Linear.forward`.
        """
        weight, bias = self._joined("weight"), self._joined("bias")
        assert weight is not None
        dtype = activation_dtype(inp, self, weight)
        x = as_matrix(inp, self.in_features, dtype, self)
        (roles,) = self.roles(inp.device)
        if roles.is_fp8:
            self.require_fp8_shape("weight", x.shape[0], self.in_features, self.out_features)
        added = None if self.return_bias else bias
        sources = (inp, *also_trained)
        needs_input_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in sources)
        call = self.call("weight", weight, added, roles, dtype, is_first_microbatch, needs_input_grad)
        operand = self.weight_operand(
            "weight", weight, roles, is_first_microbatch, dtype, columnwise=needs_input_grad
        )
        return Prepared(x, weight, bias, added, operand, roles, call)

    def _joined(self, kind: str) -> Tensor | None:
        parts = [getattr(self, prefix + kind) for prefix in self._prefixes]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    def extra_repr(self) -> str:
        fused = f", fuse_wgrad_accumulation={self.fuse_wgrad_accumulation}"
        return f"{self.in_features}, {self.out_features}{fused if self.fuse_wgrad_accumulation else ''}"


def as_matrix(inp: Tensor, features: int, dtype: torch.dtype, layer: object) -> Tensor:
    """[..., features] as a contiguous [tokens, features] in `dtype`.

    Raises:
        ValueError: if the last dimension is another one.
    """
    if inp.dim() == 0 or inp.shape[-1] != features:
        raise ValueError(
            f"{type(layer).__name__}: the input has shape {tuple(inp.shape)}; its last dimension has to be "
            f"{features}"
        )
    # With no tokens a -1 would be ambiguous.
    return inp.to(dtype).reshape(inp.numel() // features, features).contiguous()


def residual_matrix(
    residual: Tensor | None, inp: Tensor, features: int, dtype: torch.dtype, layer: object
) -> Tensor | None:
    """As `as_matrix`, of what is added to `inp`.

    Raises:
        ValueError: if the two have different shapes.
    """
    if residual is None:
        return None
    if residual.shape != inp.shape:
        raise ValueError(
            f"{type(layer).__name__}: the residual has shape {tuple(residual.shape)}; it has to be the "
            f"input's, {tuple(inp.shape)}"
        )
    if residual.is_leaf and residual.requires_grad:
        # Both addends get one gradient.  For leaves autograd keeps it, and copies none that comes through a
        # view, so that further backwards would add to both.
        residual = residual * 1
    return as_matrix(residual, features, dtype, layer)


def _rows(layer: str, split: Mapping[str, int] | Sequence[str] | None, out_features: int) -> dict[str, int]:
    """Rows of each weight, by the prefix of its name."""
    if split is None:
        return {"": out_features}
    if isinstance(split, Mapping):
        sizes = dict(split)
    else:
        sizes = {name: out_features // len(split) for name in split}
    if sum(sizes.values()) != out_features:
        raise ValueError(f"{layer}: parameters_split {sizes} does not add up to {out_features} rows")
    return {f"{name.removesuffix('_')}_": rows for name, rows in sizes.items()}
