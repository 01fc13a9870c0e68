"""This rank's stages of a small Llama under a schedule, sharded, with any number of ranks a dimension."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import Llama, LlamaConfig, stage_layers
from flatfsdp.parallel import FlatStage, ParallelMesh, make_mesh
from flatfsdp.walk import units_in

CONFIG = LlamaConfig(4, 64, 96, heads=4, kv_heads=2, vocab=48, seq=16)
MICROBATCHES, STEPS = 4, 2


@lru_cache
def mesh_of(pp: int, tp: int) -> ParallelMesh:
    return make_mesh(pp=pp, tp=tp)


class Trace(NamedTuple):
    """Losses where the last stage is; gradients of all steps, and the parameters at the end, as shards; whole
    gradients of the first step by name."""

    losses: list[Tensor]
    grads: list[Tensor]
    parameters: list[Tensor]
    first_grads: dict[str, Tensor]


class LlamaPipeline:
    """This rank's stages: two under an interleaved schedule, else one.

    Args:
        options: of `Llama`.
        knows_shapes: the schedule need not run the model to find out what stages exchange.
        fsdp: of FlatFSDP.
    """

    def __init__(
        self,
        schedule: type,
        mesh: ParallelMesh,
        options: dict[str, Any],
        config: LlamaConfig = CONFIG,
        knows_shapes: bool = False,
        **fsdp: Any,
    ) -> None:
        self.mesh, self.config, self.options = mesh, config, options
        self.device = mesh.device_mesh.device_type
        self.dtype = fsdp.get("precision", Precision()).compute
        is_multi = schedule is ScheduleInterleaved1F1B
        total = mesh.pp_size * (2 if is_multi else 1)
        split = stage_layers(config.layers, total)
        self.indices = range(mesh.pp_rank, total, mesh.pp_size)
        self.ranges = [split[index] for index in self.indices]
        parts = [self.part(layers, self.device) for layers in self.ranges]
        fsdp = {"mesh": mesh.dp, "poison_on_free": True, **fsdp}
        if mesh.tp_size > 1:
            fsdp["tp_group"] = mesh.tp_group
        self.models: list[FlatFSDP] = [auto_wrap(part, by_class(TransformerLayer), **fsdp) for part in parts]
        stages: Any = [
            FlatStage(
                model,
                index,
                total,
                group=mesh.pp_group,
                **(self._shapes(parts[0], index, total) if knows_shapes else {}),
            )
            for index, model in zip(self.indices, self.models, strict=True)
        ]
        self.is_first, self.is_last = 0 in self.indices, total - 1 in self.indices
        self.schedule: Any = schedule(stages if is_multi else stages[0], MICROBATCHES, loss_fn=parts[-1].loss)

    def _shapes(self, part: Llama, index: int, total: int) -> dict[str, Tensor]:
        """Of one microbatch."""
        config, tp = self.config, self.mesh.tp_size
        seq = config.seq // (tp if part.parallel.sequence_parallel else 1)
        between = torch.empty(seq, 2, config.hidden, dtype=self.dtype)
        tokens = torch.empty(2, config.seq, dtype=torch.int64)
        logits = torch.empty(config.seq, 2, config.vocab // tp, dtype=self.dtype)
        return {
            "input_args": tokens if index == 0 else between,
            "output_args": logits if index == total - 1 else between,
        }

    def part(self, layers: range, device: str) -> Llama:
        groups = {"tp_group": self.mesh.tp_group, "amax_group": self.mesh.stage_group}
        return Llama(self.config, layers, device=device, **{**groups, **self.options})

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Losses of the microbatches, on the ranks that have the last stage."""
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if self.is_first else []),
            target=targets if self.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]

    def train(self) -> Trace:
        """A few steps of SGD, in which small errors stay small."""
        flats = [p for model in self.models for p in model.parameters()]
        optimizer = torch.optim.SGD(flats, lr=0.3)
        trace = Trace([], [], [], {})
        for tokens, targets in samples(self.mesh.dp_rank, self.config):
            trace.losses.extend(self.step(tokens.to(self.device), targets.to(self.device)))
            trace.grads.extend(p.grad.clone() for p in flats if p.grad is not None)
            if not trace.first_grads:
                trace.first_grads.update(self.named_grads())
            optimizer.step()
            optimizer.zero_grad()
        trace.parameters.extend(p.detach().clone() for p in flats)
        return trace

    def named_grads(self) -> dict[str, Tensor]:
        """Whole gradients, by names in the whole model.  Collective over the stage."""
        found = {}
        for layers, model in zip(self.ranges, self.models, strict=True):
            like = self.part(layers, "meta")
            for prefix, wrapped in units_in(model):
                for group in wrapped._unit.trained:
                    full = group.master.gather(group.master.flat.grad)
                    assert full is not None
                    for slot, grad in zip(group.layout.slots, group.layout.views(full), strict=True):
                        name = prefix + slot.name
                        found[name] = joined(grad, like.get_parameter(name), self.mesh.tp_group)
        return found


def samples(replica: int, config: LlamaConfig = CONFIG) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each step, [batch, seq]."""
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (2, 2 * MICROBATCHES, config.seq)
    return [tuple(torch.randint(0, config.vocab, shape, generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def joined(part: Tensor, like: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """The whole of what each rank of `group` has a part of; `like`: the parameter, which says how."""
    size = dist.get_world_size(group)
    if size == 1 or not like.tensor_model_parallel:  # type: ignore[attr-defined]
        return part
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    dim, sizes = like.partition_dim, like.partition_sizes  # type: ignore[attr-defined]
    pieces = [of_rank.split([n // size for n in sizes], dim) for of_rank in parts]
    return torch.cat([of_rank[k] for k in range(len(sizes)) for of_rank in pieces], dim)


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
            tokens, targets = (x.to(device) for x in batch)
            for part, wanted in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                loss = model(part, wanted)
                (loss / MICROBATCHES / replicas).backward()
                if owner == replica:
                    losses.append(loss.detach())
        if not first:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first
