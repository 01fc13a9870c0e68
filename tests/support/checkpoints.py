"""A model to save, forms in which tests save and load it with its optimizer, and whether two states are the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flatfsdp
from flatfsdp import checkpoint
from flatfsdp.checkpoint.owner import FILE
from flatfsdp.checkpoint.store import StorePath
from tests.support.models import Block, data, update

FORMS = ["full", "rank 0", "sharded"]


class Model(nn.Module):
    """Tied and frozen parameters, one without dimensions, a 3-D one, a buffer; odd sizes throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.head = nn.Linear(20, 30)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.count += 1
        x = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale * self.cube.square().mean()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def build(seed: int, flag: bool = True, **options: Any) -> Any:
    torch.manual_seed(seed)
    return flatfsdp.shard(Model(), flatfsdp.by_class(Block), optimize_backward_concat=flag, **options)


def adamw(model: Any, grouped: bool) -> torch.optim.Optimizer:
    """Grouped: no weight decay for what has fewer than two dimensions, another rate for one matrix."""
    groups: Any = model.parameters()
    if grouped:
        groups = flatfsdp.param_groups(
            model,
            [
                {"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0},
                {"params": ["blocks.1.up.weight"], "lr": 3e-2},
            ],
        )
    return torch.optim.AdamW(groups, lr=1e-2)


def full_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": checkpoint.full_state_dict(model),
        "optimizer": checkpoint.full_optimizer_state_dict(model, optimizer),
    }


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The same batch on all ranks, so that the result does not depend on their number."""
    ((tokens,),) = data(seed, 1, 1)
    model(tokens).backward()
    update(optimizer)


def trained(
    steps: int, seed: int = 0, grouped: bool = False, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer after this many steps, with the seeds 0, 1, ..."""
    model = build(seed, **options)
    optimizer = adamw(model, grouped)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def load_form(
    form: str, folder: str, model: Any, optimizer: torch.optim.Optimizer, rank: int
) -> dict[str, Any]:
    """Loads one of `FORMS` that was saved to the folder; returns all that was saved.

    "rank 0" is the full form that only the first rank has.
    """
    saved = torch.load(f"{folder}/full.pt")
    if form == "sharded":
        checkpoint.load(f"{folder}/sharded", model, optimizer)
        return saved
    from_rank0 = form == "rank 0"
    state = saved if rank == 0 or not from_rank0 else {"model": {}, "optimizer": {}}
    checkpoint.load_full_state_dict(model, state["model"], from_rank0=from_rank0)
    checkpoint.load_full_optimizer_state_dict(model, optimizer, state["optimizer"], from_rank0=from_rank0)
    return saved


def names_in(folder: Path | StorePath) -> list[str]:
    """What is in a run's folder, sorted, beside the file that says whose the folder is."""
    return sorted({path.name for path in folder.iterdir()} - {FILE})


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b
