"""FlatFSDP: an FSDP-integrated flat-parameter engine."""

from flatfsdp.comm.timeout import set_timeout
from flatfsdp.compat.torch_state_dicts.connect import connect_state_dicts
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.ema import EMA
from flatfsdp.engine.fsdp import FlatFSDP
from flatfsdp.engine.in_place.shard import register_forward_method, shard
from flatfsdp.engine.param_groups import param_groups
from flatfsdp.engine.replay.replayed import replayed
from flatfsdp.engine.wrap import auto_wrap, by_class, by_size
from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from flatfsdp.flat.layout import FlatLayout, ParamSlot, ParamSpec
from flatfsdp.microbatch import microbatches
from flatfsdp.policy import Precision, Prefetch

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "FlatFSDP",
    "FlatLayout",
    "FlattenParamsWrapper",
    "ParamSlot",
    "ParamSpec",
    "Precision",
    "Prefetch",
    "auto_wrap",
    "by_class",
    "by_size",
    "microbatches",
    "param_groups",
    "register_forward_method",
    "replayed",
    "set_timeout",
    "shard",
    "whole_shape",
]

connect_state_dicts()
