"""A small Llama: as a pipeline with any number of ranks a dimension, and in one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp import Debug
from flatfsdp.models import Llama, LlamaConfig, LlamaPipeline
from flatfsdp.models.pipeline import ScheduleName
from flatfsdp.parallel import ParallelMesh, make_mesh
from tests.support.models import update, whole_grads
from tests.support.ranks import cached_in_file

CONFIG = LlamaConfig(4, 64, 96, heads=4, kv_heads=2, vocab=48, seq=16)
MICROBATCHES, BATCH, STEPS = 4, 2, 2


@cached_in_file
def mesh_of(pp: int, tp: int) -> ParallelMesh:
    return make_mesh(pp=pp, tp=tp)


class Trace(NamedTuple):
    """Losses where the last stage is; gradients of all steps, and the parameters at the end, as shards; whole
    gradients of the first step by name."""

    losses: list[Tensor]
    grads: list[Tensor]
    parameters: list[Tensor]
    first_grads: dict[str, Tensor]


class SmallPipeline(LlamaPipeline):
    """Its microbatches are those of `samples`.

    Args:
        options: of `LlamaPipeline`.
    """

    def __init__(
        self, schedule: ScheduleName, mesh: ParallelMesh, config: LlamaConfig = CONFIG, **options: Any
    ) -> None:
        self.device = mesh.device_mesh.device_type
        fixed: dict[str, Any] = {"microbatches": MICROBATCHES, "batch": BATCH, "device": self.device}
        super().__init__(config, mesh, schedule, **fixed, debug=Debug(poison_on_free=True), **options)

    def train(self) -> Trace:
        """A few steps of SGD, in which small errors stay small."""
        flats = list(self.parameters())
        optimizer = torch.optim.SGD(flats, lr=0.3)
        trace = Trace([], [], [], {})
        for sample in samples(self.mesh.dp_rank, self.config):
            trace.losses.extend(self.forward_backward(microbatches_of(sample, self.device)))
            trace.grads.extend(p.grad.clone() for p in flats if p.grad is not None)
            if not trace.first_grads:
                for stage in self.stages:
                    trace.first_grads.update(whole_grads(stage))
            update(optimizer)
        trace.parameters.extend(p.detach().clone() for p in flats)
        return trace


def samples(replica: int, config: LlamaConfig = CONFIG) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each step, [batch, seq]."""
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (2, BATCH * MICROBATCHES, config.seq)
    return [tuple(torch.randint(0, config.vocab, shape, generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def microbatches_of(sample: tuple[Tensor, Tensor], device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    tokens, targets = (whole.to(device).chunk(MICROBATCHES) for whole in sample)
    return list(zip(tokens, targets, strict=True))


def in_one_process(
    replica: int, replicas: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of one replica in all steps, and the gradients of the first, by name."""
    model = Llama(CONFIG, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses: list[Tensor] = []
    first: dict[str, Tensor] = {}
    for batches in zip(*(samples(r) for r in range(replicas)), strict=True):
        for owner, batch in enumerate(batches):
            for tokens, targets in microbatches_of(batch, device):
                loss = model(tokens, targets)
                (loss / MICROBATCHES / replicas).backward()
                if owner == replica:
                    losses.append(loss.detach())
        if not first:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        update(optimizer)
    return losses, first
