"""Programs of one rank, as plain values, and their execution.

A program is a list of operations; ranks that share a model are given one each, which differ in one place:

    [Microbatch(0), Microbatch(1), Step(), ...]
    [Microbatch(0), Do("stop"), Microbatch(1), Step(), ...]

Next: `reference.py` says which losses are right; `processes.py` runs programs.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatfsdp import FlatFSDP, Precision, auto_wrap, checkpoint
from flatfsdp.comm import collectives

WIDTH, BLOCKS, ROWS = 8, 3, 4
LEARNING_RATE = 0.1


class OwnError(Exception):
    """What a rank raises by itself."""


@dataclass(frozen=True)
class Microbatch:
    """One forward and its backward.

    Attributes:
        seed: of the data.
        order: of the blocks; one may be left out.
        raises: where the rank raises by itself.
        is_caught: whether it catches that, calls zero_grad() if `zeroes`, and goes on.
        is_used: whether the loss is one of the model's output.
    """

    seed: int
    order: tuple[int, ...] = tuple(range(BLOCKS))
    raises: Literal["forward", "backward", ""] = ""
    is_caught: bool = False
    zeroes: bool = False
    is_used: bool = True


@dataclass(frozen=True)
class Step:
    """Clipping and the optimizer's step.

    Attributes:
        raises: whether the rank raises before.
        is_caught: whether it catches that and goes on.
    """

    raises: bool = False
    is_caught: bool = False
    clips: bool = False


What = Literal[
    "state dict",
    "save",
    "clip",
    "summon",
    "evaluate",
    "sleep",
    "slow gather",
    "stop",
    "kill",
    "raise",
    "exit",
]


@dataclass(frozen=True)
class Do:
    """Something else.

    Attributes:
        seconds: that "sleep" and "slow gather" take.
        path: that "save" saves to.
    """

    what: What
    seconds: float = 0.0
    path: str = ""


Operation = Microbatch | Step | Do


@dataclass(frozen=True)
class Setup:
    """A model, and how it is sharded.

    Attributes:
        units: which blocks are units; the rest is the outermost one's.
        timeout: seconds.
    """

    width: int = WIDTH
    blocks: int = BLOCKS
    units: Literal["all", "first"] = "all"
    compute: torch.dtype = torch.float32
    reshard: bool = True
    flag: bool = False
    grad_sync: Literal["last", "every"] = "last"
    frozen: bool = False
    hybrid: bool = False
    timeout: float = 2.0


class Net(nn.Module):
    """Blocks in the order of the call."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(setup.width, setup.width) for _ in range(setup.blocks))

    def forward(self, x: Tensor, order: tuple[int, ...], raises: str = "") -> Tensor:
        for index in order:
            x = x + self.blocks[index](x).tanh()
            if raises == "forward" and index == order[1]:
                raise OwnError("in the forward")
            if raises == "backward" and index == order[1]:
                x.register_hook(_raise_own)
        return x


def _raise_own(grad: Tensor) -> Tensor:
    raise OwnError("in the backward")


def build(setup: Setup) -> Net:
    torch.manual_seed(0)
    net = Net(setup)
    net.blocks[0].requires_grad_(not setup.frozen)
    return net


def inputs(setup: Setup, rank: int, seed: int) -> Tensor:
    """Inputs of one microbatch of one rank: [ROWS, width]."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(ROWS, setup.width, generator=generator)


def loss_of(model: Any, setup: Setup, rank: int, microbatch: Microbatch) -> Tensor:
    x = inputs(setup, rank, microbatch.seed)
    if not microbatch.is_used:
        return (x.requires_grad_() ** 2).mean()
    return model(x, microbatch.order, microbatch.raises).square().mean()


def run(rank: int, setup: Setup, program: list[Operation], losses: list[float]) -> None:
    """Runs a program on this rank; its losses come one by one."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2)) if setup.hybrid else None
    net = build(setup)
    units = [f"blocks.{index}" for index in range(setup.blocks if setup.units == "all" else 1)]
    model: FlatFSDP = auto_wrap(
        net,
        lambda name, module, numel: name in units,
        mesh=mesh,
        precision=Precision(compute=setup.compute),
        reshard_after_forward=setup.reshard,
        optimize_backward_concat=setup.flag,
        grad_sync=setup.grad_sync,
        timeout=setup.timeout,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for index, operation in enumerate(program):
        if isinstance(operation, Microbatch):
            is_last = not isinstance(next_of_step(program, index), Microbatch)
            with nullcontext() if is_last else model.no_sync():
                _microbatch(model, optimizer, setup, rank, operation, losses)
        elif isinstance(operation, Step):
            _step(model, optimizer, operation)
        else:
            _do(model, optimizer, setup, rank, operation)


def losses_of(program: list[Operation]) -> int:
    """How many losses a rank has that ends."""
    return sum(isinstance(each, Microbatch) and not each.raises for each in program)


def next_of_step(program: list[Operation], index: int) -> Operation | None:
    """The next microbatch or step; None at the end."""
    return next((each for each in program[index + 1 :] if not isinstance(each, Do)), None)


def _microbatch(
    model: FlatFSDP,
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    rank: int,
    microbatch: Microbatch,
    losses: list[float],
) -> None:
    try:
        loss = loss_of(model, setup, rank, microbatch)
        loss.backward()
        losses.append(loss.item())
    except OwnError:
        if not microbatch.is_caught:
            raise
        if microbatch.zeroes:
            optimizer.zero_grad()


def _step(model: FlatFSDP, optimizer: torch.optim.Optimizer, step: Step) -> None:
    try:
        if step.raises:
            raise OwnError("in the optimizer")
        if step.clips:
            model.clip_grad_norm_(1e6)
        optimizer.step()
    except OwnError:
        if not step.is_caught:
            raise
    optimizer.zero_grad()


def _do(model: FlatFSDP, optimizer: torch.optim.Optimizer, setup: Setup, rank: int, do: Do) -> None:
    match do.what:
        case "state dict":
            model.state_dict()
        case "save":
            checkpoint.save(Path(do.path), model, optimizer)
        case "clip":
            model.clip_grad_norm_(1e6)
        case "summon":
            with model.summon_full_params():
                pass
        case "evaluate":
            with torch.no_grad():
                loss_of(model, setup, rank, Microbatch(99))
        case "sleep":
            time.sleep(do.seconds)
        case "slow gather":
            _gather_slowly(model, setup, rank, do.seconds)
        case "stop" | "kill":
            os.kill(os.getpid(), signal.SIGSTOP if do.what == "stop" else signal.SIGKILL)
        case "raise":
            raise OwnError("by itself")
        case "exit":
            os._exit(0)


def _gather_slowly(model: FlatFSDP, setup: Setup, rank: int, seconds: float) -> None:
    """Evaluates, late in a collective that the others are in."""
    gather, late = collectives._all_gather, [seconds]

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(late.pop() if late else 0.0)
        return gather(*args, **kwargs)

    with mock.patch.object(collectives, "_all_gather", slow):
        _do(model, None, setup, rank, replace(Do("evaluate")))  # type: ignore[arg-type]
