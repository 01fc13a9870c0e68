"""Layers that make the parameters of their linear maps: `OwnMaps`, and `Projection` for those with one map.

Next: `linear.py`, `layernorm_linear.py` and `layernorm_mlp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.packed import Pack, is_packed, packed_tensor
from flatfsdp.contract.tensor_parallel import SKIP_BACKWARD_POST_HOOK, Mode, declare_map
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.layers.layer_options import MatmulOptions
from flatfsdp.layers.parameters import InitMethod, new_parameter, normal_init
from flatfsdp.layers.shared import initialize
from flatfsdp.matmul.exchange import Exchange


class OwnMaps(MatmulLayer):
    """A layer that makes the parameters of its linear maps, instead of reading those of another model.

    Args:
        options: options of every layer with linear maps, listed in `MatmulOptions`.
    """

    def __init__(self, **options: Unpack[MatmulOptions]) -> None:
        super().__init__(**options)
        self._init_methods: dict[str, InitMethod] = {}

    def _new_parameter(self, *shape: int) -> nn.Parameter:
        """Makes an uninitialised parameter for the constructor."""
        return new_parameter(*shape, dtype=self._params_dtype, device=self._params_device)

    def _add_map(
        self,
        prefix: str,
        shape: tuple[int, int],
        bias: bool,
        mode: Mode | None,
        sizes: tuple[int, ...],
        init_method: InitMethod | None,
    ) -> None:
        """Makes the weight and bias of a linear map, or of some of its rows.

        Args:
            prefix: of their names.
            shape: of this rank's weight.
            bias: whether there is one.
            mode: "column", "row" or None.
            sizes: sizes of the parts of the split dimension, over all ranks.
            init_method: fills the weight in place; None: `normal_init`.
        """
        weight = self._new_parameter(*shape)
        added = self._new_parameter(shape[0]) if bias else None
        declare_map(self._parallel, mode, weight, added, sizes)
        if self._delayed_wgrads is not None:
            SKIP_BACKWARD_POST_HOOK.leave(weight, True)
        self.register_parameter(f"{prefix}weight", weight)
        self.register_parameter(f"{prefix}bias", added)
        self._init_methods[prefix] = init_method or normal_init

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters in place; does nothing on the meta device."""
        for prefix, init_method in self._init_methods.items():
            weight, bias = getattr(self, f"{prefix}weight"), getattr(self, f"{prefix}bias")
            if not weight.is_meta:
                initialize(weight, init_method, self._parallel.ranks)
                if bias is not None:
                    bias.zero_()


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
            raise ValueError(
                f"{name}: parallel_mode is {parallel_mode!r}; it must be None, 'column' or 'row'"
            )
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
