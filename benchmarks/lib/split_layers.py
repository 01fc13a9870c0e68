"""One Llama layer shared by N ranks, in every way that `tensor_parallel.py` measures.

In:   one whole layer in bf16, the same on every rank, an input and an output gradient.
Out:  layers that are ready to run, each with this rank's part of the whole one's parameters.
Next: `tensor_parallel.py` times them and compares them with the whole layer.

Activations are [t, b, c]: the sequence comes first, so that no all-gather along it has to copy.  Shapes in
names are as in `llama.py`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import sdpa_kernel

from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.tensor_parallel import part_of
from flatfsdp.fp8 import DelayedScaling, autocast
from flatfsdp.layers import TransformerLayer
from lib.fp8_llama import OF_LAYER
from lib.layers import give_main_grads
from lib.llama import ATTENTION, SHAPES, Attention, Layer, LlamaConfig, rope_tables, rotate

LAYERS = {
    "8b": replace(SHAPES["8b"], layers=1, vocab=0, loss="mean-square"),
    "70b": replace(SHAPES["70b-l2"], layers=1, seq=8192),
    "tiny": replace(SHAPES["tiny-l2"], layers=1),
}
"""One layer of each model; `seq` is the default length of a sequence."""


class Engine(str, Enum):
    """The measured engines."""

    torch = "torch"
    compiled = "torch-compile"
    torchao = "torchao"
    bf16 = "flat-bf16"
    fp8 = "flat-fp8"

    @property
    def is_ours(self) -> bool:
        """Whether it is FlatFSDP's."""
        return self in (Engine.bf16, Engine.fp8)

    @property
    def is_compiled(self) -> bool:
        """Whether its layer is compiled."""
        return self in (Engine.compiled, Engine.torchao)

    @property
    def is_fp8(self) -> bool:
        """Whether its GEMMs are in FP8."""
        return self in (Engine.torchao, Engine.fp8)


class Split(str, Enum):
    """How ranks share the layer; with `one`, each computes the whole layer alone, for comparison."""

    one = "one"
    tensor = "tp"
    sequence = "sp"
    overlap = "overlap"

    @property
    def splits_sequence(self) -> bool:
        """Whether ranks have parts of the sequence between layers."""
        return self in (Split.sequence, Split.overlap)


ENGINE_LABELS = {
    Engine.torch: "PyTorch bf16, eager",
    Engine.compiled: "PyTorch bf16, torch.compile",
    Engine.torchao: "torchao float8, torch.compile",
    Engine.bf16: "flatfsdp bf16",
    Engine.fp8: "flatfsdp FP8 delayed",
}
SPLIT_LABELS = {
    Split.one: "one GPU alone",
    Split.tensor: "TP",
    Split.sequence: "TP + SP",
    Split.overlap: "TP + SP, overlapped",
}


@dataclass(frozen=True)
class Mode:
    """An engine's layer, and how it is split."""

    engine: Engine
    split: Split

    @property
    def name(self) -> str:
        """The name in files and on the command line."""
        return f"{self.engine.value}-{self.split.value}"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return f"{ENGINE_LABELS[self.engine]}, {SPLIT_LABELS[self.split]}"

    def unavailable(self, device: torch.device) -> str:
        """The reason why it cannot be measured here, or empty."""
        if self.engine is Engine.torchao and importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        if self.engine is Engine.torchao and device.type != "cuda":
            return "gloo does not know FP8"
        if self.split is Split.overlap and device.type != "cuda":
            return "there is symmetric memory on GPUs only"
        return ""


MODES = {
    mode.name: mode
    for mode in (Mode(engine, split) for split in Split for engine in Engine)
    # Eager PyTorch has no overlap.
    if mode != Mode(Engine.torch, Split.overlap)
}

EAGER_MODES = tuple(name for name, mode in MODES.items() if not mode.engine.is_compiled)
USUAL_MODES = (*EAGER_MODES, "torch-compile-sp", "torch-compile-overlap", "torchao-sp")
"""The default modes; compiled only where that is fastest, because compiling one takes ten seconds."""


@dataclass(frozen=True)
class Problem:
    """The whole layer, its input and its output gradient, [t, b, c] in bf16, for all contestants."""

    config: LlamaConfig
    ranks: Ranks
    layer: PlainLayer
    x: Tensor
    dy: Tensor

    @staticmethod
    def of(config: LlamaConfig, batch: int, ranks: Ranks, device: torch.device) -> Problem:
        """Makes the problem, which is equal on all ranks."""
        torch.manual_seed(0)
        with device:
            layer = PlainLayer(config).to(torch.bfloat16)
            x = torch.randn(config.seq, batch, config.hidden, dtype=torch.bfloat16)
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.normal_(parameter, mean=1.0, std=0.1)
        return Problem(config, ranks, layer, x, torch.randn_like(x))

    @cached_property
    def sizes(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The split of each parameter: its dimension, and the parts that are split over the ranks."""
        config = self.config
        kv = config.kv_heads * config.head_dim
        return {
            "attention.qkv.weight": (0, (config.hidden, kv, kv)),
            "attention.out.weight": (1, (config.hidden,)),
            "mlp.gate_up.weight": (0, (config.ffn, config.ffn)),
            "mlp.down.weight": (1, (config.ffn,)),
        }

    def part(self, name: str, whole: Tensor, split: Split) -> Tensor:
        """This rank's part of a parameter, or of its gradient, by its name in the plain layer."""
        if split is Split.one or name not in self.sizes:
            return whole
        return part_of(whole, *self.sizes[name], self.ranks)

    def rows(self, whole: Tensor, split: Split) -> Tensor:
        """This rank's part of a tensor between layers."""
        return whole.chunk(self.ranks.size)[self.ranks.rank].contiguous() if split.splits_sequence else whole


@dataclass(eq=False)
class Contestant:
    """A layer that is ready to run.

    Attributes:
        run: computes the forward.
        x: this rank's rows of the input.
        dy: this rank's rows of the output's gradient.
        named: the parameters, by their names in the plain layer.
    """

    module: nn.Module
    run: Callable[[Tensor], Tensor]
    x: Tensor
    dy: Tensor
    named: dict[str, nn.Parameter]

    def step(self) -> Tensor:
        """Runs forward and backward, as in a later microbatch: fused gradients are added, others are new."""
        self.x.grad = None
        for parameter in self.named.values():
            parameter.grad = None
        out = self.run(self.x)
        out.backward(self.dy)
        return out

    def results(self) -> dict[str, Tensor]:
        """This rank's part of the output and all gradients of one step without previous gradients.

        Raises:
            FloatingPointError: if one is not finite: NaNs run faster.
        """
        for parameter in self.named.values():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
        grads: dict[str, Tensor | None] = {"output": self.step().detach(), "input": self.x.grad}
        grads |= {name: _complete_grad(parameter) for name, parameter in self.named.items()}
        found = {name: tensor for name, tensor in grads.items() if tensor is not None}
        wrong = [name for name in grads if name not in found or not bool(found[name].isfinite().all())]
        if wrong:
            raise FloatingPointError(f"{', '.join(wrong)}: missing or not finite")
        return found

    def compile(self, *, overlaps: bool) -> None:
        """Compiles the layer; compiled code runs from now on.

        Args:
            overlaps: split all-gathers and reductions into chunks that overlap with their GEMMs.
        """
        if overlaps:
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            assert dist.group.WORLD is not None
            enable_symm_mem_for_group(dist.group.WORLD.group_name)
        options: dict[str, Any] = {"_micro_pipeline_tp": overlaps}
        self.module.forward = torch.compile(self.module.forward, dynamic=False, options=options)


def _complete_grad(parameter: nn.Parameter) -> Tensor | None:
    """The gradient, summed over ranks if each has that of its tokens only."""
    grad = getattr(parameter, "main_grad", None)
    grad = parameter.grad if grad is None else grad
    if isinstance(grad, DTensor):
        assert isinstance(parameter, DTensor)
        is_whole = all(isinstance(placement, Replicate) for placement in parameter.placements)
        return grad.full_tensor() if is_whole else grad.to_local()
    if grad is not None and getattr(parameter, "sequence_parallel", False):
        grad = grad.clone()
        dist.all_reduce(grad)
    return grad


def whole_results(engine: Engine, problem: Problem) -> dict[str, Tensor]:
    """The results of an engine's layer on one GPU alone, once delayed scales have settled."""
    alone = build(Mode(engine, Split.one), problem)
    for _ in range(3):
        alone.step()
    return {name: tensor.clone() for name, tensor in alone.results().items()}


def build(mode: Mode, problem: Problem) -> Contestant:
    """Makes an eager contestant with its own parameters."""
    make = _ours if mode.engine.is_ours else _plain
    module, run, named = make(mode, problem)
    x, dy = (problem.rows(whole, mode.split) for whole in (problem.x, problem.dy))
    return Contestant(module, run, x.detach().requires_grad_(), dy, named)


Built = tuple[nn.Module, Callable[[Tensor], Tensor], dict[str, nn.Parameter]]


# -- FlatFSDP's layer ------------------------------------------------------------------------------------


def _ours(mode: Mode, problem: Problem) -> Built:
    """Makes our layer, with FP8 weights cast once and gradients added to FP32 main_grad in the GEMM."""
    config, split = problem.config, mode.split
    parallel: dict[str, Any] = {}
    if split is not Split.one:
        parallel = {"set_parallel_mode": True, "tp_group": problem.ranks.group}
        parallel |= {"sequence_parallel": split.splits_sequence, "tp_overlap": split is Split.overlap}
    layer = TransformerLayer(
        *(config.hidden, config.ffn, config.heads, config.kv_heads, config.norm_eps),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        rotary_base=config.rope_theta,
        fuse_qkv_params=True,
        # Queries, keys and values one after the other, as in the plain layer.
        qkv_weight_interleaved=False,
        fuse_wgrad_accumulation=True,
        params_dtype=torch.bfloat16,
        device=problem.x.device,
        **parallel,
    )
    named = {theirs: layer.get_parameter(ours) for ours, theirs in OF_LAYER.items()}
    with torch.no_grad():
        for name, whole in problem.layer.named_parameters():
            named[name].copy_(problem.part(name, whole, split))
    give_main_grads(layer)
    recipe = None
    if mode.engine is Engine.fp8:
        recipe = DelayedScaling(amax_history_len=16, reduce_amax=split is not Split.one)

    def forward(x: Tensor, first: bool = False) -> Tensor:
        with nullcontext() if recipe is None else autocast(recipe=recipe):
            return layer(x, is_first_microbatch=first)

    with torch.no_grad():
        forward(problem.rows(problem.x, split), first=True)
    return layer, forward, named


# -- PyTorch's -------------------------------------------------------------------------------------------


class SequenceFirst(Attention):
    """The `Attention` with [t, b, c] -> [t, b, c], and with this rank's heads only."""

    def forward(self, x_tbc: Tensor) -> Tensor:
        """Projects, rotates, attends and projects back."""
        h, g = self.heads, self.kv_heads
        qk_tbnd, v_tbgd = self.qkv(x_tbc).unflatten(-1, (h + 2 * g, -1)).split((h + g, g), dim=2)
        cos, sin = (table[: len(qk_tbnd), None].to(qk_tbnd.dtype) for table in (self.cos, self.sin))
        qk_tbnd = rotate(qk_tbnd, cos, sin)
        q_bhtd, k_bgtd = qk_tbnd.permute(1, 2, 0, 3).split((h, g), dim=1)
        y_bhtd = F.scaled_dot_product_attention(
            q_bhtd, k_bgtd, v_tbgd.permute(1, 2, 0, 3), is_causal=True, enable_gqa=g < h
        )
        return self.out(y_bhtd.permute(2, 0, 1, 3).flatten(-2))


class PlainLayer(Layer):
    """The plain `Layer`, [t, b, c] -> [t, b, c]."""

    def __init__(self, config: LlamaConfig) -> None:
        rope = rope_tables(config)
        super().__init__(config, rope)
        self.attention = SequenceFirst(config, rope)


def _plain(mode: Mode, problem: Problem) -> Built:
    """Makes PyTorch's layer; its fused projections are split like ours, part by part."""
    layer = copy.deepcopy(problem.layer)
    if mode.split is not Split.one:
        for name, (dim, sizes) in problem.sizes.items():
            _arrange(layer.get_parameter(name), dim, sizes, problem.ranks.size)
    if mode.engine is Engine.torchao:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(layer)
    if mode.split is not Split.one:
        layer.attention.heads //= problem.ranks.size
        layer.attention.kv_heads //= problem.ranks.size
        mesh = init_device_mesh(problem.x.device.type, (problem.ranks.size,))
        parallelize_module(layer, mesh, _plan(mode))

    def forward(x: Tensor) -> Tensor:
        # Around the layer instead of inside, so that a compiled one does not see it.
        with sdpa_kernel(ATTENTION, set_priority=True) if x.is_cuda else nullcontext():
            return layer(x)

    return layer, forward, dict(layer.named_parameters())


def _plan(mode: Mode) -> dict[str, ParallelStyle]:
    """The DTensor style of each module."""
    column, row = ColwiseParallel, RowwiseParallel
    if mode.engine is Engine.torchao:
        from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

        column, row = Float8ColwiseParallel, Float8RowwiseParallel
    between = Shard(0) if mode.split.splits_sequence else Replicate()
    norms = ("norm_attention", "norm_mlp") if mode.split.splits_sequence else ()
    return {
        **{norm: SequenceParallel(sequence_dim=0) for norm in norms},
        **{name: column(input_layouts=between) for name in ("attention.qkv", "mlp.gate_up")},
        **{name: row(output_layouts=between) for name in ("attention.out", "mlp.down")},
    }


@torch.no_grad()
def _arrange(parameter: nn.Parameter, dim: int, sizes: tuple[int, ...], ranks: int) -> None:
    """Moves each rank's share of all parts to where DTensor splits."""
    shares = [part_of(parameter, dim, sizes, Ranks(None, ranks, rank)) for rank in range(ranks)]
    parameter.copy_(torch.cat(shares, dim))
