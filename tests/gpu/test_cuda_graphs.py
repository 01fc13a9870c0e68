"""A microbatch of a layer captured in a CUDA graph: replays equal eager calls bit for bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling, Recipe, autocast
from flatfsdp.layers import TransformerLayer
from tests.support.gpu.marks import FP8_GEMMS

pytestmark = FP8_GEMMS
HIDDEN, FFN, HEADS, SEQ, BATCH = 512, 1024, 4, 128, 4


class Microbatch:
    """Forward and backward of one layer, whose GEMMs add gradients to FP32 `main_grad`s."""

    def __init__(self, recipe: Recipe | None) -> None:
        torch.manual_seed(0)
        self.layer = TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            fuse_qkv_params=True,
            fuse_wgrad_accumulation=True,
            device="cuda",
        )
        for parameter in self.layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        self._recipe = recipe

    def run(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """The output, and the gradients that autograd returns: of the input, norms and biases."""
        leaves = [x, *self.layer.parameters()]
        for leaf in leaves:
            leaf.grad = None
        region: AbstractContextManager[None] = (
            autocast(recipe=self._recipe) if self._recipe else nullcontext()
        )
        with region:
            y = self.layer(x)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def main_grads(self) -> list[Tensor]:
        return [parameter.main_grad for parameter in self.layer.parameters()]


def inputs() -> tuple[Tensor, Tensor]:
    x, dy = (torch.randn(SEQ, BATCH, HIDDEN, device="cuda").bfloat16() for _ in range(2))
    return x.requires_grad_(), dy


@pytest.mark.parametrize("recipe", [None, CurrentScaling(), BlockScaling()], ids=["bf16", "current", "block"])
def test_replays_equal_eager_calls(recipe: Recipe | None) -> None:
    microbatch = Microbatch(recipe)
    x, dy = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            microbatch.run(x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = microbatch.run(x, dy)

    for _ in range(2):
        new_x, new_dy = inputs()
        reset(microbatch.main_grads(), 0.0)
        expected = [t.clone() for t in (*microbatch.run(new_x, new_dy), *microbatch.main_grads())]
        with torch.no_grad():
            x.copy_(new_x)
            dy.copy_(new_dy)
        reset(microbatch.main_grads(), 0.0)
        reset(outputs, torch.nan)
        graph.replay()
        assert all(t.isfinite().all() for t in expected) and all(t.any() for t in expected[:2])
        assert all(map(torch.equal, [*outputs, *microbatch.main_grads()], expected))


def reset(tensors: list[Tensor], value: float) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def test_delayed_scaling_refuses_to_be_captured() -> None:
    microbatch = Microbatch(DelayedScaling())
    x, dy = inputs()
    microbatch.run(x, dy)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"CUDA graph.*CurrentScaling"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        microbatch.run(x, dy)
    # Nothing is left behind: the next eager step runs.
    assert all(t.isfinite().all() for t in microbatch.run(x, dy))
