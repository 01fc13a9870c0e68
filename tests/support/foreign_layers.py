"""A model of another library that becomes the owner of linear maps, and calls with its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.fp8 import autocast
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import NormOf, linear, norm_linear, norm_mlp, prepare
from flatfsdp.layers.normalized import NormKind
from tests.support.plain_layers import trained

WIDTH, FFN = 32, 48
RMS = NormKind(1e-5, rms=True, zero_centered=False)


class Foreign(nn.Module):
    """A model of another library, with one parameter a module."""

    def __init__(self, width: int = WIDTH, ffn: int = FFN) -> None:
        super().__init__()
        self.ffn = ffn
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width)
        self.kept = "as it was"


class Owner(Foreign, MatmulLayer):
    """The same model once it owns two maps."""

    linear_maps = ("up_weight", "down_weight")

    @property
    def norm_of(self) -> NormOf:
        return NormOf(self.norm.weight, None, RMS)

    @property
    def maps(self) -> tuple[MapOf, MapOf]:
        return (
            MapOf("up_weight", self.up.weight, self.up.bias),
            MapOf("down_weight", self.down.weight, self.down.bias),
        )


def owner(width: int = WIDTH, ffn: int = FFN, **options: Any) -> Owner:
    """Makes an owner that was constructed as another class."""
    torch.manual_seed(0)
    module: Any = trained(Foreign(width, ffn))
    module.__class__ = Owner
    module._become(**options)
    return module


def gradients(module: nn.Module, x: Tensor, call: Callable[[Tensor], tuple[Tensor, ...]], recipe: Any) -> Any:
    """Results and gradients of two microbatches, in the order of `parameters()`."""
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        with autocast(enabled=recipe is not None, recipe=recipe):
            outs = call(leaf)
        sum(out.float().square().sum() for out in outs).backward()
        found += [*outs, leaf.grad]
    return [*found, *(p.grad for p in module.parameters())]


class Turned(Owner):
    """The same parameters, each weight as GPT-2's Conv1D has it."""

    @property
    def maps(self) -> tuple[MapOf, MapOf]:
        first, second = (of._replace(transposed=True) for of in super().maps)
        return first, second


def turned(width: int = WIDTH, ffn: int = FFN, **options: Any) -> Turned:
    module: Any = owner(width, ffn, **options)
    module.__class__ = Turned
    for layer in (module.up, module.down):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    return module


def norm_mlp_of(module: Owner, x: Tensor) -> tuple[Tensor, ...]:
    fc1, fc2 = module.maps
    ready = prepare(module, x, fc1, fc2)
    called = norm_mlp(ready, module.norm_of, "swiglu", residual=x * 2, keep=True)
    assert called.normalized is not None
    return called.out, called.normalized, called.summed


def two_calls(module: Owner, x: Tensor) -> tuple[Tensor, ...]:
    up, down = module.maps
    ready = prepare(module, x, up, down)
    mixed, _, summed = norm_linear(ready, module.norm_of)
    return linear(ready.of_next(mixed[..., : module.ffn])), summed


def claimed(weight: Tensor) -> Tensor:
    """Gives a weight the main_grad of FlatFSDP's parameters: zeros, in which nothing has landed."""
    buffer = torch.zeros(weight.shape, device=weight.device)
    written: list[bool] = []

    def claim() -> tuple[Tensor, bool]:
        written.append(True)
        return buffer, len(written) == 1

    weight.claim_main_grad = claim  # type: ignore[attr-defined]
    return buffer
