"""Options that layers pass on to the layers inside them, each documented once.

    MatmulOptions           all layers with GEMMs
        LinearOptions       Linear, LayerNormLinear, LinearCrossEntropy
        BlockOptions        LayerNormMLP, with NormOptions
            AttentionOptions    MultiheadAttention, TransformerLayer

The names are Transformer Engine's.  A constructor declares the options that it uses itself, with their
defaults, and passes the others on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

import torch
import torch.distributed as dist

from flatfsdp.comm.rng import GetTracker
from flatfsdp.contract.tensor_parallel import Mode, TensorParallel
from flatfsdp.layers.shared import InitMethod
from flatfsdp.matmul.linear_map import FuseWgrad


class MatmulOptions(TypedDict, total=False):
    """Keyword arguments of every layer that has linear maps, itself or in an inner layer.

    Attributes:
        fuse_wgrad_accumulation: add the weight gradient to the weight's `main_grad`, FP32 or bf16, in the
            GEMM itself, and give autograd none; default: False.  Needs FlatFSDP, or a weight with a
            `main_grad`.  "two_pass" gives the same bits with power-of-two scales, through a temporary, but
            rounds what it adds to a bf16 `main_grad` before.  "if_claimed" means True if FlatFSDP manages the
            weight when the layer is called, and False in a plain model.
        delay_wgrad_compute: defer the weight gradient until `backward_dw()` is called; default: False.  Not
            with FlatFSDP, which reduces gradients in the backward.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; "meta" to initialise them later with `reset_parameters`.
        tp_group: tensor-parallel ranks that share the layer.
        tp_size: size of tp_group; may be left out.  Without a tp_group, `set_tensor_parallel_group` sets it
            later.
        sequence_parallel: split activations between the layers over the tensor-parallel ranks along dimension
            0, the sequence (the input of column-parallel and the output of row-parallel layers); default:
            False.
        tp_overlap: on GPUs, with sequence_parallel: split the all-gather before a GEMM, or the reduce-scatter
            after it, into chunks, and compute one chunk while the next is sent; default: False
            (`matmul/overlapped.py`).
        get_rng_state_tracker: returns the random-number tracker for dropout that differs between
            tensor-parallel ranks; default: an `RNGTracker`.  Linear maps accept it for compatibility with
            Transformer Engine and ignore it: their initial values are those of one process.
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
        return_bias: return (out, bias) instead of adding the bias, for a later fused bias + dropout + add;
            default: False.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        parameters_split: make the weight's rows, and the bias, several parameters, given by names, or by
            names and row counts; they are called <name>_weight and <name>_bias.  They remain one operand:
            FlatFSDP stores them contiguously, and a plain model concatenates them in each call.  Together
            with fuse_wgrad_accumulation=True only in FlatFSDP; not with delay_wgrad_compute.
        parallel_mode: how the ranks of `tp_group` split the weight: "column", by out_features; "row", by
            in_features; or None, the default: not at all.  Sizes given are those of the whole weight.
        partition_sizes: for "column": sizes of consecutive parts of out_features, each of which is split over
            the ranks, such as queries, keys and values; default: one part.
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
        bias: whether the linear maps have biases; default: True.
        set_parallel_mode: split the heads, or the width between the maps, over the ranks of `tp_group`; sizes
            given are those of the whole layer; default: False, no split.
    """

    bias: bool
    set_parallel_mode: bool


class AttentionOptions(BlockOptions, total=False):
    """Keyword arguments of `MultiheadAttention` and `TransformerLayer`.

    Attributes:
        fuse_qkv_params: one weight for query, key and value, instead of query_weight, key_weight and
            value_weight (`parameters_split` of `LinearOptions`); default: False.
        qkv_weight_interleaved: with fuse_qkv_params: the weight's rows are [q.. k v] for each group of heads,
            instead of [Q; K; V]; default: True.
        rotary_pos_interleaved: RoPE rotates pairs of neighbouring elements instead of pairs from the two
            halves; default: False.
        rotary_base: apply RoPE with this base unless a call passes tables; default: None, RoPE only with
            passed tables.
        qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" of queries and keys over each head; default:
            no norm.
        qk_norm_eps: epsilon of these norms; default: 1e-6.
        qk_norm_before_rope: normalize before RoPE instead of after it; default: False.
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
    """Those of `options` that the class `kind` declares."""
    return cast(Options, {name: value for name, value in options.items() if name in kind.__annotations__})


def parallel_of(layer: str, kind: type, options: Mapping[str, Any]) -> TensorParallel:
    """The tensor-parallel setting of a layer, after a check of the names of its options.

    Args:
        layer: name of the layer, for errors.
        kind: the class that declares its options.
        options: the options.

    Raises:
        TypeError: if `kind` does not declare one of them.
        ValueError: if the group does not have `tp_size` ranks, or an option needs a group.
    """
    for name in options:
        # `only` would drop it without a word.
        if name not in kind.__annotations__:
            raise TypeError(f"{layer}() got an unexpected keyword argument {name!r}")
    return TensorParallel.of(
        layer,
        options.get("tp_group"),
        options.get("tp_size", 1),
        options.get("sequence_parallel", False),
        options.get("tp_overlap", False),
    )
