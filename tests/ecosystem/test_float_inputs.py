"""Floating-point inputs that are no activations, in programs of other libraries: they keep their values."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Precision, shard
from flatfsdp.compat.transformers import policy_of
from flatfsdp.fp8 import CurrentScaling, autocast
from flatfsdp.layers import convert
from tests.support.ecosystem.families import VOCAB, Family, needs_transformers
from tests.support.ecosystem.launched import launched, trainer_options
from tests.support.ranks import on_ranks

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")

BF16 = Precision(compute=torch.bfloat16)
BERT = Family(
    "BertForSequenceClassification",
    "BertConfig",
    "BertLayer",
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "num_labels": 1,
        "problem_type": "regression",
    },
)
LABELS = torch.tensor([1001.0, 1003.0, 1005.0, 1007.0])
LOSS = 5.0
"""Of these labels and a prediction of 1004; with labels of 8 bits it is 8."""


def bert() -> Any:
    """It predicts 1004, which bf16 has."""
    model = BERT.build()
    nn.init.zeros_(model.classifier.weight)
    nn.init.constant_(model.classifier.bias, 1004.0)
    return model


def batch() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(1, 17).view(4, 4), "labels": LABELS}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, world_size: int) -> None:
        self.count = 4 * world_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index % 4] for name, value in batch().items()}


def flat_trainer(world_size: int, folder: Path) -> float:
    import transformers

    from flatfsdp.compat.transformers.trainer import FlatTrainer

    options = trainer_options(bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    # Trainer takes a mean over tokens for granted, and multiplies it by the number of ranks.
    options |= {"max_steps": 1, "average_tokens_across_devices": False}
    args = transformers.TrainingArguments(output_dir=str(folder), **options)
    trainer = FlatTrainer(bert(), args, train_dataset=Rows(world_size))
    trainer.train()
    loss: float = trainer.state.log_history[0]["loss"]
    return loss


def flat_accelerator(_world_size: int, _folder: Path) -> float:
    from flatfsdp.compat.accelerate import FlatAccelerator

    accelerator = FlatAccelerator(cpu=True, mixed_precision="bf16")
    model = bert()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loss = model(batch()["input_ids"], labels=LABELS).loss
    accelerator.backward(loss)
    return float(loss)


def lightning_trainer(world_size: int, folder: Path) -> float:
    import lightning as L

    from flatfsdp.compat.lightning.trainer import FlatFSDPStrategy

    class Program(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = bert()

        def training_step(self, given: dict[str, Tensor], _index: int) -> Tensor:
            # The labels are this step's argument, and the model's.
            predicted = self.model(given["input_ids"]).logits.squeeze(-1)
            own = nn.functional.mse_loss(predicted, given["labels"])
            self.losses = [float(own), float(self.model(**given).loss)]
            return own

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Program()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    strategy = FlatFSDPStrategy(policy_of(module.model), precision=BF16)
    run = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        default_root_dir=folder,
        max_steps=1,
        enable_checkpointing=False,
        **quiet,
    )
    run.fit(module, torch.utils.data.DataLoader(Rows(world_size), batch_size=4))
    assert module.losses[0] == module.losses[1]
    return module.losses[0]


def fabric(world_size: int, _folder: Path) -> float:
    from flatfsdp.compat.lightning import Fabric, FlatFSDPStrategy

    started = Fabric(accelerator="cpu", devices=world_size, strategy=FlatFSDPStrategy())
    started.launch()
    model = bert()
    model = shard(model, policy_of(model), precision=BF16)
    model, _ = started.setup(model, torch.optim.AdamW(model.parameters()))
    loss = model(**batch()).loss
    started.backward(loss)
    return float(loss)


def plain(_world_size: int, _folder: Path) -> float:
    model = bert()
    loss = shard(model, policy_of(model), precision=BF16)(**batch()).loss
    loss.backward()
    return float(loss)


@pytest.mark.parametrize(
    "program",
    [
        plain,
        pytest.param(flat_trainer, marks=needs_accelerate),
        pytest.param(flat_accelerator, marks=needs_accelerate),
        pytest.param(lightning_trainer, marks=needs_lightning),
        pytest.param(fabric, marks=needs_lightning),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
@needs_transformers
@on_ranks()
def test_labels_of_a_regression_are_not_rounded(
    rank: int, world_size: int, tmp_path: Path, program: Callable[[int, Path], float]
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    with launched(rank, world_size):
        assert program(world_size, tmp_path) == LOSS


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "FP8"])
@needs_lightning
@on_ranks(2)
def test_lightnings_transformer_trains_as_written(rank: int, fp8: bool) -> None:
    """Its positional encoding is a plain FP32 tensor, and so are its masks."""
    from lightning.pytorch.demos import Transformer

    torch.manual_seed(0)
    model: Any = Transformer(vocab_size=VOCAB, ninp=32, nhead=2, nhid=48, nlayers=2, dropout=0.0)
    if fp8:
        # PyTorch's attention reads its output projection's weight itself.
        convert(model, filter=lambda _, name: "self_attn" not in name and "multihead" not in name)
    precision = Precision(compute=torch.bfloat16, fp8_weights=CurrentScaling() if fp8 else None)

    def is_layer(_name: str, module: nn.Module, _numel: int) -> bool:
        return isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))

    model = shard(model, is_layer, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCAB, (2, 17), generator=generator)
    losses = []
    for _ in range(3):
        with autocast(fp8, recipe=CurrentScaling()):
            output = model(tokens[:, :-1], tokens[:, 1:])
            loss = nn.functional.nll_loss(output, tokens[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
