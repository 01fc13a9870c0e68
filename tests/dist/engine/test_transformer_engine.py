"""Layers that compare dtypes as Transformer Engine's do compute in a model that is sharded in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import Precision, by_class, shard
from tests.support.extra_state import ScaledLinear, transformer_engine
from tests.support.ranks import on_ranks

SIZE = 16
BF16 = Precision(compute=torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Inside a module of somebody else's, which is the unit.
        self.layers = nn.ModuleList(nn.Sequential(ScaledLinear(SIZE), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@on_ranks(2)
def test_dtypes_are_those_that_layers_compute_with() -> None:
    x = torch.randn(4, SIZE)
    with transformer_engine():
        model: Any = shard(Net(), by_class(nn.Sequential), precision=BF16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        model(x).backward()
        layer = model.layers[0][0]
        assert layer.activation_dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"computes with weight in torch\.bfloat16; pass Precision"):
            layer.set_activation_dtype(x)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(layer)
