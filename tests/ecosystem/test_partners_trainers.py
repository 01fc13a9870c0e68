"""Trainers that wrap every model in DistributedDataParallel, given a model that FlatFSDP has sharded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatfsdp.engine.whole.units import named_groups
from tests.support.assertions import assert_raises
from tests.support.ecosystem.launched import launched
from tests.support.models import build, data
from tests.support.ranks import on_ranks

REFUSED = "DistributedDataParallel around a model that FlatFSDP has sharded"


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [library for library in libraries if find_spec(library) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}")


def _shards(model: nn.Module) -> list[Tensor]:
    return [group.master.flat.detach().clone() for _, group in named_groups(model)]


def _assert_unchanged(model: nn.Module, before: list[Tensor]) -> None:
    assert all(map(torch.equal, _shards(model), before))


@needs("accelerate")
@on_ranks(2)
def test_accelerate_prepares_all_but_the_model(rank: int, world_size: int) -> None:
    from accelerate import Accelerator

    with launched(rank, world_size):
        _accelerate(Accelerator(cpu=True))


def _accelerate(accelerator: Any) -> None:
    model = build()
    before = _shards(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert_raises(ValueError, REFUSED, accelerator.prepare, model, optimizer)
    _assert_unchanged(model, before)

    loader = DataLoader([tokens[0] for tokens in next(data(0, 1, 4))], batch_size=1)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for tokens in loader:
        accelerator.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
    assert not any(map(torch.equal, _shards(model), before))


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": torch.full((7,), index)}


class WithLoss(nn.Module):
    """A model that returns what transformers.Trainer expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(tokens)}


@needs("transformers", "accelerate")
@on_ranks(2)
def test_transformers_trainer(rank: int, world_size: int, tmp_path: Path) -> None:
    import transformers

    model = build()
    before = _shards(model)
    with launched(rank, world_size):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", save_strategy="no"
        )
        trainer = transformers.Trainer(WithLoss(model), arguments, train_dataset=Tokens())
        assert_raises(ValueError, REFUSED, trainer.train)
    _assert_unchanged(model, before)


@needs("lightning")
@on_ranks(1)
def test_lightning_trainer_with_ddp(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Any:
            return self.net(batch["tokens"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = build()
    before = _shards(model)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    assert_raises(ValueError, REFUSED, trainer.fit, Module(model), DataLoader(Tokens()))
    _assert_unchanged(model, before)
