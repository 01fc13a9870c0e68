"""What `Linear` and `LayerNormLinear` have in common: options, parameters, and one call of the primitive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from flatfsdp.comm.rng import GetTracker
from flatfsdp.contract.operand import Operand
from flatfsdp.contract.tensor_parallel import Mode, TensorParallel, declare_map
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.checks import activation_dtype, require_fp8_shape
from flatfsdp.layers.parameters import InitMethod, new_parameter, normal_init
from flatfsdp.layers.shared import initialize
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.linear_map import FuseWgrad, LinearCall, checked_fuse_wgrad


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
        delay_wgrad_compute: leave the weight's gradient out of the backward, until `backward_dw()` is called.
            Not with parameters_split, nor in FlatFSDP, which reduces gradients in the backward.
        parameters_split: the weight's rows, and the bias, as several parameters: names, or names and
            numbers of rows.  Named <name>_weight and <name>_bias.  Not with fuse_wgrad_accumulation.
        parallel_mode: how the ranks of `tp_group` share the weight: "column", by out_features, "row", by
            in_features, or None, not at all.  Sizes given are those of the whole weight.
        tp_group: ranks that share the layer.
        tp_size: their number; may be left out.  Without a tp_group: `set_tensor_parallel_group` brings it.
        sequence_parallel: what a column layer is given, and a row layer returns, is split over the ranks
            along dimension 0, the sequence.
        tp_overlap: on GPUs, with sequence_parallel: cut into chunks what would have to be sent before a
            product, or after it, and multiply the one while the other is sent; see `fp8.overlapped`.
        partition_sizes: "column": sizes of the parts of out_features of which each rank has its share, such
            as those of queries, keys and values; default: one part.
        get_rng_state_tracker: for Transformer Engine's sake: initial values are those of one process.
    """

    return_bias: bool
    init_method: InitMethod | None
    params_dtype: torch.dtype | None
    device: torch.device | str | None
    fuse_wgrad_accumulation: FuseWgrad
    delay_wgrad_compute: bool
    parameters_split: Mapping[str, int] | Sequence[str] | None
    parallel_mode: Mode | None
    tp_group: dist.ProcessGroup | None
    tp_size: int
    sequence_parallel: bool
    tp_overlap: bool
    partition_sizes: Sequence[int] | None
    get_rng_state_tracker: GetTracker | None


class Prepared(NamedTuple):
    """One call: the input as a matrix, the parameters, and what the linear primitive takes.

    Attributes:
        x: [tokens, in_features], contiguous, in the dtype of the activations.
        added_bias: the bias that the product adds; None with `return_bias`.
        operand: the weight.
        out_shape: of the result.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    added_bias: Tensor | None
    operand: Operand
    call: LinearCall
    out_shape: tuple[int, ...]


class Projection(MatmulLayer):
    """Holds weight [out_features, in_features] and bias [out_features], in one piece or split by rows.

    Attributes:
        in_features, out_features: of this rank's part.
    """

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
        delay_wgrad_compute: bool = False,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        parallel_mode: Mode | None = None,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        tp_overlap: bool = False,
        partition_sizes: Sequence[int] | None = None,
        get_rng_state_tracker: GetTracker | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(
                f"{name}: parallel_mode is {parallel_mode!r}; it must be None, 'column' or 'row'"
            )
        if parameters_split is not None and fuse_wgrad_accumulation:
            raise ValueError(
                f"{name}: parameters_split with fuse_wgrad_accumulation: one product cannot write to the "
                "main_grad of several parameters; leave one of them out"
            )
        if parameters_split is not None and delay_wgrad_compute:
            raise ValueError(
                f"{name}: parameters_split with delay_wgrad_compute: autograd splits the gradient of the "
                "joint weight in the backward; leave one of them out"
            )
        self._parallel = TensorParallel.of(name, tp_group, tp_size, sequence_parallel, tp_overlap)
        self._mode: Mode | None = parallel_mode
        self.exchanges["weight"] = Exchange.of(self._parallel, parallel_mode)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = checked_fuse_wgrad(fuse_wgrad_accumulation, name)
        self.init_method = normal_init if init_method is None else init_method
        self.in_features = self._share("in_features", in_features, "row")
        self.out_features = self._share("out_features", out_features, "column")
        parts = _rows(name, parameters_split, partition_sizes, out_features)
        self._prefixes = tuple(parts)
        for prefix, sizes in parts.items():
            rows = sum(self._share(f"a part of {prefix}weight", size, "column") for size in sizes)
            weight = new_parameter(rows, self.in_features, dtype=params_dtype, device=device)
            added = new_parameter(rows, dtype=params_dtype, device=device) if bias else None
            split = (in_features,) if parallel_mode == "row" else sizes
            declare_map(self._parallel, parallel_mode, weight, added, split)
            self.register_parameter(f"{prefix}weight", weight)
            self.register_parameter(f"{prefix}bias", added)
        if delay_wgrad_compute:
            self._delay_wgrads()

    def _share(self, what: str, size: int, mode: Mode) -> int:
        """This rank's part of a size that `mode` splits."""
        return self._parallel.share(type(self).__name__, what, size) if self._mode == mode else size

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters where they are; nothing on the meta device."""
        for prefix in self._prefixes:
            weight, bias = getattr(self, f"{prefix}weight"), getattr(self, f"{prefix}bias")
            if not weight.is_meta:
                initialize(weight, self.init_method, self._parallel.ranks)
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
        exchange = self.exchanges["weight"]
        leading = exchange.leading_shape(type(self).__name__, inp.shape)
        (casts,) = self.casts(inp.device)
        if casts.is_fp8:
            tokens = exchange.tokens(x.shape[0])
            require_fp8_shape(self, "weight", tokens, self.in_features, self.out_features)
        added = None if self.return_bias else bias
        sources = (inp, *also_trained)
        operand, call = self.prepare_map("weight", weight, added, casts, dtype, is_first_microbatch, sources)
        return Prepared(x, weight, bias, added, operand, call, (*leading, self.out_features))

    def _joined(self, kind: str) -> Tensor | None:
        parts = [getattr(self, prefix + kind) for prefix in self._prefixes]
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    def extra_repr(self) -> str:
        fused, size = self.fuse_wgrad_accumulation, self._parallel.ranks.size
        options = f", fuse_wgrad_accumulation={fused}" if fused else ""
        parallel = f", parallel_mode={self._mode!r} of {size}" if size > 1 else ""
        return f"{self.in_features}, {self.out_features}{options}{parallel}"


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


def _rows(
    layer: str,
    split: Mapping[str, int] | Sequence[str] | None,
    partition_sizes: Sequence[int] | None,
    out_features: int,
) -> dict[str, tuple[int, ...]]:
    """Sizes of the parts of each weight's rows, by the prefix of its name."""
    if split is None:
        sizes = (out_features,) if partition_sizes is None else tuple(partition_sizes)
        if sum(sizes) != out_features:
            raise ValueError(f"{layer}: partition_sizes {sizes} does not add up to {out_features} rows")
        return {"": sizes}
    if partition_sizes is not None:
        raise ValueError(f"{layer}: parameters_split with partition_sizes: each parameter is one part")
    rows = split if isinstance(split, Mapping) else {name: out_features // len(split) for name in split}
    if sum(rows.values()) != out_features:
        raise ValueError(f"{layer}: parameters_split {dict(rows)} does not add up to {out_features} rows")
    return {f"{name.removesuffix('_')}_": (size,) for name, size in rows.items()}
