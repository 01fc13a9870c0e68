"""Which options of Accelerator, and of `shard`, `FlatAccelerator` refuses.

In:   keyword arguments, and what `accelerate launch` has put into the environment.
Out:  what is asked for, with alternatives; `training_loops.require_possible` raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

_ENGINE = "FlatFSDP shards and reduces; leave the other engine out"
_COMPILE = "compile the layers, which are units, after prepare: layer.compile()"
_ENGINES = {
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": "",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Arguments of Accelerator for other engines, and the variables that `accelerate launch` sets for them."""
_PRECISIONS = {
    "fp16": "train in bf16, which needs no loss scaling",
    "fp8": "convert the layers before prepare (flatfsdp.layers.convert, or compat.transformers.fuse), and "
    "call the model inside flatfsdp.fp8.autocast",
}


def unsupported(
    options: Mapping[str, Any], shard_options: Mapping[str, Any]
) -> Iterator[tuple[str, object, str]]:
    """Options that FlatAccelerator does not support: the name, whether it is set, and an alternative."""
    for name, variable in _ENGINES.items():
        yield name, options.get(name) is not None, _ENGINE
        yield variable, os.environ.get(variable, "false").lower() == "true", _ENGINE
    dynamo = _value(options.get("dynamo_backend") or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no"))
    yield f"dynamo_backend={dynamo!r}", dynamo != "no", _COMPILE
    yield "dynamo_plugin", options.get("dynamo_plugin") is not None, _COMPILE
    precision = _value(options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    yield f"mixed_precision={precision!r}", precision in _PRECISIONS, _PRECISIONS.get(precision, "")
    for handler in options.get("kwargs_handlers") or ():
        hook = _value(getattr(handler, "comm_hook", "no"))
        yield f"the comm_hook {hook}", hook != "no", "say how gradients travel: Precision(reduce=...)"
    instead = "Accelerate divides losses, and deals out data, for an average over ranks; see FlatTrainer"
    yield "shard_options['lanes']", shard_options.get("lanes") is not None, instead
    ours = "Accelerate says which device this rank has and which ranks there are; dp_shard= groups them"
    for name in ("device", "mesh", "tp_group"):
        yield f"shard_options[{name!r}]", shard_options.get(name) is not None, ours


def _value(given: Any) -> str:
    """The lower-case name of one of Accelerate's enumerations, or of a string."""
    return str(getattr(given, "value", given)).lower()
