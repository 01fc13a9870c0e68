"""Forms in which tests save and load model and optimizer, and whether two states are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfsdp import FlatFSDP, checkpoint
from tests.dist.models import data

FORMS = ["full", "rank 0", "sharded"]


def step(model: FlatFSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The same batch on all ranks, so that the result does not depend on their number."""
    ((tokens,),) = data(seed, 1, 1)
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def load_form(
    form: str, folder: str, model: FlatFSDP, optimizer: torch.optim.Optimizer, rank: int
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


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b
