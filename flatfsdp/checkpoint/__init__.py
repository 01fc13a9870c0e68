"""Saving and loading sharded models, under the names they had before wrapping.

full        one ordinary dict with whole tensors; any world size, any engine can read it
sharded     for torch.distributed.checkpoint: every rank writes its part; any world size can read it
local       this rank's flat shards as they are, for the same world size, or for `consolidate` offline

Tensor parallelism shows in local ones only: parts are joined, or written at their places in the whole tensor.
Stages of a pipeline are saved together in a sharded one.  FP8 scales are those of the first tensor-parallel
rank; an amax_reduction_group with all of them, such as the default, keeps them equal.
"""

from flatfsdp.checkpoint.full import full_state_dict, load_full_state_dict
from flatfsdp.checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from flatfsdp.checkpoint.local import consolidate, load_local_state_dict, local_metadata, local_state_dict
from flatfsdp.checkpoint.sharded import load, save, sharded_optimizer_state_dict, sharded_state_dict

__all__ = [
    "consolidate",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_local_state_dict",
    "local_metadata",
    "local_state_dict",
    "save",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
]
