"""`grad_sync="auto"`: whether a model's gradients are reduced in the last microbatch only, or in every one.

In:   the units of one model, before they are first used, and the memory of the device.
Out:  "last" or "every", the same on all ranks.

"last" sends gradients once a step, and "every" M times for M microbatches, but with "last" every rank holds
the whole gradient in FP32 between microbatches, on any number of ranks.  Nothing is measured: a choice that
depended on a run would change the bits of the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.whole.memory import GIB, Size, report_of
from flatfsdp.options import GradSync

logger = logging.getLogger(__name__)

ON_ONE_HOST, ACROSS_HOSTS = 0.6, 0.75
"""Largest share of a GPU's memory that parameters, gradients and optimizer may take with "last": the rest is
for activations.  Within a host sending costs little, so that memory is worth more."""


def chosen_grad_sync(units: Sequence[Unit]) -> GradSync:
    """What the model's `grad_sync` stands for: itself, or for "auto" what fits.

    Counted are the engine's buffers and two numbers a trained parameter of the optimizer's, as of Adam.
    """
    wanted = units[0].policy.grad_sync
    if wanted != "auto":
        return wanted
    memory = memory_of(units[0].shared.device)
    if memory is None:
        return "last"
    groups = [group for unit in units for group in unit.groups]
    trained = [group.master.flat for group in groups if group.trains and not group.master.is_offloaded]
    moments = [Size(2 * flat.numel(), flat.dtype) for flat in trained]
    report = report_of(units, moments, reduces_every=False)
    spread = any(group.grid.shard.span_hosts for group in groups)
    limit = (ACROSS_HOSTS if spread else ON_ONE_HOST) * memory
    chosen: GradSync = "every" if report.peak > limit else "last"
    logger.warning(
        'grad_sync="auto" has chosen %r: parameters, gradients and optimizer would take up to %.1f GiB with '
        '"last", and a GPU has %.1f for them',
        chosen,
        report.peak / GIB,
        limit / GIB,
    )
    return chosen


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for other devices, whose memory is not only ours."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
