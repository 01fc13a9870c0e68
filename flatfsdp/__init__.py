"""FlatFSDP: an FSDP-integrated flat-parameter engine."""

from flatfsdp.comm.lanes import Lanes
from flatfsdp.engine.api.param_groups import param_groups
from flatfsdp.engine.api.shard import register_forward_method, shard
from flatfsdp.engine.api.wrap import by_class, by_size
from flatfsdp.engine.api.wrapper import FlatFSDP, auto_wrap
from flatfsdp.engine.replay.eager_or_replayed import replayed
from flatfsdp.flat.flatten_params import FlattenParamsWrapper
from flatfsdp.microbatch import microbatches
from flatfsdp.options import Debug, Options, Precision, Prefetch

__version__ = "0.1.0"

__all__ = [
    "Debug",
    "FlatFSDP",
    "FlattenParamsWrapper",
    "Lanes",
    "Options",
    "Precision",
    "Prefetch",
    "auto_wrap",
    "by_class",
    "by_size",
    "microbatches",
    "param_groups",
    "register_forward_method",
    "replayed",
    "shard",
]
