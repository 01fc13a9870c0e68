"""`Linear` and `LayerNormLinear`: one linear map, alone or behind a norm, in optional FP8.

In:   [..., in_features];  out: [..., out_features].
Next: `calls.py`; `attention/multihead.py` uses both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from flatfsdp.contract.packed import Pack, is_packed, packed_tensor
from flatfsdp.contract.tensor_parallel import Mode
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import linear, norm_linear, prepare
from flatfsdp.layers.layer_options import LinearOptions, MatmulOptions
from flatfsdp.layers.normalized import NormKind
from flatfsdp.layers.own_maps import NormFirst, OwnMaps
from flatfsdp.layers.shared import InitMethod
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.torch_private import never_traced


class Projection(OwnMaps):
    """A layer with one linear map: weight [out_features, in_features] and bias, optionally split by rows.

    Args:
        in_features: size of the whole input.
        out_features: size of the whole output.
        bias: whether there is a bias.
        return_bias: return the bias instead of adding it.
        init_method: fills the weight in place.
        parameters_split: names, and optionally row counts, of parameters that the weight is made of.
        parallel_mode: "column", "row" or None.
        partition_sizes: sizes of the parts of out_features that are split over ranks one by one.
        options: options of every layer with linear maps, listed in `MatmulOptions`.

    Attributes:
        in_features, out_features: sizes of this rank's part.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        return_bias: bool = False,
        init_method: InitMethod | None = None,
        parameters_split: Mapping[str, int] | Sequence[str] | None = None,
        parallel_mode: Mode | None = None,
        partition_sizes: Sequence[int] | None = None,
        **options: Unpack[MatmulOptions],
    ) -> None:
        super().__init__(**options)
        name = type(self).__name__
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"{name}: parallel_mode is {parallel_mode!r}, not None, 'column' or 'row'")
        if parameters_split is not None and self._delayed_wgrads is not None:
            raise ValueError(
                f"{name}: parameters_split with delay_wgrad_compute: autograd splits the gradient of the "
                "packed weight in the backward; leave one of them out"
            )
        self._mode: Mode | None = parallel_mode
        self.exchanges["weight"] = Exchange.of(self._parallel, parallel_mode)
        self.return_bias = return_bias
        self.in_features = self._share("in_features", in_features, "row")
        self.out_features = self._share("out_features", out_features, "column")
        parts = _rows(name, parameters_split, partition_sizes, out_features)
        self._prefixes = tuple(parts)
        self._is_split = len(parts) > 1
        for prefix, sizes in parts.items():
            rows = sum(self._share(f"a part of {prefix}weight", size, "column") for size in sizes)
            split = (in_features,) if parallel_mode == "row" else sizes
            self._add_map(prefix, (rows, self.in_features), bias, parallel_mode, split, init_method)

    def _share(self, what: str, size: int, mode: Mode) -> int:
        """This rank's part of a size that `mode` splits."""
        return self._parallel.share(type(self).__name__, what, size) if self._mode == mode else size

    def packed_parameters(self) -> tuple[Pack, ...]:
        """Weight and bias, if each is several parameters that the GEMM reads as one operand."""
        if not self._is_split:
            return ()
        has_bias = getattr(self, f"{self._prefixes[0]}bias") is not None
        return tuple(self._pack(kind) for kind in (("weight", "bias") if has_bias else ("weight",)))

    def _pack(self, kind: str) -> Pack:
        # Not stored: a layer that refers to itself would only be freed by the garbage collector.
        return Pack(kind, tuple([(self, f"{prefix}{kind}") for prefix in self._prefixes]))

    @property
    def is_plain(self) -> bool:
        """Whether it computes x w^T + b of one unsplit weight, with the weight gradient in the backward."""
        is_whole = self.exchanges["weight"].mode is None and not self._is_split
        return is_whole and not self.return_bias and self._delayed_wgrads is None

    def _whole_weight(self) -> Tensor:
        """The packed weight, [out_features, in_features].

        Raises:
            RuntimeError: if a fused weight gradient would have to be written to several buffers.
        """
        weight: Tensor = self._whole("weight")
        fuses = self.fuse_wgrad_accumulation
        accumulates = fuses and fuses != "if_claimed" and weight.requires_grad
        if accumulates and self._is_split and not is_packed(self, "weight"):
            parts = ", ".join(f"{prefix}weight" for prefix in self._prefixes)
            raise RuntimeError(
                f"{type(self).__name__}: fuse_wgrad_accumulation={fuses!r} with "
                f"{parts}: one GEMM writes their gradients to one buffer, so all have to be trained, in "
                "one FlatFSDP unit and of one dtype; wrap the layer so, or build it with "
                "fuse_wgrad_accumulation='if_claimed', or without parameters_split (fuse_qkv_params=True)"
            )
        return weight

    def _whole(self, kind: str) -> Any:
        """The weight, [out_features, in_features], or the bias, [out_features] or None, as one tensor."""
        first = getattr(self, f"{self._prefixes[0]}{kind}")
        if first is None or not self._is_split:
            return first
        whole = packed_tensor(self, self._pack(kind)) if is_packed(self, kind) else None
        return torch.cat(self._parts_of(kind)) if whole is None else whole

    def _parts_of(self, name: str) -> list[Tensor]:
        return [getattr(self, f"{prefix}{name}") for prefix in self._prefixes]

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        fused, size = self.fuse_wgrad_accumulation, self._parallel.ranks.size
        options = f", fuse_wgrad_accumulation={fused}" if fused else ""
        parallel = f", parallel_mode={self._mode!r} of {size}" if size > 1 else ""
        return f"{self.in_features}, {self.out_features}{options}{parallel}"


def _rows(
    layer: str,
    split: Mapping[str, int] | Sequence[str] | None,
    partition_sizes: Sequence[int] | None,
    out_features: int,
) -> dict[str, tuple[int, ...]]:
    """Row counts of each weight's parts, by the prefix of its name."""
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


class Linear(Projection):
    """A linear layer, y = x w^T + b.  Drop-in for nn.Linear, with Transformer Engine's arguments.

    Inside `flatfsdp.fp8.autocast` its GEMMs run in FP8; input, output and parameters keep their dtypes.

    Args:
        in_features: size of the input; a multiple of 16 for FP8.
        out_features: size of the output; a multiple of 16 for FP8.
        bias: whether there is a bias.
        options: further options, listed in `LinearOptions`.

    Attributes:
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Raises:
        ValueError: if options contradict each other, or a size does not divide evenly over the ranks.
    """

    @takes_te_arguments
    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = True, **options: Unpack[LinearOptions]
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.reset_parameters()

    @never_traced
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Computes x w^T + b: [..., in_features] to this rank's [..., out_features].

        With `return_bias` the result is (x w^T, bias).

        Args:
            inp: [..., in_features].
            is_first_microbatch: True (the first microbatch of a step) casts the FP8 weight and keeps it,
                False reuses it, None casts in every call.  True also overwrites a plain `main_grad`.

        Raises:
            ValueError: if the input's size does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of the weight is kept.
        """
        bias = self._whole("bias")
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        out = linear(prepare(self, inp, of, is_first_microbatch=is_first_microbatch))
        if not self.return_bias:
            return out
        return out, None if bias is None else bias.to(out.dtype)


class LayerNormLinear(NormFirst, Projection):
    """A norm and a linear map: y = norm(x) w^T + b, or norm(x + residual) w^T + b.

    Args:
        in_features: size of the input; a multiple of 16 for FP8.
        out_features: size of the output; a multiple of 16 for FP8.
        eps: epsilon of the norm.
        bias: whether the linear map has a bias.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's gain is 1 + its weight.
        return_layernorm_output: return norm(x) as well.
        options: the further options of `Linear`, listed in `LinearOptions`; parallel_mode cannot be "row".

    Attributes:
        layer_norm_weight, layer_norm_bias: [in_features]; RMSNorm has no bias.
        weight: [out_features, in_features].
        bias: [out_features], or None.

    Raises:
        ValueError: if options contradict each other, or a size does not divide evenly over the ranks.
    """

    @takes_te_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        if options.get("parallel_mode") == "row":
            raise ValueError("LayerNormLinear: parallel_mode is 'row'; a norm needs all features of a token")
        super().__init__(in_features, out_features, bias, **options)
        self.return_layernorm_output = return_layernorm_output
        self._add_norm(in_features, NormKind.named(normalization, eps, zero_centered_gamma))
        self.reset_parameters()

    @never_traced
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Normalizes and multiplies: [..., in_features] to [..., out_features] of this rank.

        Args:
            inp: [..., in_features].
            is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every
                time.
            residual: of inp's shape; the norm adds it to `inp` in the same pass.
            return_residual: return `inp`, or inp + residual, as well, for a residual connection around this
                layer: its gradient is then added inside the norm's backward.  Under torch.autocast it has
                autocast's dtype.

        Returns:
            out, or a tuple of out, the bias (`return_bias`), the norm's result (`return_layernorm_output`)
            and the norm's input (`return_residual`).

        Raises:
            ValueError: if a shape does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of the weight is kept.
        """
        bias = self._whole("bias")
        of = MapOf("weight", self._whole_weight(), None if self.return_bias else bias)
        called = norm_linear(
            prepare(self, inp, of, is_first_microbatch=is_first_microbatch),
            self._norm_of(),
            residual=residual,
            keep=self.return_layernorm_output,
        )
        return self._results(called, bias, inp, return_residual=return_residual)
