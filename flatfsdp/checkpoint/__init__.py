"""Saving and loading sharded models, under the names they had before wrapping.

full        one ordinary dict with whole tensors; any world size, any engine can read it
sharded     for torch.distributed.checkpoint: every rank writes its part; any world size can read it
local       this rank's flat shards as they are, for the same world size and lanes, or for `consolidate`

Only local checkpoints show tensor parallelism: in the others parts are joined, or written at their places in
the whole tensor.  A sharded checkpoint has all stages of a pipeline.  FP8 scales are those of the first
tensor-parallel rank; an amax_reduction_group with all these ranks, such as the default, keeps them equal.

`save` and `load` use the sharded form: a save is complete or absent, and a load verifies every file and
executes nothing.  Modules, in the order of a save, then of a load:

    saving -> sharded -> writer -> digests, manifest
    loading -> opening -> reader, fit

manager     `CheckpointManager`: the checkpoints of a run; resumes from the newest one that is whole
owner       whose a run's folder is, of several runs: the one that began last
background  a thread that saves a copy of the state while training goes on
store       names in an object store, of a URL such as s3://bucket/run; media: what differs there from a disk
own_states  `of_each_rank`, `of_this_rank`: what each rank has of its own, such as the place in its data
"""

from flatfsdp.checkpoint.errors import CheckpointError, DamagedCheckpoint
from flatfsdp.checkpoint.full import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from flatfsdp.checkpoint.loading import load
from flatfsdp.checkpoint.local import consolidate, load_local_state_dict, local_metadata, local_state_dict
from flatfsdp.checkpoint.manager import CheckpointManager
from flatfsdp.checkpoint.own_states import of_each_rank, of_this_rank
from flatfsdp.checkpoint.reader import Reader
from flatfsdp.checkpoint.saving import save, sharded_training_state
from flatfsdp.checkpoint.sharded import sharded_optimizer_state_dict, sharded_state_dict
from flatfsdp.checkpoint.writer import Writer

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpoint",
    "Reader",
    "Writer",
    "consolidate",
    "full_optimizer_state_dict",
    "full_state_dict",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_local_state_dict",
    "local_metadata",
    "local_state_dict",
    "of_each_rank",
    "of_this_rank",
    "save",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "sharded_training_state",
]
