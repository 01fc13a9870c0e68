"""Programs as users of PyTorch's FSDP2 write them: each takes `fully_shard`, and returns its losses.

They are about FSDP2's interface, so they use nothing of FlatFSDP.  Where FSDP2 gives a DTensor they ask it
for the whole, as its users do; another tensor is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from tests.support.models import Net, data, update

FullyShard = Callable[..., Any]
Program = Callable[[FullyShard, int, Path], list[float]]

LEARNING_RATE = 1e-2
WHOLE = StateDictOptions(full_state_dict=True)


def build(fully_shard: FullyShard, seed: int = 0, **options: Any) -> Any:
    """Blocks first, then the rest: from the bottom up.

    Args:
        options: of `fully_shard`, for the rest.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, **options)
    return model


def steps_of(rank: int, steps: int) -> Iterator[list[Tensor]]:
    """Two microbatches a step."""
    return data(rank, steps, 2)


def accumulate(model: Any, batches: list[Tensor]) -> list[float]:
    """Forward and backward of all microbatches; gradients are reduced in the last one's."""
    return [
        backward_of(model, tokens, is_last=index == len(batches) - 1) for index, tokens in enumerate(batches)
    ]


def backward_of(model: Any, tokens: Tensor, *, is_last: bool) -> float:
    model.set_requires_gradient_sync(is_last)
    loss = model(tokens)
    loss.backward()
    return loss.item()


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# ---- the programs ---------------------------------------------------------------------------------------


def learning_rates(fully_shard: FullyShard, rank: int, _: Path) -> list[float]:
    """A training loop with warm-up, then decay."""
    model = build(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=2)
    scheduler = SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=4)], milestones=[2])
    found = []
    for batches in steps_of(rank, 6):
        found += accumulate(model, batches)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found += scheduler.get_last_lr()
    return found


def groups_by_name(fully_shard: FullyShard, rank: int, _: Path) -> list[float]:
    """No weight decay for norms and biases; a learning rate of its own for the embedding."""
    model = build(fully_shard)
    kinds: dict[str, list[nn.Parameter]] = {"decays": [], "stays": [], "embedding": []}
    for name, parameter in model.named_parameters():
        stays = name.endswith("bias") or ".norm." in name
        kinds["embedding" if name.startswith("embedding") else "stays" if stays else "decays"].append(
            parameter
        )
    groups = [
        {"params": kinds["decays"], "weight_decay": 0.5},
        {"params": kinds["stays"], "weight_decay": 0.0},
        {"params": kinds["embedding"], "weight_decay": 0.0, "lr": 3 * LEARNING_RATE},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True)
    found = []
    for batches in steps_of(rank, 4):
        found += accumulate(model, batches)
        update(optimizer)
    return found


def moving_average(fully_shard: FullyShard, rank: int, _: Path) -> list[float]:
    """Trains, keeps a moving average of the weights, and evaluates with it."""
    # FSDP2 would go on showing the rest's whole parameters after a forward without gradients.
    model = build(fully_shard, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    (held_out,) = next(data(99, 1, 1))
    found = []
    for batches in steps_of(rank, 4):
        found += accumulate(model, batches)
        update(optimizer)
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.lerp_(parameter, 0.25)
            trained = [parameter.detach().clone() for parameter in model.parameters()]
            for values in (averages, trained):
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(value)
                found.append(model(held_out).item())
    return found


def clipping(fully_shard: FullyShard, rank: int, _: Path) -> list[float]:
    """PyTorch's own clipping, of all parameters and of one block's; returns norms, too."""
    model = build(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    for batches in steps_of(rank, 4):
        found += accumulate(model, batches)
        of_block = nn.utils.clip_grad_norm_(model.blocks[1].parameters(), max_norm=0.1)
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        found += [whole(of_block).item(), whole(norm).item()]
        update(optimizer)
    return found


def checkpoints(fully_shard: FullyShard, rank: int, folder: Path) -> list[float]:
    """Saves model, optimizer, scheduler and a count with DCP, goes on, and then again from what it saved."""
    batches_of_steps = list(steps_of(rank, 5))

    def start(seed: int) -> tuple[Any, torch.optim.Optimizer, LinearLR]:
        model = build(fully_shard, seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        return model, optimizer, LinearLR(optimizer, start_factor=0.2, total_iters=5)

    def run(model: Any, optimizer: torch.optim.Optimizer, scheduler: LinearLR, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses += accumulate(model, batches_of_steps[step])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return losses

    first = start(seed=0)
    found = run(*first, range(3))
    model, optimizer, scheduler = first
    state = {
        "model": get_model_state_dict(model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
        "scheduler": scheduler.state_dict(),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=folder)
    found += run(*first, range(3, 5))

    second = start(seed=1)
    model, optimizer, scheduler = second
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=WHOLE)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=WHOLE)
    scheduler.load_state_dict(state["scheduler"])
    again = run(*second, range(state["step"], 5))
    assert again == found[-len(again) :]
    return found + again


def evaluation(fully_shard: FullyShard, rank: int, _: Path) -> list[float]:
    """Evaluates between steps, and between the microbatches of one; ends with the whole model's values."""
    model = build(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    (held_out,) = next(data(99, 1, 1))

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            loss = model(held_out).item()
        model.train()
        return loss

    found = [evaluated()]
    for first, last in steps_of(rank, 3):
        found += [backward_of(model, first, is_last=False), evaluated()]
        found.append(backward_of(model, last, is_last=True))
        update(optimizer)
        found.append(evaluated())
    state = get_model_state_dict(model, options=WHOLE)
    return found + [float(value.double().sum()) for value in state.values()]


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (learning_rates, groups_by_name, moving_average, clipping, checkpoints, evaluation)
}
