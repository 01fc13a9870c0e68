"""What a test of Megatron-FSDP v2 gets instead of Megatron's `experimental` package, by name.

Its own engine runs on GPUs only, so there is nothing to compare with on a machine without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import SkipTest

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

import flatfsdp
from flatfsdp import Precision
from flatfsdp.engine.api.classes import FlatFSDPModule


@dataclass(frozen=True)
class Placements:
    """Megatron's: where parameters, gradients and optimizer state are, for each dimension of a mesh."""

    dp_axes: Sequence[int]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron's, as far as the tests use it."""

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


class NoCounterpart(Exception):  # noqa: N818 - a refusal, not an error of ours
    """Megatron has something that `shard` has no argument for."""


class Context:
    """The modules that are sharded together."""

    def __init__(self) -> None:
        self._modules: list[Any] = []


_CONTEXTS: list[Context] = []


@contextmanager
def fully_shard_context(**_: Any) -> Iterator[Context]:
    _CONTEXTS.append(Context())
    try:
        yield _CONTEXTS[-1]
    finally:
        _CONTEXTS.pop()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
) -> None:
    parameter, gradient, optimizer = placements.parameter, placements.gradient, placements.optimizer
    if isinstance(parameter[0], Replicate) and len(parameter) == 2 and isinstance(optimizer[0], Shard):
        raise NoCounterpart("an optimizer that is sharded over the replicas of hybrid sharding")
    own = next(module.parameters()).dtype if any(True for _ in module.parameters()) else torch.float32
    policy = mixed_precision_policy
    grad = policy.main_grads_dtype or own
    flatfsdp.shard(
        module,
        # With whole optimizer state every rank has everything: a mesh of (N, 1).
        mesh=mesh
        if isinstance(optimizer[-1], Shard)
        else DeviceMesh(mesh.device_type, mesh.mesh.view(-1, 1)),
        reshard_after_forward=isinstance(parameter[-1], Shard),
        grad_sync="every" if isinstance(gradient[-1], Shard) else "last",
        precision=Precision(
            param=policy.main_params_dtype or own, compute=own, reduce=policy.grad_comm_dtype or grad
        ),
    )
    _CONTEXTS[-1]._modules.append(module)


@contextmanager
def microbatch(context: Context, is_last: bool) -> Iterator[None]:
    for module in context._modules:
        module.set_is_last_backward(is_last)
    try:
        yield
    finally:
        for module in context._modules:
            module.set_is_last_backward(True)


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Our shards are what the optimizer updates; nothing has to be copied afterwards."""


def collect_linked_kernels(*_: Any) -> NoReturn:
    raise SkipTest("counts kernels of a GPU")


NAMES: dict[str, Any] = {
    "Placements": Placements,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "FsdpModule": FlatFSDPModule,
    "fully_shard_context": fully_shard_context,
    "fully_shard": fully_shard,
    "microbatch": microbatch,
    "fully_shard_optimizer": fully_shard_optimizer,
    "collect_linked_kernels": collect_linked_kernels,
}
