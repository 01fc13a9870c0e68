"""Options that layers pass on to the layers inside them, each documented once.

    MatmulOptions           all layers with GEMMs
        LinearOptions       Linear, LayerNormLinear, LinearCrossEntropy
        BlockOptions        LayerNormMLP, with NormOptions
            AttentionOptions    MultiheadAttention, TransformerLayer

The names are Transformer Engine's.  A constructor names the options that it uses itself, which have their
defaults there, and passes the others on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import torch
import torch.distributed as dist

from flatfsdp.comm.rng import GetTracker
from flatfsdp.contract.tensor_parallel import Mode, TensorParallel
from flatfsdp.layers.parameters import InitMethod
from flatfsdp.matmul.linear_map import FuseWgrad


class MatmulOptions(TypedDict, total=False):
    """Keyword arguments of every layer that has linear maps, itself or in layers inside.

    Attributes:
        fuse_wgrad_accumulation: add the weight's gradient to its FP32 `main_grad` in the GEMM itself, and
            give autograd none; default: False.  Needs FlatFSDP, or a weight with a `main_grad`.  "two_pass"
            gives the same bits with power-of-two scales, through an FP32 temporary.  "if_claimed": True where
            FlatFSDP has the weight when the layer is called, False in a plain model.
        delay_wgrad_compute: leave the weight's gradient out of the backward, until `backward_dw()` is called;
            default: False.  Not in FlatFSDP, which reduces gradients in the backward.
        params_dtype: of the parameters; default: torch's default dtype.
        device: of the parameters; "meta" to initialise them later with `reset_parameters`.
        tp_group: ranks that share the layer.
        tp_size: their number; may be left out.  Without a tp_group: `set_tensor_parallel_group` brings it.
        sequence_parallel: activations between the layers of these ranks are split over them along dimension
            0, the sequence: what a column layer is given, and a row layer returns; default: False.
        tp_overlap: on GPUs, with sequence_parallel: cut into chunks what would have to be sent before a GEMM,
            or after it, and multiply the one while the other is sent; default: False.  See
            `matmul/overlapped.py`.
        get_rng_state_tracker: gives what draws the dropout of this rank's heads, or part of the sequence;
            default: an `RNGTracker`.  Linear maps take it for Transformer Engine's sake: initial values are
            those of one process.
    """

    fuse_wgrad_accumulation: FuseWgrad
    delay_wgrad_compute: bool
    params_dtype: torch.dtype | None
    device: torch.device | str | None
    tp_group: dist.ProcessGroup | None
    tp_size: int
    sequence_parallel: bool
    tp_overlap: bool
    get_rng_state_tracker: GetTracker | None


class LinearOptions(MatmulOptions, total=False):
    """Keyword arguments of `Linear`, `LayerNormLinear` and `LinearCrossEntropy`.

    Attributes:
        return_bias: do not add the bias but return (out, bias), for a later fused bias + dropout + add;
            default: False.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        parameters_split: the weight's rows, and the bias, as several parameters: names, or names and
            numbers of rows.  Named <name>_weight and <name>_bias.  They are still one operand: FlatFSDP keeps
            them side by side, and in a plain model each call concatenates them.  With
            fuse_wgrad_accumulation=True in FlatFSDP only; not with delay_wgrad_compute.
        parallel_mode: how the ranks of `tp_group` share the weight: "column", by out_features, "row", by
            in_features, or None, not at all, which is the default.  Sizes given are those of the whole
            weight.
        partition_sizes: "column": sizes of the parts of out_features of which each rank has its share, such
            as those of queries, keys and values; default: one part.
    """

    return_bias: bool
    init_method: InitMethod | None
    parameters_split: Mapping[str, int] | Sequence[str] | None
    parallel_mode: Mode | None
    partition_sizes: Sequence[int] | None


class NormOptions(TypedDict, total=False):
    """Keyword arguments of layers with a norm.

    Attributes:
        normalization: "LayerNorm", which is the default, or "RMSNorm".
        zero_centered_gamma: the norm's gain is 1 + its weight; default: False.
    """

    normalization: str
    zero_centered_gamma: bool


class BlockOptions(MatmulOptions, NormOptions, total=False):
    """Keyword arguments of both halves of a transformer layer.

    Attributes:
        bias: whether the linear maps have one; default: True.
        set_parallel_mode: the ranks of `tp_group` share the heads, or the width between the maps: the rows of
            the first weight and the columns of the second; sizes given are those of the whole layer.
            Default: False, they share nothing.
    """

    bias: bool
    set_parallel_mode: bool


class AttentionOptions(BlockOptions, total=False):
    """Keyword arguments of `MultiheadAttention` and `TransformerLayer`.

    Attributes:
        fuse_qkv_params: one weight for query, key and value; else query_weight, key_weight and value_weight;
            default: False.  See `parameters_split` of `LinearOptions`.
        qkv_weight_interleaved: with fuse_qkv_params: rows of the weight are [q.. k v] for each group of
            heads, instead of [Q; K; V]; default: True.
        rotary_pos_interleaved: RoPE turns pairs of neighbours instead of halves; default: False.
        rotary_base: use RoPE with this base, unless a call brings other tables; default: only if it does.
        qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" of queries and keys over each head; default:
            none.
        qk_norm_eps: of these norms; default: 1e-6.
        qk_norm_before_rope: before RoPE, instead of after it, which is the default.
    """

    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    rotary_pos_interleaved: bool
    rotary_base: float | None
    qk_norm_type: str | None
    qk_norm_eps: float
    qk_norm_before_rope: bool


Options = TypeVar("Options")


def only(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Those of `options` that `kind`, one of the classes above, has."""
    return cast(Options, {name: value for name, value in options.items() if name in kind.__annotations__})


def require_known(layer: str, kind: type, options: Mapping[str, Any]) -> None:
    """Checks keyword arguments that `only` would drop.

    Raises:
        TypeError: if `kind` does not have one of them.
    """
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(f"{layer}() got an unexpected keyword argument {name!r}")


def shared_by(layer: str, options: MatmulOptions) -> TensorParallel:
    """Which ranks share a layer with these options, and how.

    Raises:
        ValueError: see `TensorParallel.of`.
    """
    return TensorParallel.of(
        layer,
        options.get("tp_group"),
        options.get("tp_size", 1),
        options.get("sequence_parallel", False),
        options.get("tp_overlap", False),
    )
