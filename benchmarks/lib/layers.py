"""One transformer layer in every way that `layer.py` measures, each with a function that runs one step."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from flatfsdp import Precision, microbatches, replayed, shard
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe, autocast
from flatfsdp.layers import TransformerLayer
from lib.llama import ATTENTION


@dataclass(frozen=True)
class LayerShape:
    """A GPT layer with LayerNorm, biases and gelu; by default Transformer Engine's quickstart."""

    hidden: int = 4096
    ffn: int = 16384
    heads: int = 32
    seq: int = 2048
    batch: int = 4
    dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.seq * self.batch

    @property
    def flops(self) -> int:
        """Operations of a step: 6 per weight and token, and causal attention's two GEMMs three times."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.ffn
        return 6 * weights * self.tokens + 6 * self.tokens * self.seq * self.hidden


class PlainLayer(nn.Module):
    """The layer in plain PyTorch, [seq, batch, hidden]."""

    def __init__(self, shape: LayerShape, **factory: Any) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.ln1 = nn.LayerNorm(shape.hidden, **factory)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, **factory)
        self.proj = nn.Linear(shape.hidden, shape.hidden, **factory)
        self.ln2 = nn.LayerNorm(shape.hidden, **factory)
        self.fc1 = nn.Linear(shape.hidden, shape.ffn, **factory)
        self.fc2 = nn.Linear(shape.ffn, shape.hidden, **factory)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Runs the layer."""
        qkv = self.qkv(self.ln1(x_sbh)).unflatten(-1, (self.heads, 3, -1))
        q_bhsd, k_bhsd, v_bhsd = (part.permute(1, 2, 0, 3) for part in qkv.unbind(-2))
        with sdpa_kernel(ATTENTION, set_priority=True):
            y_bhsd = F.scaled_dot_product_attention(
                q_bhsd, k_bhsd, v_bhsd, is_causal=True, dropout_p=self.dropout
            )
        y_sbh = self.proj(y_bhsd.permute(2, 0, 1, 3).flatten(-2))
        x_sbh = x_sbh + F.dropout(y_sbh, self.dropout)
        y_sbh = self.fc2(F.gelu(self.fc1(self.ln2(x_sbh)), approximate="tanh"))
        return x_sbh + F.dropout(y_sbh, self.dropout)


class Mode(str, Enum):
    """The measured variants."""

    eager = "eager"
    eager_added = "eager-added"
    compiled = "compile"
    ao_tensorwise = "torchao-tensorwise"
    ao_rowwise = "torchao-rowwise"
    te = "te-delayed-fused"
    bf16 = "flat-bf16"
    bf16_fused = "flat-bf16-fused"
    bf16_fused_added = "flat-bf16-fused-added"
    delayed = "flat-delayed"
    delayed_cached = "flat-delayed-cached"
    delayed_fused = "flat-delayed-cached-fused"
    current_fused = "flat-current-cached-fused"
    replayed = "flat-delayed-replayed"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return _LABELS[self]

    def unavailable(self) -> str:
        """The reason why it cannot be measured here, or empty."""
        if self is Mode.replayed and not torch.cuda.is_available():
            return "CUDA graphs need a GPU"
        needed = {Mode.ao_tensorwise: "torchao", Mode.ao_rowwise: "torchao", Mode.te: "transformer_engine"}
        module = needed.get(self)
        missing = module is not None and importlib.util.find_spec(module) is None
        return f"{module} is not installed" if missing else ""


_LABELS = {
    Mode.eager: "PyTorch bf16, eager",
    Mode.eager_added: "PyTorch bf16, eager, gradients added to bf16 .grad",
    Mode.compiled: "PyTorch bf16, torch.compile",
    Mode.ao_tensorwise: "torchao float8 tensorwise, torch.compile",
    Mode.ao_rowwise: "torchao float8 rowwise, torch.compile",
    Mode.te: "Transformer Engine FP8 delayed, cached weights, fused FP32 wgrad",
    Mode.bf16: "flatfsdp bf16",
    Mode.bf16_fused: "flatfsdp bf16, fused FP32 wgrad",
    Mode.bf16_fused_added: "flatfsdp bf16, fused FP32 wgrad, added to main_grad",
    Mode.delayed: "flatfsdp FP8 delayed, bf16 wgrad",
    Mode.delayed_cached: "flatfsdp FP8 delayed, cached weights, bf16 wgrad",
    Mode.delayed_fused: "flatfsdp FP8 delayed, cached weights, fused FP32 wgrad",
    Mode.current_fused: "flatfsdp FP8 current, cached weights, fused FP32 wgrad",
    Mode.replayed: "FlatFSDP on one rank, FP8 delayed, FP8 weights, replayed",
}


@dataclass(eq=False)
class Contestant:
    """A layer that is ready to run.

    Attributes:
        step: runs forward and backward once.
        results: the same, and returns the output and all gradients, by name; None where one is missing.
    """

    step: Callable[[], object]
    results: Callable[[], dict[str, Tensor | None]]

    def check(self) -> None:
        """Runs one step and checks its results.

        Raises:
            FloatingPointError: if the output or a gradient is not finite: NaNs run faster.
        """
        for name, tensor in self.results().items():
            if tensor is None or not bool(tensor.isfinite().all()):
                raise FloatingPointError(f"{name} is {'missing' if tensor is None else 'not finite'}")


def build(mode: Mode, shape: LayerShape, device: torch.device) -> Contestant:
    """Makes the layer with bf16 parameters, normal inputs and normal output gradients; seeded."""
    torch.manual_seed(0)
    x = torch.randn(shape.seq, shape.batch, shape.hidden, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    x.requires_grad_()
    if mode in (Mode.eager, Mode.eager_added, Mode.compiled, Mode.ao_tensorwise, Mode.ao_rowwise):
        return _plain(mode, shape, x, dy)
    if mode is Mode.te:
        return _transformer_engine(shape, x, dy)
    if mode is Mode.replayed:
        return _replayed(shape, x, dy)
    return _ours(mode, shape, x, dy)


def _plain(mode: Mode, shape: LayerShape, x: Tensor, dy: Tensor) -> Contestant:
    layer: nn.Module = PlainLayer(shape, device=x.device, dtype=torch.bfloat16)
    if mode in (Mode.ao_tensorwise, Mode.ao_rowwise):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = "tensorwise" if mode is Mode.ao_tensorwise else "rowwise"
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
    is_added = mode is Mode.eager_added
    run = layer if is_added or mode is Mode.eager else torch.compile(layer)
    return _contestant(lambda: run(x), layer, x, dy, keeps_gradients=is_added)


def _ours(mode: Mode, shape: LayerShape, x: Tensor, dy: Tensor) -> Contestant:
    recipe: Recipe | None = None
    if mode in (Mode.delayed, Mode.delayed_cached, Mode.delayed_fused):
        recipe = DelayedScaling(amax_history_len=16)
    elif mode is Mode.current_fused:
        recipe = CurrentScaling()
    fused = mode in (Mode.bf16_fused, Mode.bf16_fused_added, Mode.delayed_fused, Mode.current_fused)
    layer = TransformerLayer(**_arguments(shape, fuse_wgrad_accumulation=fused), device=x.device)
    if fused:
        give_main_grads(layer)
    cached = recipe is not None and mode is not Mode.delayed

    def forward(first: bool | None) -> Tensor:
        with nullcontext() if recipe is None else autocast(recipe=recipe):
            return layer(x, is_first_microbatch=first)

    if cached:
        forward(True)
    # Steady state of FP8: a later microbatch reuses weights and adds to main_grad.
    first = False if cached else True if mode is Mode.bf16_fused else None
    return _contestant(lambda: forward(first), layer, x, dy)


def _replayed(shape: LayerShape, x: Tensor, dy: Tensor) -> Contestant:
    """Replays middle microbatches of an endless step."""
    layer = TransformerLayer(
        **_arguments(shape, fuse_wgrad_accumulation=True, dtype=torch.float32), device=x.device
    )
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling())
    # ZeRO-3 would transpose the FP8 weights again in each microbatch, and has nothing to share on one rank.
    model = shard(
        layer,
        device=x.device,
        precision=precision,
        optimize_backward_concat=True,
        reshard_after_forward=False,
    )
    recipe = DelayedScaling(amax_history_len=16)

    def compute() -> tuple[Tensor, Tensor | None]:
        leaf = x.detach().requires_grad_()
        with autocast(recipe=recipe):
            y = model(leaf)
        y.backward(dy)
        return y, leaf.grad

    def microbatch() -> None:
        compute()

    steps, run = microbatches(model, itertools.repeat(None)), replayed(model, microbatch)

    def step() -> None:
        next(steps)
        run()

    def results() -> dict[str, Tensor | None]:
        next(steps)
        y, grad = compute()
        found: dict[str, Tensor | None] = {"the output": y, "the input's gradient": grad}
        for _, group in named_groups(model):
            assert group.main_grad is not None
            for index, slot in enumerate(group.layout.slots):
                found[f"the gradient of {slot.name}"] = group.main_grad.get(index)
        return found

    return Contestant(step, results)


def _transformer_engine(shape: LayerShape, x: Tensor, dy: Tensor) -> Contestant:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    layer = te.TransformerLayer(**_arguments(shape, fuse_wgrad_accumulation=True))
    give_main_grads(layer)
    recipe = recipes.DelayedScaling(amax_history_len=16)

    def forward(first: bool) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return layer(x, is_first_microbatch=first)

    forward(True)
    return _contestant(lambda: forward(False), layer, x, dy)


def _arguments(
    shape: LayerShape, *, fuse_wgrad_accumulation: bool, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Arguments shared by Transformer Engine's layer and ours."""
    return {
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "hidden_dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "fuse_qkv_params": True,
        "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
        "params_dtype": dtype,
    }


def give_main_grads(layer: nn.Module) -> None:
    """Gives every matrix an FP32 main_grad of zeros."""
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]


def _contestant(
    forward: Callable[[], Tensor],
    layer: nn.Module,
    x: Tensor,
    dy: Tensor,
    *,
    keeps_gradients: bool = False,
) -> Contestant:
    """Makes a contestant of a layer.

    Args:
        layer: the layer.
        forward: computes its output.
        x: its input.
        dy: gradient of its output.
        keeps_gradients: as in a later microbatch; otherwise autograd makes new gradients.
    """
    reset = (x,) if keeps_gradients else (x, *layer.parameters())

    def step() -> Tensor:
        for tensor in reset:
            tensor.grad = None
        y = forward()
        y.backward(dy)
        return y

    def results() -> dict[str, Tensor | None]:
        found = {"the output": step(), "the input's gradient": x.grad}
        for name, parameter in layer.named_parameters():
            main_grad = getattr(parameter, "main_grad", None)
            found[f"the gradient of {name}"] = parameter.grad if main_grad is None else main_grad
        return found

    return Contestant(step, results)
