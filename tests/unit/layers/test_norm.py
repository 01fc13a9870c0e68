from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.layers.norm import LayerNorm, RMSNorm
from tests.support import plain_layers as plain
from tests.support.plain_layers import trained

BOTH = pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])


@BOTH
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_fp32_against_float64(kind: type, eps: float, zero_centered: bool) -> None:
    layer = trained(kind(37, eps, zero_centered_gamma=zero_centered))

    def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain.norm(x, weight, bias, rms=kind is RMSNorm, eps=eps, zero_centered=zero_centered)

    plain.same_gradients(
        lambda x, *_: layer(x),
        expected,
        [plain.leaf(3, 5, 37), *layer.parameters()],
        plain.EPS[torch.float32],
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_may_be_fp32_under_autocast(kind: type, dtype: torch.dtype) -> None:
    layer, x = trained(kind(64)), plain.leaf(50, 64, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = layer(x)
    assert out.dtype == dtype
    dy = torch.randn(50, 64).to(dtype)
    out.backward(dy)
    doubles = plain.doubled({"x": x, **dict(layer.named_parameters())})
    reference = plain.norm(doubles["x"], doubles["weight"], doubles.get("bias"), rms=kind is RMSNorm)
    reference.backward(dy.double())
    assert x.grad is not None and x.grad.dtype == dtype
    assert plain.error(out, reference) < plain.EPS[dtype]
    for name, parameter in layer.named_parameters():
        # There was no rounding to 16 bits in between.
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert plain.error(parameter.grad, doubles[name].grad) < 1e-5


@BOTH
def test_16_bit_parameters_get_gradients_in_their_dtype(kind: type) -> None:
    layer = trained(kind(64, params_dtype=torch.bfloat16))
    layer(plain.leaf(20, 64, dtype=torch.bfloat16)).sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.bfloat16}


@BOTH
def test_strided_inputs_and_gradients_equal_contiguous_ones(kind: type) -> None:
    layer = trained(kind(32))
    x, dy = torch.randn(32, 6, 4).requires_grad_(), torch.randn(4, 6, 32)
    strided = layer(x.permute(2, 1, 0))
    (strided_grad,) = torch.autograd.grad(strided, x, dy.transpose(0, 1).contiguous().transpose(0, 1))
    dense = x.detach().permute(2, 1, 0).contiguous().requires_grad_()
    out = layer(dense)
    (grad,) = torch.autograd.grad(out, dense, dy)
    assert torch.equal(strided, out)
    assert torch.equal(strided_grad, grad.permute(2, 1, 0))


@BOTH
def test_several_dimensions_are_normalized_together(kind: type) -> None:
    wide, flat = trained(kind((3, 8))), kind(24)
    with torch.no_grad():
        for theirs, ours in zip(wide.parameters(), flat.parameters(), strict=True):
            ours.copy_(theirs.flatten())
    x = torch.randn(5, 3, 8)
    assert torch.equal(wide(x).flatten(1), flat(x.flatten(1)))


@BOTH
def test_frozen_parameters_get_no_gradient(kind: type) -> None:
    layer, x = kind(16).requires_grad_(False), plain.leaf(4, 16)
    layer(x).sum().backward()
    assert x.grad is not None and all(parameter.grad is None for parameter in layer.parameters())


def test_state_dicts_are_those_of_torch() -> None:
    assert LayerNorm(8).load_state_dict(nn.LayerNorm(8).state_dict())
    assert RMSNorm(8).load_state_dict(nn.RMSNorm(8).state_dict())


def test_arguments_of_transformer_engine() -> None:
    layer = LayerNorm(hidden_size=8, sequence_parallel=True, params_dtype=torch.float16)
    assert (
        layer.weight.sequence_parallel and layer.bias.sequence_parallel and layer.weight.dtype == torch.half
    )
    assert RMSNorm(8).weight.sequence_parallel is False
    for arguments in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(ValueError, match="give either normalized_shape or its alias hidden_size"):
            LayerNorm(**arguments)
    with pytest.raises(ValueError, match=r"LayerNorm: the input is \(2, 9\)"):
        layer(torch.randn(2, 9))
    for dtype in (torch.float64, torch.int64):
        with pytest.raises(ValueError, match=rf"LayerNorm: the input is {dtype}"):
            layer(torch.ones(2, 8, dtype=dtype))


def test_layers_compile_without_a_break() -> None:
    layer, x = trained(LayerNorm(16)), plain.leaf(4, 16)
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(out, layer(x))
