"""The engines of `hf.py`: how users of each one train a `LlamaForCausalLM`.

Every engine keeps FP32 masters, computes in bf16 or FP8 and reduces gradients in FP32.  Each layer is a unit,
and the rest, embedding and head, is one; the head computes in bf16.  All but Liger Kernel and FlatFSDP's
`fuse` use transformers' own loss.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import flatfsdp
import flatfsdp.optim
from flatfsdp import Precision, by_class
from flatfsdp.comm.launch import Rank
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, autocast
from flatfsdp.layers import convert
from lib.hf_models import MODELING, build, layer_class
from lib.llama import LlamaConfig
from lib.measuring import LEARNING_RATE, SEED, Batch, Started

LONGEST_HEAD = 4096
"""Longest sequence whose fused head computes all logits at once; for others, in chunks of this size."""


class Engine(str, Enum):
    """The measured engines."""

    fsdp2 = "fsdp2"
    fsdp2_float8 = "fsdp2-float8"
    liger = "liger"
    liger_float8 = "liger-float8"
    flat = "flat"
    flat_converted = "flat-converted"
    flat_converted_stored = "flat-converted-stored"
    flat_fused = "flat-fused"
    flat_fused_fp8 = "flat-fused-fp8"
    flat_fused_replay = "flat-fused-replay"
    flat_fused_fp8_replay = "flat-fused-fp8-replay"


LABELS = {
    Engine.fsdp2: "FSDP2",
    Engine.fsdp2_float8: "FSDP2, torchao float8",
    Engine.liger: "FSDP2, Liger",
    Engine.liger_float8: "FSDP2, torchao float8, Liger",
    Engine.flat: "FlatFSDP",
    Engine.flat_converted: "FlatFSDP, converted to FP8",
    Engine.flat_converted_stored: "FlatFSDP, converted, FP8 weights",
    Engine.flat_fused: "FlatFSDP, fused",
    Engine.flat_fused_fp8: "FlatFSDP, fused, FP8",
    Engine.flat_fused_replay: "FlatFSDP, fused, replayed",
    Engine.flat_fused_fp8_replay: "FlatFSDP, fused, FP8, replayed",
}

WITH_LIGER = (Engine.liger, Engine.liger_float8)
WITH_TORCHAO = (Engine.fsdp2_float8, Engine.liger_float8)
REPLAYED = (Engine.flat_fused_replay, Engine.flat_fused_fp8_replay)
FUSED_FP8 = (Engine.flat_fused_fp8, Engine.flat_fused_fp8_replay)
FUSED = (Engine.flat_fused, Engine.flat_fused_replay, *FUSED_FP8)
CONVERTED = (Engine.flat_converted, Engine.flat_converted_stored)
OF_FLATFSDP = (Engine.flat, *CONVERTED, *FUSED)

NEEDED: dict[Engine, tuple[str, ...]] = {
    Engine.fsdp2_float8: ("torchao",),
    Engine.liger: ("liger_kernel",),
    Engine.liger_float8: ("torchao", "liger_kernel"),
    **dict.fromkeys(FUSED, ("flatfsdp.compat.transformers",)),
}
"""Optional modules that engines need."""


@dataclass(frozen=True)
class Variant:
    """An engine, with its layers eager or each one compiled."""

    engine: Engine
    compiled: bool = False

    @classmethod
    def all_of(cls, engine: Engine) -> list[Variant]:
        """The variants of an engine.

        torchao's casts are many small operators, so it needs the compiler; layers that FlatFSDP has fused
        leave it nothing to do.
        """
        if engine in WITH_TORCHAO:
            return [cls(engine, compiled=True)]
        return [cls(engine)] if engine in FUSED else [cls(engine), cls(engine, compiled=True)]

    @property
    def name(self) -> str:
        """The name in files and on the command line."""
        return self.engine.value + ("-compile" if self.compiled else "")

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return LABELS[self.engine] + (", compile" if self.compiled else "")

    def unavailable(self, device: torch.device) -> str:
        """The reason why it cannot run here; empty if it can."""
        missing = [name for name in NEEDED.get(self.engine, ()) if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} is not installed"
        if self.engine in WITH_LIGER and device.type != "cuda":
            return "Liger's kernels need CUDA"
        return ""


@dataclass(frozen=True)
class TrainedHFLlama:
    """The workload of `hf.py`."""

    config: LlamaConfig

    def batches(self, rank: Rank, count: int) -> list[Batch]:
        """Tokens, int64 [1, seq]: the model itself shifts them to get its labels."""
        generator = torch.Generator(rank.device).manual_seed(SEED + 1 + rank.index)
        shape = (1, self.config.seq)
        return [
            (torch.randint(self.config.vocab, shape, generator=generator, device=rank.device),)
            for _ in range(count)
        ]

    @contextmanager
    def start(self, variant: Variant, reshard: bool, device: torch.device) -> Iterator[Started]:
        """Builds the model, shards it, and makes its optimizer."""
        with _patches_of(variant):
            # On the device where it will be sharded: a host may not have room for an FP32 copy per rank.
            with device:
                model = build(self.config)
            model = shard(model, variant, reshard, device)
            region = _region_of(variant.engine)

            def loss(batch: Batch) -> Tensor:
                with region():
                    return model(input_ids=batch[0], labels=batch[0]).loss

            yield Started(model, adamw(model, variant.engine), loss, variant.engine in REPLAYED)


@contextmanager
def _patches_of(variant: Variant) -> Iterator[None]:
    """Context that restores transformers' module, which Liger changes besides the model."""
    if variant.engine not in WITH_LIGER:
        yield
        return
    names = vars(importlib.import_module(MODELING))
    before = dict(names)
    try:
        yield
    finally:
        names.clear()
        names.update(before)


def _region_of(engine: Engine) -> Any:
    """A function that returns the context around each forward."""
    if engine not in (*CONVERTED, *FUSED_FP8):
        return nullcontext
    # Each rank scales its own activations, as torchao does; the weights' scales are equal on all ranks.
    recipe = DelayedScaling(amax_history_len=16, reduce_amax=False)

    def region() -> AbstractContextManager[None]:
        return autocast(recipe=recipe)

    return region


def shard(model: Any, variant: Variant, reshard: bool, device: torch.device) -> Any:
    """Moves the model to `device` in FP32, and hands it to an engine."""
    engine = variant.engine
    if engine in WITH_LIGER:
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    if engine in WITH_TORCHAO:
        _use_float8(model.model.layers, device)
    if engine in CONVERTED:
        # The layers that torchao converts, too.
        convert(model.model.layers, filter=lambda linear, name: True, fuse_wgrad_accumulation=True)
    if engine in FUSED:
        _fuse(model, fp8=engine in FUSED_FP8)
    if variant.compiled:
        for layer in model.model.layers:
            # The forward and not the module: an engine's hooks run around it, uncompiled.
            layer.forward = torch.compile(layer.forward, dynamic=False)
    if engine in OF_FLATFSDP:
        return _flat(model, engine, reshard, device)
    return _fsdp2(model, reshard, device)


def _use_float8(layers: nn.Module, device: torch.device) -> None:
    """Converts to torchao's linear maps, with one scale per tensor and FP8 all-gather."""
    float8 = importlib.import_module("torchao.float8")
    # A CPU multiplies in FP32 after rounding to FP8.
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    float8.convert_to_float8_training(layers, config=config)


def _fuse(model: Any, fp8: bool) -> None:
    chunk = LONGEST_HEAD if model.config.max_position_embeddings > LONGEST_HEAD else None
    importlib.import_module("flatfsdp.compat.transformers").fuse(model, fp8=fp8, head_chunk_tokens=chunk)


def _flat(model: Any, engine: Engine, reshard: bool, device: torch.device) -> Any:
    stored = engine in (Engine.flat_converted_stored, *FUSED_FP8)
    return flatfsdp.shard(
        model,
        by_class(layer_class()),
        device=device,
        precision=Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling() if stored else None),
        reshard_after_forward=reshard,
        optimize_backward_concat=True,
    )


def _fsdp2(model: Any, reshard: bool, device: torch.device) -> Any:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    # None: the root's own parameters stay from its forward to its backward, as with FlatFSDP.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=None if reshard else False)
    return model


def adamw(model: nn.Module, engine: Engine) -> torch.optim.Optimizer:
    """Makes an AdamW in one kernel, as each engine's users have it; FlatFSDP's also casts the weights."""
    if engine in OF_FLATFSDP:
        return flatfsdp.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if engine in WITH_TORCHAO:
        float8 = importlib.import_module("torchao.float8")
        # One all-reduce for the scales of all weights, instead of one per weight.
        optimizer.register_step_post_hook(lambda *_: float8.precompute_float8_dynamic_scale_for_fsdp(model))
    return optimizer
