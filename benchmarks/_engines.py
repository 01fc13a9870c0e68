"""The engines that `step.py` measures, and how each one shards a model and marks a microbatch."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from _llama import Layer, Llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class


class Engine(str, Enum):
    flat_off = "flat-off"
    flat_on = "flat-on"
    fsdp2 = "fsdp2"
    fairscale = "fairscale"


LABELS = {
    Engine.flat_off: "FlatFSDP, flag off",
    Engine.flat_on: "FlatFSDP, flag on",
    Engine.fsdp2: "FSDP2",
    Engine.fairscale: "fairscale 0.4.13 (bf16 sums)",
}


@dataclass(frozen=True)
class Variant:
    """An engine, with its layers eager or each one compiled."""

    engine: Engine
    compiled: bool = False

    @property
    def name(self) -> str:
        return self.engine.value + ("-compile" if self.compiled else "")

    @property
    def label(self) -> str:
        return LABELS[self.engine] + (", compile" if self.compiled else "")

    def unavailable(self, device: torch.device) -> str:
        """Why it cannot run here; empty if it can."""
        if self.engine is Engine.fairscale and importlib.util.find_spec("fairscale") is None:
            return "fairscale is not installed"
        if self.engine is Engine.fairscale and device.type != "cuda":
            return "fairscale needs CUDA"
        return ""


def shard(model: Llama, variant: Variant, reshard: bool, device: torch.device) -> nn.Module:
    """The model, on `device` in FP32, in the hands of an engine; one unit a layer and one for the rest."""
    if variant.compiled:
        for layer in model.layers:
            # The forward and not the module: an engine's hooks run around it, uncompiled.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    if variant.engine is Engine.fsdp2:
        return _fsdp2(model, reshard, device)
    if variant.engine is Engine.fairscale:
        return _fairscale(model, reshard)
    return auto_wrap(
        model,
        by_class(Layer),
        device=device,
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=reshard,
        optimize_backward_concat=variant.engine is Engine.flat_on,
    )


def _fsdp2(model: Llama, reshard: bool, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    # None: the root's own parameters stay from its forward to its backward, as with the other engines.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=None if reshard else False)
    return model


def _fairscale(model: Llama, reshard: bool) -> nn.Module:
    fsdp = importlib.import_module("fairscale.nn.data_parallel").FullyShardedDataParallel
    options = {
        "reshard_after_forward": reshard,
        "mixed_precision": True,
        "compute_dtype": torch.bfloat16,
        "buffer_dtype": torch.float32,
        "fp32_reduce_scatter": True,
    }
    for index, layer in enumerate(model.layers):
        model.layers[index] = fsdp(layer, **options)
    return fsdp(model, **options)


def position(model: nn.Module, is_last: bool, reshard: bool) -> AbstractContextManager[None]:
    """Tells engines other than FlatFSDP whether the microbatch inside is the last one of its step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        # Without this FSDP2 gathers anew in every microbatch even when it keeps parameters after forward.
        model.set_reshard_after_backward(is_last or reshard)
    elif not isinstance(model, FlatFSDP) and not is_last:
        return model.no_sync()  # type: ignore[operator]
    return nullcontext()
