"""A small model of FP8 layers, ways to train it, and exact comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, autocast
from flatfsdp.fp8.delayed_scaling import Arena
from flatfsdp.layers import LayerNormLinear, LayerNormMLP, Linear

TOKENS, WIDTH, FFN = 32, 32, 48
SHORT = DelayedScaling(amax_history_len=4)
RECIPES = pytest.mark.parametrize(
    "recipe", [SHORT, CurrentScaling(), BlockScaling(), None], ids=["delayed", "current", "block", "high"]
)
FP8_RECIPES = pytest.mark.parametrize(
    "recipe", [SHORT, CurrentScaling(), BlockScaling()], ids=["delayed", "current", "block"]
)
LAYERS = {
    "linear": partial(Linear, WIDTH, FFN),
    "layernorm_linear": partial(LayerNormLinear, WIDTH, FFN, normalization="RMSNorm"),
    "mlp": partial(LayerNormMLP, WIDTH, FFN, activation="swiglu"),
    "mlp-checkpoint": partial(LayerNormMLP, WIDTH, FFN, checkpoint=True),
}
MAKES = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def batch(scale: float = 1.0) -> Tensor:
    """For a `Stack`, or one of its layers."""
    return scale * torch.randn(TOKENS, WIDTH)


class Block(nn.Module):
    """Every layer with FP8 GEMMs, and a residual connection."""

    def __init__(self, **mlp: Any) -> None:
        super().__init__()
        self.up = LayerNormLinear(WIDTH, FFN, normalization="RMSNorm")
        self.down = Linear(FFN, WIDTH, bias=False)
        self.mlp = LayerNormMLP(WIDTH, FFN, activation="swiglu", **mlp)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        first = is_first_microbatch
        x = x + self.down(self.up(x, is_first_microbatch=first), is_first_microbatch=first)
        return x + self.mlp(x, is_first_microbatch=first)


class Stack(nn.Module):
    """Blocks, each called through `call`, and a head.

    Args:
        call: takes a block and its arguments; what recompute tests vary.
    """

    def __init__(
        self, blocks: int = 2, call: Callable[..., Tensor] = lambda block, *args: block(*args), **mlp: Any
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**mlp) for _ in range(blocks))
        self.head = Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x, is_first_microbatch)
        return self.head(x, is_first_microbatch=is_first_microbatch)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


class Trace(NamedTuple):
    """All that a training run made."""

    losses: list[Tensor]
    grads: list[Tensor]
    state: dict[str, Tensor]


def train(
    model: nn.Module,
    steps: int = 3,
    microbatches: int = 2,
    recipe: Any = SHORT,
    *,
    caches: bool = False,
    seed: int = 1,
    factor: float = 1.0,
) -> Trace:
    """SGD on fresh data, scaled up in each step so that scales move; autocast around the forward."""
    generator = torch.Generator().manual_seed(seed)
    losses, grads = [], []
    for step in range(steps):
        for microbatch in range(microbatches):
            x = torch.randn(TOKENS, WIDTH, generator=generator) * factor * 2.0**step
            with autocast(enabled=recipe is not None, recipe=recipe):
                out = model(x.requires_grad_(), microbatch == 0 if caches else None)
                loss = out.float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            assert x.grad is not None
            grads.append(x.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                grads.append(parameter.grad)
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return Trace(losses, grads, snapshot(model))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same(ours: Trace, other: Trace) -> None:
    for a, b in zip(ours.losses, other.losses, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(ours.grads, other.grads, strict=True):
        assert torch.equal(a, b)
    assert_same_state(ours.state, other.state)


def assert_same_state(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert ours.keys() == other.keys()
    assert [key for key in ours if not torch.equal(ours[key], other[key])] == []


def fp8_state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in snapshot(module).items() if ".fp8_" in f".{key}"}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, also those of NaNs."""
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


@contextmanager
def counted_updates() -> Iterator[list[int]]:
    """The list gets the number of tensors of each update inside."""
    counts: list[int] = []
    update = Arena.update

    def counting(arena: Arena, *args: Any) -> None:
        counts.append(arena.scale.numel())
        update(arena, *args)

    Arena.update = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        Arena.update = update  # type: ignore[method-assign]


def weights_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.dim() == 2}
