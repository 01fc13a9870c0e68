"""Models whose units leave a penalty of their weights on themselves, or elsewhere, for a loss outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp import microbatches
from tests.support.models import whole_grads

OUTSIDE: list[Tensor] = []
"""A list that no module has."""

PLACES = ["attribute", "list", "nested", "buffer", "inner module", "outer list", "accumulated"]


class Gated(nn.Module):
    """A layer that leaves a penalty of its gate somewhere."""

    def __init__(self, place: str, losses: list[Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 4)
        self.place = place
        self.aux: Any = None
        self.losses = losses if place == "outer list" else []
        self.nested: dict[str, Any] = {}
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).tanh() * self.gate(x)
        # After y: a backward comes to it first, before that of y has gathered the unit.
        weight = self.gate.weight
        penalty = weight.square().mean() + (weight @ weight.t()).square().mean()
        match self.place:
            case "attribute":
                self.aux = penalty
            case "list" | "outer list":
                self.losses.append(penalty)
            case "nested":
                self.nested["penalty"] = (1, [penalty])
            case "buffer":
                self.kept = penalty
            case "inner module":
                self.gate.penalty = penalty
            case "accumulated":
                self.aux = penalty + (0.0 if self.aux is None else self.aux)
            case "outside":
                OUTSIDE.append(penalty)
        return y

    def take(self) -> list[Tensor]:
        """The penalties of this forward; the module has none afterwards."""
        match self.place:
            case "attribute" | "accumulated":
                found, self.aux = [self.aux], None
            case "list" | "outer list":
                found = list(self.losses)
                self.losses.clear()
            case "nested":
                found = self.nested["penalty"][1]
            case "buffer":
                found = [self.kept]
            case "inner module":
                found = [self.gate.penalty]
            case _:
                found = list(OUTSIDE)
                OUTSIDE.clear()
        return found


class Model(nn.Module):
    def __init__(self, place: str, uses: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[Tensor] = []
        self.blocks = nn.ModuleList(Gated(place, self.losses) for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            for _ in range(self.uses):
                x = block(x)
        return self.head(x).mean()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    blocks = [module for module in model.modules() if isinstance(module, Gated)]
    loss = model(x)
    return loss + sum(penalty for block in blocks for penalty in block.take())


def inputs(count: int, device: str = "cpu") -> list[Tensor]:
    return list(torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(1)).to(device))


def check(plain: Model, model: Any, batches: list[Tensor]) -> None:
    """Compares losses and summed gradients of one step; ranks have the same batches."""
    expected = [loss_of(plain, x) for x in batches]
    for loss in expected:
        loss.backward()
    found = []
    for x in microbatches(model, batches):
        found.append(loss_of(model, x))
        found[-1].backward()
    assert torch.equal(torch.stack(found), torch.stack(expected))
    grads = whole_grads(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
