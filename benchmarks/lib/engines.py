"""The engines of `step.py`: how each one shards the plain Llama, and its optimizer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import flatfsdp
import flatfsdp.optim
from flatfsdp import Precision, by_class
from flatfsdp.comm.launch import Rank
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe
from flatfsdp.layers import Embedding, TransformerLayer
from lib.fp8_llama import FusedLlama
from lib.llama import SHAPES, Layer, Llama, LlamaConfig
from lib.measuring import LEARNING_RATE, SEED, Batch, Started
from lib.te_llama import EngineLlama, layer_class


class Engine(str, Enum):
    """The measured engines."""

    flat_off = "flat-off"
    flat_on = "flat-on"
    fsdp2 = "fsdp2"
    fairscale = "fairscale"
    flat_fp8_delayed = "flat-fp8-delayed"
    flat_fp8_current = "flat-fp8-current"
    flat_bf16_fused = "flat-bf16-fused"
    fsdp2_float8 = "fsdp2-float8"
    flat_te = "flat-te"
    fsdp2_te = "fsdp2-te"


LABELS = {
    Engine.flat_off: "FlatFSDP, flag off",
    Engine.flat_on: "FlatFSDP, flag on",
    Engine.fsdp2: "FSDP2",
    Engine.fairscale: "fairscale 0.4.13 (bf16 sums)",
    Engine.flat_fp8_delayed: "FlatFSDP, FP8 delayed scaling",
    Engine.flat_fp8_current: "FlatFSDP, FP8 current scaling",
    Engine.flat_bf16_fused: "FlatFSDP, bf16, fused gradients",
    Engine.fsdp2_float8: "FSDP2, torchao float8",
    Engine.flat_te: "FlatFSDP, Transformer Engine, fused gradients",
    Engine.fsdp2_te: "FSDP2, Transformer Engine",
}

OF_FLATFSDP = (Engine.flat_off, Engine.flat_on)
PLAIN = (*OF_FLATFSDP, Engine.fsdp2, Engine.fairscale)
"""Engines of the plain Llama in bf16."""

FP8 = (Engine.flat_fp8_delayed, Engine.flat_fp8_current, Engine.flat_bf16_fused, Engine.fsdp2_float8)
"""FP8 weights in the flat buffer under both recipes, the same layers in bf16, and the peer."""

TRANSFORMER_ENGINE = (Engine.flat_te, Engine.fsdp2_te)
"""Transformer Engine's layers; not in one run with torchao, beside which they do not import."""

RECIPES: dict[Engine, Recipe | None] = {
    # Each rank scales its own activations, as torchao does; the weights' scales are equal on all ranks.
    Engine.flat_fp8_delayed: DelayedScaling(amax_history_len=16, reduce_amax=False),
    Engine.flat_fp8_current: CurrentScaling(),
    Engine.flat_bf16_fused: None,
}
"""Recipes of engines with FlatFSDP's own layers."""


@dataclass(frozen=True)
class Variant:
    """An engine, with layers eager or each one compiled, and microbatches optionally as CUDA graphs."""

    engine: Engine
    compiled: bool = False
    replayed: bool = False

    @classmethod
    def first_of(cls, engine: Engine) -> Variant:
        """The eager variant, or for torchao the compiled one, as its casts are many small operators."""
        return cls(engine, compiled=engine is Engine.fsdp2_float8)

    @property
    def can_be_compiled(self) -> bool:
        """Whether there is a compiled variant besides the eager one."""
        return self.engine in (*OF_FLATFSDP, Engine.fsdp2)

    @property
    def can_be_replayed(self) -> bool:
        """Whether `flatfsdp.replayed` supports its model."""
        return self.engine in (Engine.flat_on, *RECIPES)

    @property
    def name(self) -> str:
        """The name in files and on the command line."""
        return f"{self.engine.value}{'-compile' if self.compiled else ''}{'-replay' if self.replayed else ''}"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        compiled, replayed = ", compile" if self.compiled else "", ", replayed" if self.replayed else ""
        return f"{LABELS[self.engine]}{compiled}{replayed}"

    def unavailable(self, device: torch.device) -> str:
        """The reason why it cannot run here; empty if it can."""
        needed = {Engine.fairscale: "fairscale", Engine.fsdp2_float8: "torchao"}.get(self.engine)
        if self.engine in TRANSFORMER_ENGINE:
            needed = "transformer_engine"
        if needed is not None and importlib.util.find_spec(needed) is None:
            return f"{needed} is not installed"
        if self.engine in (Engine.fairscale, *TRANSFORMER_ENGINE) and device.type != "cuda":
            return f"{needed} needs CUDA"
        return ""


@dataclass(frozen=True)
class TrainedLlama:
    """The workload of `step.py`.

    Attributes:
        shape: key of `SHAPES`.
        own_adamw: whether engines of FlatFSDP's own layers also use its own AdamW.
    """

    shape: str
    own_adamw: bool

    @property
    def config(self) -> LlamaConfig:
        """The sizes of the model."""
        return SHAPES[self.shape]

    def batches(self, rank: Rank, count: int) -> list[Batch]:
        """Random tokens and targets, or activations without a vocabulary."""
        config, device = self.config, rank.device
        generator = torch.Generator(device).manual_seed(SEED + 1 + rank.index)

        def batch() -> Batch:
            if not config.vocab:
                shape = (1, config.seq, config.hidden)
                return (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16),)
            tokens = torch.randint(config.vocab, (1, config.seq + 1), generator=generator, device=device)
            inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            return (inputs, targets) if config.loss == "cross-entropy" else (inputs,)

        return [batch() for _ in range(count)]

    @contextmanager
    def start(self, variant: Variant, reshard: bool, device: torch.device) -> Iterator[Started]:
        """Builds the model, shards it, and makes its optimizer."""
        # On the device where it will be sharded: a host may not have room for an FP32 copy per rank.
        with device:
            plain = Llama(self.config)
        model = shard(plain, variant, reshard, device)
        del plain
        optimizer = adamw(model, variant, LEARNING_RATE, own=self.own_adamw)
        yield Started(model, optimizer, lambda batch: model(*batch), variant.replayed)


def shard(model: Llama, variant: Variant, reshard: bool, device: torch.device) -> nn.Module:
    """Moves the model to `device` in FP32, and hands it to an engine.

    Each layer is a unit, the embedding is one, and so is the rest.
    """
    if variant.engine is Engine.fsdp2_float8:
        _use_float8(model, device)
    if variant.compiled:
        for layer in model.layers:
            # The forward and not the module: an engine's hooks run around it, uncompiled.
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    if variant.engine in (Engine.fsdp2, Engine.fsdp2_float8):
        return _fsdp2(model, reshard, device)
    if variant.engine is Engine.fairscale:
        return _fairscale(model, reshard)
    if variant.engine is Engine.flat_te:
        return _transformer_engine(model, reshard, device)
    if variant.engine is Engine.fsdp2_te:
        return _fsdp2(EngineLlama(model, fuse=False), reshard, device)
    if variant.engine in RECIPES:
        return _fused(model, RECIPES[variant.engine], reshard, device)
    return flatfsdp.shard(
        model,
        by_class(Layer, nn.Embedding),
        device=device,
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=reshard,
        optimize_backward_concat=variant.engine is not Engine.flat_off,
    )


def _fused(model: Llama, recipe: Recipe | None, reshard: bool, device: torch.device) -> nn.Module:
    stored = None if recipe is None else CurrentScaling()
    return flatfsdp.shard(
        FusedLlama(model, recipe),
        by_class(TransformerLayer, Embedding),
        device=device,
        precision=Precision(compute=torch.bfloat16, fp8_weights=stored),
        reshard_after_forward=reshard,
        optimize_backward_concat=True,
    )


def _transformer_engine(model: Llama, reshard: bool, device: torch.device) -> nn.Module:
    return flatfsdp.shard(
        EngineLlama(model, fuse=True),
        by_class(layer_class(), nn.Embedding),
        device=device,
        precision=Precision(compute=torch.bfloat16),
        reshard_after_forward=reshard,
        optimize_backward_concat=True,
    )


def _use_float8(model: Llama, device: torch.device) -> None:
    """Converts all layers to torchao's linear maps, with one scale per tensor and FP8 all-gather."""
    float8 = importlib.import_module("torchao.float8")
    # A CPU multiplies in FP32 after rounding to FP8.
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    float8.convert_to_float8_training(model.layers, config=config)


def _fsdp2(model: Llama | EngineLlama, reshard: bool, device: torch.device) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, *([] if model.tokens is None else [model.tokens])):
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
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
    if model.tokens is not None:
        model.tokens = fsdp(model.tokens, **options)
    return fsdp(model, **options)


def adamw(model: nn.Module, variant: Variant, lr: float, *, own: bool) -> torch.optim.Optimizer:
    """Makes an AdamW in one kernel, as each engine's users have it.

    Args:
        model: the sharded model.
        variant: its engine.
        lr: learning rate.
        own: use FlatFSDP's for its own layers, which also casts the weights; otherwise torch's.
    """
    if own and variant.engine in RECIPES:
        return flatfsdp.optim.AdamW(model.parameters(), lr=lr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    if variant.engine is Engine.fsdp2_float8:
        float8 = importlib.import_module("torchao.float8")
        # One all-reduce for the scales of all weights, instead of one per weight.
        optimizer.register_step_post_hook(lambda *_: float8.precompute_float8_dynamic_scale_for_fsdp(model))
    return optimizer
