"""A tiny model that is trained and saved in several ways, and what is in a checkpoint of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import FlatFSDP, auto_wrap, by_class, checkpoint
from flatfsdp.checkpoint.manifest import METADATA
from flatfsdp.checkpoint.opening import open_checkpoint
from flatfsdp.checkpoint.store import Place, place
from flatfsdp.comm.ranks import ALONE
from tests.support.checkpoints import full_state, names_in
from tests.support.faults import objects


class Run:
    """One rank's model and optimizer, and how many steps they have done.

    Args:
        seed: two runs of one seed have the same bits after each step.

    Attributes:
        manager: the manager of a run that saves while it trains, from its first save on.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        self.model: FlatFSDP = auto_wrap(net, by_class(nn.Linear), optimize_backward_concat=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step = 0
        self.manager: checkpoint.CheckpointManager | None = None

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


def left_behind(folder: Place) -> list[str]:
    """What is in a checkpoint's folder and does not belong to the checkpoint."""
    manifest = open_checkpoint(folder, ALONE, torch.device("cpu")).manifest
    assert manifest is not None
    names = {path.name for path in folder.iterdir()}
    return sorted(names - set(manifest.files) - {manifest.name, METADATA})


@dataclass(frozen=True)
class Way:
    """How a run is saved to a folder, and loaded from there.

    Attributes:
        save: or what else is to be killed, the second time that it is called.
        load: raises DamagedCheckpoint or FileNotFoundError, if there is nothing.
        left: what is in the folder after a save and should not be.
        is_of_runs: whether the folder is for all checkpoints of a run.
        end: waits until a save that goes on while the run trains has ended; None: saves do not.
    """

    save: Callable[[Run, Path], object]
    load: Callable[[Run, Path], None] = Run.load
    left: Callable[[Path], list[str]] = left_behind
    is_of_runs: bool = False
    end: Callable[[Run], None] | None = None


def _save(run: Run, folder: Path) -> None:
    checkpoint.save(folder, run.model, run.optimizer, extra={"step": run.step}, overwrite=True)


def _save_asynchronously(run: Run, folder: Path) -> None:
    state = checkpoint.sharded_training_state(run.model, run.optimizer)
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


def _with_accelerate(run: Run, folder: Path, doing: str) -> None:
    from flatfsdp.compat.accelerate import FlatAccelerator
    from tests.support.ecosystem.launched import launched

    class Steps:
        """The run's step, as an object with state."""

        def state_dict(self) -> dict[str, int]:
            return {"step": run.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            run.step = state["step"]

    with launched(dist.get_rank(), dist.get_world_size()):
        accelerator = FlatAccelerator(cpu=True)
        accelerator.prepare(run.model, run.optimizer)
        accelerator.register_for_checkpointing(Steps())
        getattr(accelerator, doing)(folder)


def _save_with_accelerate(run: Run, folder: Path) -> None:
    _with_accelerate(run, folder, "save_state")


def _load_with_accelerate(run: Run, folder: Path) -> None:
    _with_accelerate(run, folder, "load_state")


def _left_of_accelerate(folder: Path) -> list[str]:
    (save,) = folder.glob("save-*")
    others = {path.name for path in folder.iterdir()} - {"flatfsdp.json", save.name}
    return sorted(others) + left_behind(save / "flatfsdp-0")


# ---- the checkpoints of a run, of which the newest stays ------------------------------------------------


def _save_step(run: Run, folder: Path) -> None:
    manager = checkpoint.CheckpointManager(folder, keep=1)
    assert manager.save(run.step, run.model, run.optimizer, {"step": run.step})


def _save_step_in_background(run: Run, folder: Path | str) -> None:
    if run.manager is None:
        run.manager = checkpoint.CheckpointManager(folder, keep=1, async_save=True)
    assert run.manager.save(run.step, run.model, run.optimizer, {"step": run.step})


def _end_save_in_background(run: Run) -> None:
    assert run.manager is not None
    run.manager.wait()


def _resume(run: Run, folder: Path | str) -> None:
    manager = checkpoint.CheckpointManager(folder, keep=1)
    # On the first rank alone.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = manager.resume(run.model, run.optimizer)
    if found is None:
        raise FileNotFoundError(folder)
    run.step = found.extra["step"]


def _resume_after_damage(run: Run, folder: Path) -> None:
    """The first save, or one that is damaged: what is left of others is removed, and the first is loaded."""
    if run.step == 1:
        _save_step(run, folder)
        return
    step = run.step
    checkpoint.CheckpointManager(folder, keep=2).save(step, run.model, run.optimizer, {"step": step})
    if dist.get_rank() == 0:
        newest = folder / f"step-{step:08}"
        data = next(newest.glob("__0_*"))
        data.write_bytes(data.read_bytes()[:-1])
        shutil.copytree(newest, folder / "removed-step-00000000")
        shutil.copytree(newest, folder / f"step-{step + 1:08}")
        for name in (METADATA, next(newest.glob("manifest-*")).name):
            (folder / f"step-{step + 1:08}" / name).unlink()
    dist.barrier()
    _resume(run, folder)


def _save_after_rollback(run: Run, folder: Path) -> None:
    """A run that went back from step 6 to step 1, whose bits step 6 has here, and those of step 5 nobody may
    find."""
    manager = checkpoint.CheckpointManager(folder, keep=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.save(run.step, run.model, run.optimizer, {"step": run.step})
    if run.step == 1:
        for number, step in ((5, 5), (6, 1)):
            manager.save(number, run.model, run.optimizer, {"step": step})


def _left_of_rollback(folder: Path) -> list[str]:
    newest = max(path.name for path in folder.glob("step-*"))
    others = [name for name in names_in(folder) if not name.startswith(("step-", "abandoned-step-"))]
    return others + left_behind(folder / newest)


def _left_of_run(folder: Place) -> list[str]:
    names = set(names_in(folder))
    newest = max(name for name in names if name.startswith("step-"))
    damaged = {name for name in names if name.startswith("damaged-step-")}
    return sorted(names - {newest} - damaged) + left_behind(folder / newest)


def _in_store(folder: Path) -> str:
    return f"{objects.Objects.protocol}://{folder}"


WAYS = {
    "plain": Way(_save),
    "async": Way(_save_asynchronously),
    "fabric": Way(_save_with_fabric),
    "accelerate": Way(_save_with_accelerate, _load_with_accelerate, _left_of_accelerate),
    "manager": Way(_save_step, _resume, _left_of_run, True),
    "background": Way(_save_step_in_background, _resume, _left_of_run, True, end=_end_save_in_background),
    "store": Way(
        lambda run, folder: _save_step_in_background(run, _in_store(folder)),
        lambda run, folder: _resume(run, _in_store(folder)),
        lambda folder: _left_of_run(place(_in_store(folder))),
        True,
        end=_end_save_in_background,
    ),
    "rollback": Way(_save_after_rollback, _resume, _left_of_rollback, True),
    "resume": Way(_resume_after_damage, _resume, _left_of_run, True),
}
"""By name."""
