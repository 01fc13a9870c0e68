"""`checkpoint_wrapper` changes memory and nothing else."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp.compat.fairscale import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from tests.support.copies import by_pickle


class Layer(nn.Module):
    """Dropout, BatchNorm, nested and keyword arguments, an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.phases: list[str] = []

    def forward(self, x: Tensor, *, more: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        self.phases.append("first" if is_checkpointing() else "again" if is_recomputing() else "plain")
        hidden = self.drop(self.norm(self.linear(x + more["y"][0])))
        return {"out": (hidden.relu() * hidden).sin() * scale, "scale": scale}


def run(layer: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Outputs, gradients, statistics, and a random number drawn afterwards."""
    torch.manual_seed(1)
    x, y = (t.clone().requires_grad_() for t in (x, y))
    outputs = layer(x, more={"y": [y]}, scale=3.0)
    assert outputs["scale"] == 3.0
    outputs["out"].square().sum().backward()
    grads = [p.grad for p in layer.parameters()]
    assert all(g is not None for g in [*grads, x.grad, y.grad])
    return [outputs["out"], x.grad, y.grad, *grads, *layer.buffers(), torch.rand(3)]  # type: ignore[list-item]


@pytest.mark.parametrize("offload", [False, True], ids=["kept", "offloaded"])
def test_same_outputs_gradients_statistics_and_random_numbers(offload: bool) -> None:
    plain = Layer()
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu=offload)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for expected, found in zip(run(plain, x, y), run(checkpointed, x, y), strict=True):
        assert torch.equal(expected, found)
    assert plain.phases == ["plain"]
    assert checkpointed.phases == ["first", "again"]


def test_a_batchnorm_can_ask_to_count_the_recomputation_too() -> None:
    layer = Layer()
    layer.norm.disable_patch_batchnorm = True  # type: ignore[assignment]
    run(checkpoint_wrapper(layer), torch.randn(6, 4), torch.randn(6, 4))
    assert layer.norm.num_batches_tracked == 2


def test_the_module_itself_is_returned_and_keeps_its_keys() -> None:
    layer = Layer()
    keys = list(layer.state_dict())
    assert checkpoint_wrapper(layer) is layer
    assert list(layer.state_dict()) == keys


def test_activations_are_not_kept() -> None:
    """Between forward and backward, only the input of the checkpoint is alive."""
    seen: list[weakref.ref[Tensor]] = []

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x.exp()
            seen.append(weakref.ref(hidden))
            return hidden.sin()

    x = torch.randn(3, requires_grad=True)
    kept, dropped = Recorder(), checkpoint_wrapper(Recorder())
    outputs = [kept(x), dropped(x)]
    assert seen[1]() is None
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in outputs))


def test_what_is_offloaded_is_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def save_on_cpu(pin_memory: bool) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", save_on_cpu)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    checkpoint_wrapper(Layer(), offload_to_cpu=True)(x, more={"y": [y]})
    # Older versions of checkpoint save an empty tensor as well.
    inputs = [tensor for tensor in packed if tensor.numel()]
    assert len(inputs) == 2
    assert torch.equal(inputs[0], x)
    assert torch.equal(inputs[1], y)


def test_nothing_is_recomputed_without_grad_or_when_disabled() -> None:
    layer = checkpoint_wrapper(Layer())
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with torch.no_grad():
        layer(x, more={"y": [y]})
    with disable_checkpointing():
        layer(x, more={"y": [y]})["out"].sum().backward()
    assert layer.phases == ["plain", "plain"]
    assert not is_checkpointing() and not is_recomputing()


def test_statistics_survive_a_failing_recomputation() -> None:
    def fail(*_: Any) -> None:
        if is_recomputing():
            raise RuntimeError("boom")

    layer = checkpoint_wrapper(Layer())
    layer.drop.register_forward_hook(fail)
    outputs = layer(torch.randn(6, 4), more={"y": [torch.randn(6, 4)]})
    mean = layer.norm.running_mean.clone()
    with pytest.raises(RuntimeError, match="boom"):
        outputs["out"].sum().backward()
    assert torch.equal(layer.norm.running_mean, mean)
    assert not is_recomputing()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_checkpoints_its_own_parameters(duplicate: Any) -> None:
    layer = checkpoint_wrapper(Layer())
    other = duplicate(layer)
    with torch.no_grad():
        other.linear.weight.zero_()
        other.linear.bias.zero_()
    out = other(torch.randn(6, 4), more={"y": [torch.randn(6, 4)]})["out"]
    assert torch.equal(out, torch.zeros_like(out))
    assert other.phases == ["first"]


def test_the_module_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        layer = checkpoint_wrapper(Layer())
        reference = weakref.ref(layer)
        del layer
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_inputs_leave_the_device() -> None:
    grads, in_use = [], []
    weight = torch.randn(256, 256, device="cuda")
    for offload in (False, True):
        layer = nn.Linear(256, 256, bias=False, device="cuda")
        layer.weight.data.copy_(weight)
        x = torch.ones(4096, 256, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        loss = checkpoint_wrapper(layer, offload)(x.cos()).sum()
        torch.cuda.synchronize()
        in_use.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        grads.append([x.grad, layer.weight.grad])
    assert in_use[1] <= in_use[0] - x.numel() * x.element_size()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
