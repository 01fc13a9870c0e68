"""Trainings whose microbatches may be replayed, and what may happen between their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, by_class, microbatches, replayed
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.optim import AdamW
from tests.support.both_forms import sharded
from tests.support.fp8_layers import SHORT, TOKENS, WIDTH, Block, Stack, seeded

STEPS = 6


class Plain(nn.Module):
    """A block of PyTorch's layers, with dropout and small gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def net() -> nn.Module:
    return nn.Sequential(Plain(), Plain(), nn.Linear(WIDTH, WIDTH))


class Case(NamedTuple):
    """A model, how it is sharded, and the microbatches of its steps."""

    name: str
    reshard: bool
    count: int
    recipe: Any = None
    stores: bool = False
    way: str = "wrapped"

    def model(self, device: str = "cpu") -> Any:
        module = seeded(net if self.recipe is None else Stack).to(device)
        precision = Precision(
            compute=torch.float32
            if self.stores
            else torch.bfloat16
            if self.recipe is None
            else torch.float32,
            fp8_weights=CurrentScaling() if self.stores else None,
        )
        return sharded(
            self.way,
            module,
            by_class(Plain, Block),
            precision=precision,
            reshard_after_forward=self.reshard,
            optimize_backward_concat=True,
        )

    def microbatch(self, model: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with autocast(self.recipe is not None, recipe=self.recipe):
                loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        return run


CASES = [
    *(Case(f"bf16 {reshard} {count}", reshard, count) for reshard in (True, False) for count in (1, 2, 4)),
    Case("in place", True, 3, way="in place"),
    *(Case(f"delayed {reshard}", reshard, 3, SHORT) for reshard in (True, False)),
    Case("current", True, 3, CurrentScaling()),
    *(
        Case(f"stored {reshard}", reshard, count, SHORT, stores=True)
        for reshard, count in ((True, 1), (False, 3))
    ),
]
Between = Callable[[int, Any, Any], None]


def batch(rank: int, step: int, index: int, tokens: int = TOKENS, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + index)
    return torch.randn(tokens, WIDTH, generator=generator).to(device)


def trained(
    case: Case,
    rank: int,
    replays: bool,
    between: Between | None = None,
    steps: int = STEPS,
    device: str = "cpu",
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses and gradients of all steps, then parameters and moments; and the function that was called."""
    torch.manual_seed(rank)
    model = case.model(device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = case.microbatch(model)
    step = replayed(model, run) if replays else run
    found, grads = [], []
    for index in range(steps):
        for x in microbatches(model, [batch(rank, index, m, device=device) for m in range(case.count)]):
            found.append(step(x))
        grads += [plain(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(index, model, optimizer)
    state = [
        value for of_one in optimizer.state.values() for value in of_one.values() if torch.is_tensor(value)
    ]
    return found, [*grads, *(p.detach().clone() for p in model.parameters()), *state], step


def device_of(model: Any) -> str:
    return str(next(model.parameters()).device)


def evaluation(index: int, model: Any, _optimizer: Any) -> None:
    if index == 4:
        with torch.no_grad():
            model(batch(0, 0, 0, device=device_of(model)))


def load(index: int, model: Any, _optimizer: Any) -> None:
    if index == 4:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write(index: int, model: Any, _optimizer: Any) -> None:
    if index == 4:
        with model.summon_full_params(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def failure(index: int, model: Any, _optimizer: Any) -> None:
    if index == 4:
        with pytest.raises(ZeroDivisionError):
            model(batch(0, 0, 0, device=device_of(model))).sum() / (1 // 0)


def eval_mode(index: int, model: Any, _optimizer: Any) -> None:
    model.train(index not in (3, 4))


def frozen(index: int, model: Any, _optimizer: Any) -> None:
    first = next(each for each in model.modules() if hasattr(each, "fsdp_state") and each is not model)
    first.requires_grad_(index != 4)


def other_rate(index: int, _model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + index)


EVENTS = {each.__name__: each for each in (evaluation, load, write, failure, eval_mode, frozen, other_rate)}
