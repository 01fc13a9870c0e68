"""The plain model's gradients, and what a FlatFSDP model holds, in forms that can be compared.

With two ranks all FP32 comparisons are bit for bit: a sum of two has no order, a half is exact.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.engine.whole.units import units_in
from tests.support.models import data

UNITS = 4
"""Units of the model that `models.build()` makes: the root and three blocks."""

Grads = dict[str, Tensor]
"""Gradients of full shape by the parameter's name in the plain model; only those that are trained."""


def batches_of_all_ranks() -> list[list[Tensor]]:
    """The microbatches of one step, rank by rank."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return [next(data(rank, 1, 3)) for rank in range(world_size)]


def plain_grads(net: nn.Module, batches: Sequence[Sequence[Tensor]]) -> Grads:
    """Accumulated in FP32 over each rank's microbatches, then averaged over ranks.

    A net in another dtype computes each microbatch's gradient in that dtype.
    """
    mean: Grads = {}
    for microbatches in batches:
        total: Grads = {}
        for tokens in microbatches:
            net.zero_grad()
            net(tokens).backward()
            for name, parameter in trained(net):
                grad = parameter.grad.float()
                total[name] = total[name] + grad if name in total else grad
        for name, grad in total.items():
            mean[name] = mean[name] + grad if name in mean else grad
    net.zero_grad()
    return {name: grad / len(batches) for name, grad in mean.items()}


def trained(net: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in net.named_parameters() if p.requires_grad)


def assert_equal(ours: Grads, expected: Grads) -> None:
    """Checks that both have the same names and the same bits."""
    assert ours.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(ours[name], expected[name])]
    assert not different


def resident_bytes(model: Any) -> list[int]:
    """Memory of each unit's unsharded parameters, root first: bytes of the storages, not what flags say."""
    return [
        sum(g.buffer.tensor.untyped_storage().nbytes() for g in wrapped.fsdp_state.groups)
        for _, wrapped in units_in(model)
    ]


def fp32_tensors() -> list[Tensor]:
    """Every FP32 tensor in this process, as the garbage collector knows them."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]
    return [tensor for tensor in found if tensor.dtype == torch.float32]


def gradient_buffers(model: Any, others: list[Tensor]) -> int:
    """Storages that are as large as some unit's FP32 gradient.

    Asks the garbage collector, not the engine, so compute in bf16: an FP32 FlatBuffer is as large.

    Args:
        others: what was there before the model, and is not counted.
    """
    trained_groups = [
        group for _, wrapped in units_in(model) for group in wrapped.fsdp_state.groups if group.trains
    ]
    sizes = {4 * group.layout.padded_numel(group.grid.shard.size) for group in trained_groups}
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in fp32_tensors()}
    known = {t.untyped_storage()._cdata for t in others}
    return sum(s.nbytes() in sizes for address, s in storages.items() if address not in known)


def average(net: nn.Module) -> None:
    """Averages a plain model's gradients over ranks, as data parallelism does."""
    for parameter in net.parameters():
        if parameter.grad is not None and dist.get_world_size() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
