"""A language model in parts, and this rank's pipeline stages of it under a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleDualPipeV, ScheduleGPipe, ScheduleZBVZeroBubble

from flatfsdp import Debug, by_class, shard
from flatfsdp.parallel import FlatStage
from tests.support.models import VOCAB, WIDTH, Block, whole_grads
from tests.support.ranks import cached_in_file

MICROBATCHES, STEPS = 4, 3


class Part(nn.Module):
    """A few blocks of a language model; the first part embeds, the last one returns logits."""

    def __init__(self, blocks: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH) if is_first else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parts(count: int) -> list[Part]:
    """The model of four blocks, in `count` parts; the same values however many there are."""
    torch.manual_seed(0)
    return [Part(4 // count, is_first=i == 0, is_last=i == count - 1) for i in range(count)]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@cached_in_file
def mesh_of(pp: int, dp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))


def by_block(part: Part, **options: Any) -> Any:
    return shard(part, by_class(Block), **options)


def one_by_one(part: Part, **options: Any) -> Part:
    """Several FlatFSDP modules with nothing around them: each is a root."""
    for parent, name in ((part, "embedding"), (part, "head"), *((part.blocks, str(i)) for i in range(2))):
        child = getattr(parent, name)
        if list(child.parameters()):
            setattr(parent, name, shard(child, **options))
    return part


class Pipeline:
    """This rank's stages, one or two, under a schedule."""

    def __init__(
        self,
        schedule: type,
        pp: int,
        dp: int = 1,
        stage: type[FlatStage] = FlatStage,
        scale_grads: bool = True,
        static: bool = False,
        wrap: Callable[..., Any] = by_block,
        **options: Any,
    ) -> None:
        self.mesh = mesh_of(pp, dp)
        rank = self.mesh.get_local_rank("pp")
        is_single = schedule in (ScheduleGPipe, Schedule1F1B)
        total = pp if is_single else 2 * pp
        second = total - 1 - rank if schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV) else rank + pp
        self.indices = [rank] if is_single else [rank, second]
        all_parts = parts(total)
        self.models = [
            wrap(all_parts[index], mesh=self.mesh["dp"], debug=Debug(poison_on_free=True), **options)
            for index in self.indices
        ]
        hidden, logits = torch.empty(2, 7, WIDTH), torch.empty(2, 7, VOCAB)
        self.stages = []
        for index, model in zip(self.indices, self.models, strict=True):
            shapes: dict[str, Any] = {}
            if static:
                shapes["input_args"] = torch.empty(2, 7, dtype=torch.int64) if index == 0 else hidden
                shapes["output_args"] = logits if index == total - 1 else hidden
            self.stages.append(stage(model, index, total, group=self.mesh.get_group("pp"), **shapes))
        self.is_first, self.is_last = 0 in self.indices, total - 1 in self.indices
        self.loss: Callable[..., Tensor] = loss_of
        stages: Any = self.stages[0] if is_single else self.stages
        self.schedule: Any = schedule(
            stages, MICROBATCHES, loss_fn=lambda *args: self.loss(*args), scale_grads=scale_grads
        )

    def step(self, tokens: Tensor) -> list[Tensor]:
        """Losses of the microbatches, on the rank that has the last stage."""
        losses: list[Tensor] = []
        target = tokens if self.is_last else None
        self.schedule.step(*([tokens] if self.is_first else []), target=target, losses=losses)
        return [loss.detach() for loss in losses]

    def grads(self) -> list[Tensor]:
        return [p.grad.clone() for model in self.models for p in model.parameters() if p.grad is not None]

    def named_grads(self) -> dict[str, Tensor]:
        """Whole gradients, by the number of the block and the parameter's name in it."""
        return {
            whole_name(name, index * len(model.blocks)): grad
            for index, model in zip(self.indices, self.models, strict=True)
            for name, grad in whole_grads(model).items()
        }

    def zero_grad(self) -> None:
        """Resets gradients like an optimizer, which cannot see what is accumulated and not reduced."""
        for model in self.models:
            for parameter in model.parameters():
                parameter.grad = None


def whole_name(name: str, first_block: int) -> str:
    kind, _, rest = name.partition(".")
    if kind != "blocks":
        return name
    number, _, rest = rest.partition(".")
    return f"blocks.{first_block + int(number)}.{rest}"


def tokens_of(replica: int, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    return [torch.randint(0, VOCAB, (2 * MICROBATCHES, 7), generator=generator) for _ in range(steps)]
