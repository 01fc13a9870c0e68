"""Programs that were written for Accelerate with DistributedDataParallel, and run with `FlatAccelerator`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatfsdp
import flatfsdp.optim
from flatfsdp import by_class
from flatfsdp.contract.claimed import is_unit
from tests.support.ecosystem.families import FAMILIES, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.models import VOCAB, Block, Net
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

EPOCHS, STEPS_AN_EPOCH = 2, 2
"""Five microbatches are two steps: of three, and a last one of two."""


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """With the environment that a launcher gives a rank, and no Accelerator yet."""
    from accelerate.state import AcceleratorState, GradientState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    with mock.patch.dict("os.environ", {name: str(value) for name, value in names.items()}):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def flat_accelerator(**options: Any) -> Any:
    from flatfsdp.compat.accelerate import FlatAccelerator

    return FlatAccelerator(cpu=True, policy=by_class(Block), **options)


def plain_accelerator(**options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, **options)


class Program(NamedTuple):
    """What a training script has after `prepare`."""

    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any


class Curves(NamedTuple):
    """What a run has printed, and where it has arrived."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    state: dict[str, Tensor]


def tokens() -> list[Tensor]:
    """19 sequences: 5 batches for each of 2 ranks, the last of which Accelerate fills up."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (7,), generator=generator) for _ in range(19)]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As people make them: by dimensions, of whole parameters."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def begin(
    accelerator: Any, *, seed: int = 0, optimizer: Callable[..., Any] = torch.optim.AdamW, shuffle: bool = True
) -> Program:
    torch.manual_seed(seed)
    model = Net()
    made = optimizer(groups_of(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(tokens(), batch_size=2, shuffle=shuffle, generator=torch.Generator().manual_seed(3))
    return Program(accelerator, *accelerator.prepare(model, made, loader, scheduler))


def train(program: Program, epochs: int = EPOCHS) -> Curves:
    accelerator, model, optimizer, loader, scheduler = program
    losses, norms, rates = [], [], []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates += scheduler.get_last_lr()
    return Curves(losses, norms, rates, accelerator.get_state_dict(model))


def assert_same(found: Curves, expected: Curves) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    assert found.rates == expected.rates
    assert list(found.state) == list(expected.state)
    torch.testing.assert_close(found.state, dict(expected.state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, flatfsdp.optim.AdamW], ids=["torch", "flatfsdp"])
@on_ranks(2)
def test_a_program_for_ddp(rank: int, world_size: int, optimizer: Callable[..., Any]) -> None:
    """Ranks initialise differently; groups are made by dimensions, before the model is sharded."""
    with launched(rank, world_size):
        expected = train(begin(plain_accelerator(gradient_accumulation_steps=3), seed=rank))
    with launched(rank, world_size):
        program = begin(flat_accelerator(gradient_accumulation_steps=3), seed=rank, optimizer=optimizer)
        found = train(program)
        assert is_unit(program.model)
        assert program.accelerator.unwrap_model(program.model) is program.model
    assert len(found.norms) == EPOCHS * STEPS_AN_EPOCH
    assert_same(found, expected)
