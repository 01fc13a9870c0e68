"""What a test of PyTorch's FSDP2 gets instead of `torch.distributed.fsdp`, by name.

What has no counterpart is handed to `shard` all the same, which says so.  Two things are translated that
change where parameters rest and no number: a number for `reshard_after_forward` frees them as True does, and
methods that choose when to gather and free have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import TestCase
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import flatfsdp
from flatfsdp import Precision
from flatfsdp.contract.whole_shape import whole_shape
from flatfsdp.engine.api.classes import FlatFSDPModule

WITHOUT_EFFECT = (
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
)


def fully_shard(
    module: Any,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - frozen
    **others: Any,
) -> Any:
    """Shards a module with everything in it that is not sharded yet, from the bottom up, as FSDP2 does.

    Args:
        others: further arguments of FSDP2, handed on unless they are None, its default.
    """
    options = {name: value for name, value in others.items() if value is not None}
    if mp_policy.output_dtype is not None:
        options["output_dtype"] = mp_policy.output_dtype
    precision = precision_of(module, mp_policy.param_dtype, mp_policy.reduce_dtype)
    sharded = flatfsdp.shard(
        module,
        precision=precision,
        cast_inputs=mp_policy.cast_forward_inputs,
        cpu_offload=isinstance(offload_policy, CPUOffloadPolicy),
        reshard_after_forward=reshard_after_forward is not False,
        **options,
    )
    if precision.reduce == torch.float16:
        # FSDP2 divides a part before the sum, which otherwise might overflow.
        ranks = dist.get_world_size()
        before = 2.0 ** math.ceil(math.log2(ranks) / 2)
        sharded.set_gradient_divide_factors(before, ranks / before, recurse=False)
    return sharded


def precision_of(module: Any, compute: torch.dtype | None, reduce: torch.dtype | None) -> Precision:
    """FSDP2 keeps a parameter in its own dtype, computes in it, and reduces in the dtype that computes."""
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    own = torch.float32 if first is None else first.dtype
    return Precision(
        param=own,
        compute=compute or own,
        accumulate=torch.promote_types(own, torch.float32),
        reduce=reduce or compute or own,
    )


def check_sharded_parity(
    _: TestCase, replicated: nn.Module, sharded: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Compares names, values and gradients with those of a model that each rank has as a whole.

    FSDP2's function of this name does so for this rank's part of a DTensor.
    """
    named = list(sharded.named_parameters())
    for (name, reference), (own_name, parameter) in zip(replicated.named_parameters(), named, strict=True):
        for prefix in prefixes_to_ignore:
            own_name = own_name.replace(prefix, "")
        assert name == own_name
        _compare(reference, parameter, whole_shape(parameter))
        _compare(reference.grad, parameter.grad, whole_shape(parameter))


def _compare(reference: Tensor | None, part: Tensor | None, shape: torch.Size) -> None:
    """Ranks in order have one whole after the other: several, if replicas are sharded."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, None if part is None else part.detach())
    there = [each for each in parts if each is not None]
    if reference is None:
        assert there == []
    else:
        wholes = torch.cat(there).reshape(-1, *shape)
        assert len(wholes) > 0
        torch.testing.assert_close(wholes, reference.detach().expand_as(wholes))


def patch_reduce_scatter(new: Any) -> AbstractContextManager[Any]:
    """Shows our reduce-scatters to a test that asserts what they are given."""
    return patch("flatfsdp.comm.collectives._reduce_scatter", new)


def patch_all_gather(new: Any) -> AbstractContextManager[Any]:
    """Shows our all-gathers to a test."""
    return patch("flatfsdp.comm.collectives._all_gather", new)


def patch_register_post_backward_hook_backward(_: Any) -> AbstractContextManager[Any]:
    """Without effect, as our engine has no such function; assertions that count its calls are left out."""
    return nullcontext()


NAMES: dict[str, Any] = {
    "fully_shard": fully_shard,
    "FSDPModule": FlatFSDPModule,
    "FSDP": FlatFSDPModule,
    "register_fsdp_forward_method": flatfsdp.register_forward_method,
    "check_sharded_parity": check_sharded_parity,
    "patch_all_gather": patch_all_gather,
    "patch_reduce_scatter": patch_reduce_scatter,
    "patch_register_post_backward_hook_backward": patch_register_post_backward_hook_backward,
}


@contextmanager
def instead() -> Iterator[None]:
    """Context in which also those who look for FSDP2 elsewhere find `shard`, as PyTorch's test models do."""
    methods = {name: lambda *_, **__: None for name in WITHOUT_EFFECT}
    with (
        patch("torch.testing._internal.common_fsdp.fully_shard", fully_shard),
        patch("torch.distributed.fsdp.fully_shard", fully_shard),
        patch("torch.distributed._composable.fsdp.fully_shard", fully_shard),
        patch.multiple(FlatFSDPModule, create=True, **methods),
    ):
        yield
