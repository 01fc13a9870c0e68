"""What layers should compute, in plain PyTorch and FP64, and how far off they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.kernels.activation import GATED

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}

EPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative errors that rounding explains."""


def assert_near(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: float = 1e-5) -> None:
    """Relative errors, of all that ours have."""
    for name, value in ours.items():
        assert error(value, expected[name]) < bound, name


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; absolute if expected values are 0 except for rounding."""
    assert ours.shape == expected.shape
    assert ours.isfinite().all()
    ones, scale = max(1, expected.numel()) ** 0.5, expected.double().norm().item()
    return (ours.double() - expected.double()).norm().item() / (scale if scale > 1e-9 * ones else ones)


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FP64 leaves of the same values."""
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def trained(layer: Any, std: float = 1.0) -> Any:
    """Gives a layer random parameters, even if it starts with zeros or ones; those of an MLP are small."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(0, 1 / 4 if name.startswith("fc") else std)
    return layer


def same_gradients(
    ours: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: Iterable[Tensor], bound: float
) -> None:
    """Compares results and gradients of all inputs, the latter for a random gradient of the result."""
    inputs = list(inputs)
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    out, reference = ours(*inputs), expected(*doubles)
    assert error(out, reference) < bound
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad)
    references = torch.autograd.grad(reference, doubles, grad.double())
    for tensor, got, wanted in zip(inputs, grads, references, strict=True):
        assert got.dtype == tensor.dtype
        assert error(got, wanted) < bound


def check_layer(layer: Any, x: Tensor, bound: float) -> None:
    """Compares a `Linear`, `LayerNormLinear` or `LayerNormMLP` with `expected`, and all gradients."""
    same_gradients(
        lambda x, *_: layer(x),
        lambda x, *parameters: expected(layer, x, *parameters)[0],
        [x, *layer.parameters()],
        bound,
    )


def expected(layer: Any, x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Result of such a layer, and what its norm gives, with these parameters in place of its own."""
    named = dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True))
    normalized = norm_of(layer, x, named) if "layer_norm_weight" in named else x
    if "weight" in named:
        return F.linear(normalized, named["weight"], named.get("bias")), normalized
    hidden = F.linear(normalized, named["fc1_weight"], named.get("fc1_bias"))
    hidden = activated(hidden, layer.activation)
    return F.linear(hidden, named["fc2_weight"], named.get("fc2_bias")), normalized


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """[batch, seq, heads, dim]; `seen`, bool, is broadcast to [batch, heads, queries, keys]."""
    repeats = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2)


def window(queries: int, keys: int, left: int, right: int) -> Tensor:
    """True where a query sees a key; -1 is no limit."""
    return torch.tensor(
        [
            [(left < 0 or k >= q - left) and (right < 0 or k <= q + right) for k in range(keys)]
            for q in range(queries)
        ]
    )


def rotated(x: Tensor, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """RoPE with complex numbers; x is [batch, seq, heads, dim]."""
    seq, dim = x.shape[1], x.shape[3]
    frequency = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.view_as_real(torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle))
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    rms: bool = False,
    eps: float = 1e-5,
    zero_centered: bool = False,
) -> Tensor:
    if weight is not None and zero_centered:
        weight = weight + 1
    shape = x.shape[-1:] if weight is None else weight.shape
    if rms:
        return F.rms_norm(x, shape, weight, eps)
    return F.layer_norm(x, shape, weight, bias, eps)


def norm_of(layer: Any, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The norm of a layer that begins with one, with these parameters in place of its own."""
    return norm(
        x,
        parameters["layer_norm_weight"],
        parameters.get("layer_norm_bias"),
        rms=layer.norm.rms,
        eps=layer.norm.eps,
        zero_centered=layer.norm.zero_centered,
    )


def activated(x: Tensor, name: str) -> Tensor:
    """By one of `flatfsdp.kernels.activation.NAMES`."""
    if name not in GATED:
        return ACTIVATIONS[name](x)
    first, second = x.chunk(2, -1)
    return ACTIVATIONS[GATED[name]](first) * second
