"""`auto_wrap_bn`: BatchNorm layers as units of their own, in FP32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatfsdp.compat.fairscale.fsdp import FullyShardedDataParallel
from flatfsdp.compat.fairscale.wrapping import auto_wrap, config_auto_wrap_policy, enable_wrap


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: dist.ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wraps every BatchNorm (synchronised ones, too) in its own unit; call it before wrapping the rest.

    Args:
        module: the module to search.
        single_rank_pg: keep their few parameters whole on every rank of process_group and average gradients,
            rather than shard them.
        process_group: rank group of the units; default: all ranks.
        fsdp_config: arguments of the units instead of the default (FP32, kept after forward); its
            flatten_parameters is ignored.
        wrap_it: False only tags the layers with `wrapper_config`, for `auto_wrap` with
            `config_auto_wrap_policy`.
        assert_on_collision: fail if a layer is already tagged.

    Returns:
        `module`, changed in place, or the unit around it if it is a BatchNorm itself.
    """
    if fsdp_config is None:
        fsdp_config = {"process_group": process_group, "reshard_after_forward": False}
    config = {**fsdp_config, "flatten_parameters": True, "shard": not single_rank_pg}
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            assert not (assert_on_collision and hasattr(layer, "wrapper_config")), (
                f"{name or 'the module'} has a wrapper_config already; was it tagged by another policy?"
            )
            layer.wrapper_config = config  # type: ignore[assignment]
    wrapping = enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel)
    with wrapping if wrap_it else nullcontext():
        return auto_wrap(module)
