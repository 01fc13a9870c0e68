"""Options of `FlatAccelerator`: which features of Accelerator it refuses, and how it shards.

In:   keyword arguments, and what `accelerate launch` has put into the environment.
Out:  ValueError naming the alternative, before an Accelerator exists and keeps its global state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flatfsdp.options import Options, Precision, require_known

_ENGINE = "FlatFSDP shards and reduces; leave the other engine out"
_COMPILE = "compile the layers, which are units, after prepare: layer.compile()"
_ENGINES = {
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": None,
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Arguments of Accelerator for other engines, and the variables that `accelerate launch` sets for them."""
_PRECISIONS = {
    "fp16": "train in bf16, which needs no loss scaling",
    "fp8": "convert the layers before prepare (flatfsdp.layers.convert, or compat.transformers.fuse), and "
    "call the model inside flatfsdp.fp8.autocast",
}
_RANKS = "Accelerate says which device this rank has and which ranks there are"


def require_possible(options: Mapping[str, Any]) -> None:
    """Checks that FlatAccelerator supports these options of Accelerator.

    Raises:
        ValueError: if not; the message names the option and an alternative.
    """
    for what, instead in _asked(options):
        raise ValueError(f"FlatAccelerator cannot do {what}: {instead}")


def _asked(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Unsupported options, each with an alternative."""
    for name, variable in _ENGINES.items():
        if options.get(name) is not None:
            yield name, _ENGINE
        if variable is not None and os.environ.get(variable, "false").lower() == "true":
            yield variable, _ENGINE
    dynamo = options.get("dynamo_backend") or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if str(getattr(dynamo, "value", dynamo)).lower() != "no":
        yield f"dynamo_backend={dynamo!r}", _COMPILE
    if options.get("dynamo_plugin") is not None:
        yield "dynamo_plugin", _COMPILE
    precision = options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    name = str(getattr(precision, "value", precision)).lower()
    if name in _PRECISIONS:
        yield f"mixed_precision={name!r}", _PRECISIONS[name]
    for handler in options.get("kwargs_handlers") or ():
        hook = getattr(handler, "comm_hook", "no")
        if str(getattr(hook, "value", hook)).lower() != "no":
            yield f"the comm_hook {hook}", "say in which dtype gradients travel: Precision(reduce=...)"


def require_shardable(shard_options: Options) -> None:
    """Checks options of `shard` that apply to every model.

    Raises:
        TypeError: for an unknown option.
        ValueError: for one that Accelerate determines.
    """
    require_known("shard", shard_options)
    for name in ("device", "mesh", "tp_group"):
        if shard_options.get(name) is not None:
            raise ValueError(f"FlatAccelerator cannot do shard_options[{name!r}]: {_RANKS}")


def precision_of(mixed_precision: str) -> Precision | None:
    """Translates Accelerate's name of a precision; None is that of the model."""
    return Precision(compute=torch.bfloat16) if mixed_precision == "bf16" else None
