"""`examples/engine.py`, which explains the engine in 300 lines, has the bits of the engine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import Precision, by_class, microbatches, shard
from tests.support.models import update
from tests.support.programs import run_program
from tests.support.ranks import on_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "engine.py"
STEPS, MICROBATCHES, VOCABULARY, WIDTH = 5, 3, 37, 20

Trained = tuple[list[Tensor], dict[str, Tensor]]
"""Losses of all microbatches, and whole parameters by name."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.rare = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y * self.rare if uses_all else y)


class Net(nn.Module):
    """The embedding is the head's weight; one parameter of each layer is used in a few microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, int(tokens[number]) % 3 == 0)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def steps() -> Iterator[Tensor]:
    """Microbatches of each step, of this rank; every parameter is used somewhere in each of them."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (MICROBATCHES, 40), generator=generator)
        if dist.get_rank() == 0:
            tokens[1, :3] = 0
        yield tokens


def run(model: nn.Module, batches: Iterable[Tensor]) -> list[Tensor]:
    losses = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens).float(), (5 * tokens + 2) % VOCABULARY)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_in_300_lines", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_example(compute: torch.dtype, option: bool) -> Trained:
    model = build()
    names = [name for name, _ in model.named_parameters()]
    engine = example().Engine(model, *model.layers, compute=compute, optimize_backward_concat=option)
    optimizer = torch.optim.AdamW(engine.shards, lr=1e-2)
    losses = []
    for tokens in steps():
        losses += run(model, engine.microbatches(tokens))
        update(optimizer)
    prefixes = ["", *(f"layers.{number}." for number in range(len(model.layers)))]
    whole: dict[str, Tensor] = {}
    for prefix, unit in zip(prefixes, engine.units, strict=True):
        shards = [torch.empty_like(unit.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, unit.shard.detach())
        own = [name for name in names if name.startswith(prefix or ("embedding", "head"))]
        whole |= zip(own, unit.slots(torch.cat(shards)), strict=False)
    assert list(whole) == sorted(names, key=lambda name: name.startswith("layers"))
    return losses, whole


def train_engine(compute: torch.dtype, option: bool) -> Trained:
    model = shard(
        build(), by_class(Layer), optimize_backward_concat=option, precision=Precision(compute=compute)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in steps():
        losses += run(model, microbatches(model, tokens))
        update(optimizer)
    return losses, model.state_dict()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", [False, True])
@on_ranks(1, 2)
def test_has_the_bits_of_the_engine(option: bool, compute: torch.dtype) -> None:
    losses, parameters = train_example(compute, option)
    engine_losses, engine_parameters = train_engine(compute, option)
    assert len(losses) == STEPS * MICROBATCHES
    assert all(map(torch.equal, losses, engine_losses))
    for name, parameter in parameters.items():
        assert torch.equal(parameter, engine_parameters[name]), name
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("ranks", [0, 1])
def test_counts_concatenations(ranks: int) -> None:
    done = run_program(EXAMPLE, ranks=ranks, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    off, on, verdict = done.stdout.splitlines()
    assert off.replace("off", "on").replace(" 400 ", " 0 ") == on
    assert float(on.split()[5].rstrip(",")) < 0.2 * float(on.split()[3])
    assert verdict == "All losses and parameters are equal bit for bit."


def test_is_300_lines_of_plain_pytorch() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(
        r"^\s*(from|import) (?!torch\b|__future__|collections|functools|os|sys|typing)", text, re.M
    )
