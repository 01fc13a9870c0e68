"""What `MultiheadAttention` should compute, in plain PyTorch and FP64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.layers.attention.multihead import MultiheadAttention
from tests.support import plain_layers as plain


def trained(layer: nn.Module) -> nn.Module:
    """Gives a layer random parameters, of a size that keeps results of order 1."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(0.0, 1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
            if name.endswith(("norm.weight", "norm_weight")):
                parameter.add_(1.0)
    return layer


def check_sequences(
    layer: Any,
    qkv_format: str,
    expected: Callable[..., Tensor],
    shape: Sequence[int],
    bound: float,
    **arguments: Any,
) -> None:
    """Compares a layer with `expected(x, state)` in FP64: the result, and gradients of input and parameters.

    Args:
        layer: an attention or transformer layer.
        qkv_format: whether its own input is [seq, batch, hidden], "sbhd".
        expected: takes x, [batch, seq, hidden], and all parameters by name.
        shape: of x.
        bound: of the relative errors.
        arguments: of the layer's call.
    """
    dtype = next(layer.parameters()).dtype
    x = plain.leaf(*shape, dtype=dtype)
    doubles = plain.doubled({"x": x, **dict(layer.named_parameters())})
    is_sbhd = qkv_format == "sbhd"
    out = layer(x.transpose(0, 1), **arguments).transpose(0, 1) if is_sbhd else layer(x, **arguments)
    reference = expected(doubles["x"], doubles)
    assert out.dtype == dtype and plain.error(out, reference) < bound
    dy = torch.randn_like(out)
    out.backward(dy)
    reference.backward(dy.double())
    for name, tensor in (("x", x), *layer.named_parameters()):
        assert tensor.grad is not None and plain.error(tensor.grad, doubles[name].grad) < bound, name


def rows_for(layer: MultiheadAttention, state: dict[str, Tensor]) -> list[Tensor]:
    """[Q; K; V] weight and bias of the first projection."""
    prefix = "layernorm_qkv." if layer.input_layernorm else "qkv."
    heads, groups = layer.core_attention.num_attention_heads, layer.core_attention.num_gqa_groups
    found = []
    for kind in ("weight", "bias"):
        if prefix + "query_weight" in state:
            found.append(torch.cat([state[f"{prefix}{part}_{kind}"] for part in ("query", "key", "value")]))
            continue
        pack = state[prefix + kind]
        if layer.qkv_weight_interleaved:
            each = heads // groups
            runs = pack.unflatten(0, (groups, each + 2, -1))
            query, key, value = runs[:, :each].flatten(1, 2), runs[:, each], runs[:, -1]
            pack = torch.cat([part.flatten(0, 1) for part in (query, key, value)])
        found.append(pack)
    return found


def expected_output(
    layer: MultiheadAttention,
    x: Tensor,
    state: dict[str, Tensor],
    seen: Tensor | None,
    *,
    qk_norm: str | None = None,
    base: float | None = None,
) -> Tensor:
    """x is [batch, seq, hidden], FP64."""
    core = layer.core_attention
    if layer.input_layernorm:
        norm = [state.get(f"layernorm_qkv.layer_norm_{kind}") for kind in ("weight", "bias")]
        x = plain.norm(x, *norm, rms=norm[1] is None)
    weight, bias = rows_for(layer, state)
    counts = (core.num_attention_heads, core.num_gqa_groups, core.num_gqa_groups)
    pack = (x @ weight.T + bias).unflatten(-1, (-1, core.kv_channels))
    query, key, value = pack.split(counts, dim=-2)

    def turned(x: Tensor) -> Tensor:
        return x if base is None else plain.rotated(x, base, layer.rotary_pos_interleaved)

    def normed(x: Tensor, prefix: str) -> Tensor:
        if qk_norm is None:
            return x
        if qk_norm == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        parameters = (state.get(f"{prefix}.weight"), state.get(f"{prefix}.bias"))
        return plain.norm(x, *parameters, rms=qk_norm == "RMSNorm", eps=1e-6)

    def prepared(x: Tensor, prefix: str) -> Tensor:
        return turned(normed(x, prefix)) if layer.qk_norm_before_rope else normed(turned(x), prefix)

    context = plain.attention(
        prepared(query, "q_norm"), prepared(key, "k_norm"), value, seen, core.kv_channels**-0.5
    )
    return context @ state["proj.weight"].T + state["proj.bias"]
