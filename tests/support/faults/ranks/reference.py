"""The losses that plain data parallel has, where ranks do what their programs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.support.faults.ranks.program import (
    LEARNING_RATE,
    Microbatch,
    Operation,
    OwnError,
    Setup,
    Step,
    build,
    loss_of,
)


def reference(setup: Setup, programs: Sequence[list[Operation]]) -> list[list[float]]:
    """The losses of each rank, up to the last step that all ranks take."""
    net = build(setup)
    parameters = [p for p in net.parameters() if p.requires_grad]
    losses: list[list[float]] = [[] for _ in programs]
    for parts in zip(*map(_steps, programs), strict=False):
        total = [torch.zeros_like(p) for p in parameters]
        for rank, part in enumerate(parts):
            own = [torch.zeros_like(p) for p in parameters]
            for microbatch in part:
                try:
                    loss = loss_of(net, setup, rank, microbatch)
                    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                except OwnError:
                    # The engine drops what a failed step has accumulated.
                    own = [torch.zeros_like(p) for p in parameters]
                    continue
                losses[rank].append(loss.item())
                _add(own, grads)
            _add(total, own)
        with torch.no_grad():
            for parameter, grad in zip(parameters, total, strict=True):
                parameter -= LEARNING_RATE * grad / len(programs)
    return losses


def _steps(program: list[Operation]) -> Iterator[list[Microbatch]]:
    """The microbatches of each step that reduces gradients: one in which the model is used."""
    part: list[Microbatch] = []
    for operation in program:
        if isinstance(operation, Microbatch):
            part.append(operation)
        elif isinstance(operation, Step) and any(microbatch.is_used for microbatch in part):
            yield part
            part = []


def _add(total: list[Tensor], grads: Sequence[Tensor | None]) -> None:
    for each, grad in zip(total, grads, strict=True):
        if grad is not None:
            each += grad
