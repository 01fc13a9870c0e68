"""A tiny model that is trained and saved in several ways, and what is in a checkpoint of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import FlatFSDP, auto_wrap, by_class, checkpoint
from tests.support.checkpoints import full_state


class Run:
    """One rank's model and optimizer, and how many steps they have done.

    Args:
        seed: two runs of one seed have the same bits after each step.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        self.model: FlatFSDP = auto_wrap(net, by_class(nn.Linear))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0

    def train(self) -> None:
        self.step += 1
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(self.step))
        self.model(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """A digest of all bits of model and optimizer, and of the step; the same on all ranks."""
        hashed = hashlib.sha256()
        _add(hashed, {**full_state(self.model, self.optimizer), "step": self.step})
        return hashed.hexdigest()

    def load(self, folder: Path) -> None:
        self.step = checkpoint.load(folder, self.model, self.optimizer)["step"]


def _add(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            hashed.update(str(key).encode())
            _add(hashed, value[key])
    elif isinstance(value, Tensor):
        hashed.update(value.detach().contiguous().numpy().tobytes())
    else:
        hashed.update(repr(value).encode())


Save = Callable[[Run, Path], None]


def _save(run: Run, folder: Path) -> None:
    checkpoint.save(folder, run.model, run.optimizer, extra={"step": run.step}, overwrite=True)


def _save_asynchronously(run: Run, folder: Path) -> None:
    state = {
        "model": checkpoint.sharded_state_dict(run.model),
        "optimizer": checkpoint.sharded_optimizer_state_dict(run.model, run.optimizer),
    }
    writer = checkpoint.Writer(folder, extra={"step": run.step}, overwrite=True)
    done = dcp.async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo"))
    getattr(done, "upload_completion", done).result()


def _save_with_fabric(run: Run, folder: Path) -> None:
    from flatfsdp.compat import lightning

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    strategy = lightning.FlatFSDPStrategy()
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    fabric.save(folder, {"model": run.model, "optimizer": run.optimizer, "step": run.step})


SAVES: dict[str, Save] = {"plain": _save, "async": _save_asynchronously, "fabric": _save_with_fabric}
