"""Clips gradients by the norm of a whole model, whose stages are on this and other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from flatfsdp.engine.api.methods import gradients_of
from flatfsdp.engine.whole.units import named_groups, units_in
from flatfsdp.optim.clip import clip_grad_norm, pipeline_of

ModelOrStage = nn.Module | PipelineStage


def clip_grad_norm_(
    parts: ModelOrStage | Sequence[ModelOrStage],
    max_norm: float,
    pp_group: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the reduced gradients of a whole model so that their norm is at most `max_norm`.  Collective.

        schedule.step(tokens)
        norm = clip_grad_norm_(stages, 1.0)
        optimizer.step()

    Args:
        parts: all stages of this rank, or the FlatFSDP modules in them, each once.
        max_norm: largest norm afterwards, not negative.
        pp_group: ranks of the pipeline, which have the other stages; default: the group of the `FlatStage`s.
        norm_type: order of the norm, positive; `math.inf` for the largest magnitude.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm of the whole model before scaling, 0-dim, with the same bits on all ranks.

    Raises:
        RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        ValueError: if there is no part, or no FlatFSDP in one; if max_norm is negative or norm_type not
            positive; if some units are spread over fewer ranks than others.
    """
    of_rank = [parts] if isinstance(parts, (nn.Module, PipelineStage)) else list(parts)
    if not of_rank:
        raise ValueError("clip_grad_norm_ got no stages; pass all those that this rank has")
    modules = [part.submod if isinstance(part, PipelineStage) else part for part in of_rank]
    groups = [group for _, group in named_groups(modules)]
    return clip_grad_norm(
        gradients_of(modules),
        next(wrapped for module in modules for _, wrapped in units_in(module)).fsdp_state.shared.device,
        max_norm,
        norm_type,
        stages=pipeline_of(pp_group, (group.master.stages for group in groups)),
        error_if_nonfinite=error_if_nonfinite,
    )
