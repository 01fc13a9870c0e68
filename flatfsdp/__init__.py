"""FlatFSDP: an FSDP-integrated flat-parameter engine."""

from flatfsdp.flat_params_wrapper import FlattenParamsWrapper
from flatfsdp.fsdp import FlatFSDP
from flatfsdp.grouping import param_groups
from flatfsdp.layout import Align, FlatLayout, ParamSlot, ParamSpec
from flatfsdp.microbatch import microbatches
from flatfsdp.policy import Precision, Prefetch
from flatfsdp.wrap import auto_wrap, by_class, by_size

__all__ = [
    "Align",
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
]
