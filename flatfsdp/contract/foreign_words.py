"""Words of other engines, answered with ours.

In:   a keyword argument, or a method, of FSDP1, FSDP2, DDP, DeepSpeed or Transformer Engine.
Out:  TypeError with the word that it has here.  A word that is in no table gets Python's own error.

The pages docs/from_fsdp1.md, from_fsdp2.md and from_ddp.md say the same; a test compares them with the
tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_PREFETCH = "prefetch=Prefetch(forward=1, backward=1)"
_PRECISION = "precision=Precision(compute=..., reduce=..., buffer=...)"
_CASTS = "it is cast_inputs= of shard"
_WHOLE_MODULES = "a unit takes all parameters of a module that no unit inside has: freeze those, if need be"
_NO_REDUCER = "leave it out: gradients land in the buffer that is reduced, and what no rank uses has none"

_ROUNDING = "it is power_of_two_scales= and, for current scaling, amax_epsilon="

OPTIONS: Mapping[str, str] = {
    # FSDP1
    "auto_wrap_policy": "it is policy=, the second argument of shard: by_class(...) or by_size(...)",
    "sharding_strategy": "FULL_SHARD is the default, SHARD_GRAD_OP reshard_after_forward=False, HYBRID_SHARD "
    "dp_shard=, the ranks of a host, and NO_SHARD a mesh= of (N, 1)",
    "process_group": 'it is mesh=DeviceMesh.from_group(process_group, "cuda")',
    "device_mesh": "it is mesh=",
    "mixed_precision": f"it is {_PRECISION}",
    "backward_prefetch": f"it is {_PREFETCH}",
    "forward_prefetch": f"it is {_PREFETCH}",
    "limit_all_gathers": f"gathers ahead are limited by {_PREFETCH}",
    "device_id": "it is device=",
    "use_orig_params": "leave it out: shard lists parameters under their own names",
    "ignored_modules": _WHOLE_MODULES,
    "ignored_states": _WHOLE_MODULES,
    "cast_forward_inputs": _CASTS,
    "cast_root_forward_inputs": _CASTS,
    # FSDP2
    "mp_policy": f"it is {_PRECISION}",
    "offload_policy": "CPUOffloadPolicy() is cpu_offload=True",
    "ignored_params": _WHOLE_MODULES,
    "shard_placement_fn": "leave it out: parameters are put into flat buffers, of which each rank has a part",
    # DDP
    "device_ids": "it is device=",
    "find_unused_parameters": _NO_REDUCER,
    "static_graph": _NO_REDUCER,
    "gradient_as_bucket_view": _NO_REDUCER,
    "bucket_cap_mb": _NO_REDUCER,
    # DeepSpeed, and papers
    "zero": "ZeRO-3 is the default, ZeRO-2 reshard_after_forward=False, and plain data parallel "
    "a mesh= of (N, 1)",
}
"""Options of an engine: word -> what `shard`, `auto_wrap` and `FlatFSDP` have for it."""

DTYPES: Mapping[str, str] = {
    "param_dtype": "it is compute=; param= is the dtype that the optimizer updates, FP32 by default",
    "reduce_dtype": "it is reduce=; accumulate= is the dtype in which microbatches are added up",
    "buffer_dtype": "it is buffer=",
    "cast_forward_inputs": _CASTS,
    "cast_root_forward_inputs": _CASTS,
    "output_dtype": "cast the output where it is used",
    "keep_low_precision_grads": "it is grad=, the dtype of reduced gradients",
}
"""Options of a mixed precision: word -> what `Precision` has for it."""

METHODS: Mapping[str, str] = {
    "set_gradient_divide_factor": "set_gradient_divide_factors(1.0, factor) divides after the sum over ranks",
    "set_reshard_after_forward": "it is reshard_after_forward= of shard",
    "set_reshard_after_backward": "reshard_after_forward=False of shard keeps parameters for a step",
    "set_requires_all_reduce": 'grad_sync="every" of shard reduce-scatters in each backward and all-reduces '
    "replicas in the last one",
    "set_modules_to_forward_prefetch": "prefetch=Prefetch(forward=2) of shard gathers that many units ahead",
    "set_modules_to_backward_prefetch": "prefetch=Prefetch(backward=2) of shard does so in the backward",
}
"""Methods of a sharded module: FSDP2's name -> what it has instead."""


_SPLITS = "it is split_accumulator=SplitAccumulator(fprop=..., dgrad=..., wgrad=...)"

RECIPES: Mapping[str, str] = {
    **dict.fromkeys(("fp8_dpa", "fp8_mha"), "leave it out: attention is computed in the dtype of its inputs"),
    **dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), _SPLITS),
    **dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), _ROUNDING),
    "override_linear_precision": "leave it out: all three GEMMs of a layer are in FP8",
    "scaling_factor_compute_algo": "leave it out: a scale is fp8_max / amax / 2^margin",
}
"""Options of Transformer Engine's recipes: word -> what ours have for it."""


def answering(words: Mapping[str, str]) -> Callable[[T], T]:
    """Decorates a function, or a class, to answer keyword arguments that it does not have.

    Args:
        words: word -> the advice that follows it in the TypeError; one of the tables above.
    """

    def decorate(target: T) -> T:
        if isinstance(target, type):
            init = target.__init__  # type: ignore[misc]
            target.__init__ = _answering(init, words, target.__name__)  # type: ignore[misc]
            return target
        name = target.__qualname__.removesuffix(".__init__")
        return _answering(target, words, name)  # type: ignore[return-value]

    return decorate


def _answering(function: Callable[..., Any], words: Mapping[str, str], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for word in kwargs:
            if word in words:
                raise TypeError(f"{name} has no {word}=: {words[word]}")
        return function(*args, **kwargs)

    return call


def answer_methods(cls: type, words: Mapping[str, str]) -> None:
    """Gives a class methods of these names, which raise TypeError with the advice."""
    for name, advice in words.items():
        setattr(cls, name, _refusing(name, advice))


def _refusing(name: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a sharded module has no {name}: {advice}")

    return refuse
