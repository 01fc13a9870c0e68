"""fairscale's interface: `from flatfsdp.compat.fairscale import FullyShardedDataParallel as FSDP, ...`.

What carries over unchanged and what differs: docs/fairscale.md.
"""

from flatfsdp.compat.fairscale.fairscale_options import ProcessGroupName
from flatfsdp.compat.fairscale.flatten import FlattenParamsWrapper
from flatfsdp.compat.fairscale.fsdp import (
    FullyShardedDataParallel,
    TrainingState,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from flatfsdp.compat.fairscale.grad_scaler import ShardedGradScaler
from flatfsdp.compat.fairscale.recompute import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from flatfsdp.compat.fairscale.wrapping import (
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "ProcessGroupName",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "disable_checkpointing",
    "enable_wrap",
    "get_fsdp_instances",
    "is_checkpointing",
    "is_recomputing",
    "no_pre_load_state_dict_hook",
    "wrap",
]
