"""Every Python block of the README runs as it is written, with small sizes in place of the large ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import flatfsdp
from flatfsdp.fp8 import DelayedScaling
from flatfsdp.layers import Embedding, LinearCrossEntropy, TransformerLayer
from flatfsdp.models import PRESETS
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from flatfsdp.models.text import Sampler, load_corpus
from tests.support.ranks import run_ranks

README = Path(__file__).parents[3] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
LARGE = {"4096, 16384, 32": "32, 64, 4"}


def block_with(text: str) -> str:
    """The one that contains `text`, smaller."""
    (block,) = (block for block in BLOCKS if text in block)
    for large, small in LARGE.items():
        block = block.replace(large, small)
    return block


def run(block: str, **names: Any) -> dict[str, Any]:
    """What the block has defined, which sees what the package exports and `names`."""
    scope = {**vars(flatfsdp), "torch": torch, **names}
    exec(compile(block, str(README), "exec"), scope)
    return scope


class FP8GPT(nn.Module):
    """Of layers that can compute in FP8; gives the mean loss of (tokens, targets), sequence first."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocab, 32)
        self.layers = nn.ModuleList(TransformerLayer(32, 64, 4, fuse_qkv_params=True) for _ in range(2))
        self.head = LinearCrossEntropy(32, vocab)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x, targets)
        return loss


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, 64, shape)


CONFIG = GPTConfig(vocab=64, layers=2, hidden=32, heads=4, seq=16)


def test_there_are_no_blocks_that_are_not_run() -> None:
    assert len(BLOCKS) == 5


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(named) > 30
    assert [name for name in named if not (README.parent / name).exists()] == []


def test_the_first_block() -> None:
    batches = [(tokens_of(2, 16), tokens_of(2, 16)) for _ in range(3)]
    found = run(BLOCKS[0], GPT=GPT, Block=Block, config=CONFIG, batches=batches)
    assert all(parameter.grad is not None for parameter in found["model"].parameters())


def test_20_lines() -> None:
    text = Sampler(load_corpus(None), batch=4, seq=16, seed=0)
    config = GPTConfig(layers=2, hidden=32, heads=4, seq=16)
    names = {"GPT": GPT, "Block": Block, "config": config, "text": text}
    found = run(block_with("for step in range(20)"), **names, rank=0, device=torch.device("cpu"))
    assert set(found["state"]) == set(GPT(config).state_dict())


def test_fp8_layers() -> None:
    batches = [(torch.randn(16, 2, 32), torch.randn(16, 2, 32)) for _ in range(3)]
    found = run(block_with("TransformerLayer(4096"), batches=batches)
    assert found["model"].microbatch.is_last
    assert all(parameter.grad is not None for parameter in found["model"].parameters())


def test_fp8_weights(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [(tokens_of(16, 2), tokens_of(16, 2)) for _ in range(3)]
    run(
        block_with("fp8_weights=CurrentScaling()"),
        GPT=FP8GPT,
        TransformerLayer=TransformerLayer,
        config=64,
        batches=batches,
    )
    assert "fp8" in capsys.readouterr().out.lower()


def parallel(rank: int, world_size: int, block: str) -> list[float]:
    large, PRESETS["8b"] = PRESETS["8b"], PRESETS["tiny"]
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, PRESETS["tiny"].vocab, (2, 8, 16))
    try:
        found = run(
            block,
            Schedule1F1B=Schedule1F1B,
            DelayedScaling=DelayedScaling,
            tokens=tokens,
            targets=targets,
        )
    finally:
        PRESETS["8b"] = large
    return [float(parameter.grad.norm()) for parameter in found["model"].parameters()]


def test_parallel() -> None:
    norms = run_ranks(4, parallel, block_with("make_mesh(pp=2, tp=2)"))
    assert all(0 < norm < float("inf") for of_rank in norms for norm in of_rank)
