"""`CheckpointManager`: the checkpoints of one training run: saves, resumes, and removes old ones.

In:   a folder with one subfolder for each saved step, such as `step-00000100`.
Out:  the newest checkpoint that is whole, loaded; older ones removed.
Next: `examples/pretrain_llama.py` saves and resumes with it.

    step-00000100            a checkpoint, or the rest of an interrupted save
    removed-step-00000100    the rest of an interrupted removal
    damaged-step-00000100    a damaged checkpoint, put aside for inspection
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.checkpoint.errors import DamagedCheckpoint
from flatfsdp.checkpoint.fit import Accepted
from flatfsdp.checkpoint.loading import load
from flatfsdp.checkpoint.local import persistent_buffers
from flatfsdp.checkpoint.manifest import METADATA, TEMPORARY, is_ours, save_id_of_manifest
from flatfsdp.checkpoint.saving import save
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.checking.journal import launch
from flatfsdp.comm.collectives import raise_to_largest
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.engine.ema import EMA
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.units import Model, named_groups, stages_of
from flatfsdp.fp8.delayed_scaling import buffer_names

AMAX_HISTORIES = tuple(buffer_names(direction)[1] for direction in ("forward", "backward"))
"""Ends of the names of the buffers of delayed scaling."""


class Resumed(NamedTuple):
    """Result of `CheckpointManager.resume`.

    Attributes:
        step: step that the checkpoint was saved under.
        extra: the `extra` that was saved with it.
    """

    step: int
    extra: dict[str, Any]


class CheckpointManager:
    """Saves the steps of a training run into one folder, and resumes from the newest whole one.

        manager = checkpoint.CheckpointManager("out/checkpoints")
        found = manager.resume(model, optimizer)
        for step in range(found.step if found else 0, steps):
            ...
            manager.save(step + 1, model, optimizer)

    All methods are collective over all ranks, which must see the same files.  A run killed at any moment
    loses at most the steps since its last save: the previous checkpoint is removed only after the next is
    complete.

    Args:
        folder: folder for this run alone; made by the first save.
        keep: number of checkpoints to keep.

    Raises:
        ValueError: if `keep` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; a run needs at least 1 checkpoint to go on from")
        self.folder = Path(folder)
        self.keep = keep

    def path(self, step: int) -> Path:
        """Folder of one step's checkpoint."""
        return self.folder / f"step-{step:08}"

    def save(
        self,
        step: int,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        ema: EMA | None = None,
    ) -> bool:
        """Saves one step, and removes checkpoints before the newest `keep`.

        Refuses weights or optimizer states with a NaN or an infinity: no run could resume from them, and they
        would replace a checkpoint from which one can.

        Args:
            step: number of optimizer steps so far; a checkpoint of the same step is replaced.
            model: the model, or this rank's stages of a pipeline.
            optimizer: optimizer over all parameters of `model`.
            extra: tensors, numbers, strings, and lists and dicts of them, for `resume` to return.
            ema: an average of the weights of `model`.

        Returns:
            Whether the step was saved; if not, a warning gives the reason.
        """
        if not is_finite(model, optimizer):
            _warn(
                f"step {step} is not saved: its weights or optimizer states have NaN or infinite numbers; "
                "the checkpoints before it stay"
            )
            return False
        save(self.path(step), model, optimizer, ema=ema, extra=extra, overwrite=True)
        # The others wait here, without a time limit, rather than in the next step.
        with raising_on_all(model), _never_fatal():
            if _is_first():
                older = [each for each in self._complete() if each < step]
                for each in older[: max(0, len(older) + 1 - self.keep)]:
                    remove(self.path(each))
        return True

    def resume(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ema: EMA | None = None,
        accept: Collection[Accepted] = (),
        verify: bool = True,
    ) -> Resumed | None:
        """Loads the newest whole checkpoint; None if there is no checkpoint.

        A damaged one is put aside with a warning, and the one before it is loaded instead.  The rests of
        interrupted saves and removals are removed; folders with other files in them are left alone.

        Args:
            model: the model, or this rank's stages of a pipeline.
            optimizer: optimizer over all parameters of `model`.
            ema: an average of the weights of `model`, to be filled with the saved one.
            accept: differences to accept, see `checkpoint.load`.
            verify: compare the contents of all files with their digests.

        Raises:
            DamagedCheckpoint: if there are checkpoints and all of them are damaged.
            CheckpointError: if the folder or the newest checkpoint cannot be read.
            ValueError: if model, optimizer or parameter groups do not fit, see `checkpoint.load`.
        """
        world, device = world_of(model)
        with raising_on_all(model):
            # One rank looks, so that all try the same steps.
            steps = self._complete() if world.rank == 0 else []
        steps = broadcast_object(steps, [world], device)
        damage: list[DamagedCheckpoint] = []
        for step in reversed(steps):
            try:
                extra = load(self.path(step), model, optimizer, ema=ema, accept=accept, verify=verify)
            except DamagedCheckpoint as error:
                damage.append(error)
                continue
            self._tidy(step, damage)
            return Resumed(step, extra)
        if damage:
            raise DamagedCheckpoint(
                f"all {len(damage)} checkpoints in {self.folder} are damaged; the newest: {damage[0]}"
            ) from damage[0]
        self._tidy(0, [])
        return None

    # ---- files ------------------------------------------------------------------------------------------

    def _complete(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(step for step, path in self._folders() if (path / METADATA).exists())

    def _folders(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in named if match and path.is_dir()]

    def _tidy(self, loaded: int, damage: Collection[DamagedCheckpoint]) -> None:
        """Puts damaged checkpoints after step `loaded` aside, and removes rests of interrupted saves."""
        for error in damage:
            _warn(f"{error}; going on from step {loaded}, and the damaged one is put aside")
        if not _is_first() or not self.folder.is_dir():
            return
        for path in self.folder.glob("removed-step-*"):
            with _never_fatal():
                shutil.rmtree(path)
        for step, path in self._folders():
            with _never_fatal():
                if not (path / METADATA).exists():
                    _remove_incomplete(path)
                elif step > loaded:
                    _put_aside(path)


def remove(path: Path) -> None:
    """Removes a checkpoint's folder; if interrupted, the rest is not taken for a checkpoint."""
    going = path.with_name(f"removed-{path.name}")
    path.rename(going)
    shutil.rmtree(going)


def _remove_incomplete(path: Path) -> None:
    """Removes the rest of an interrupted save, and nothing else."""
    names = {file.name for file in path.iterdir()}
    # Just before its end a save has both files; its last act is to rename the first.
    has_ended = TEMPORARY not in names and any(save_id_of_manifest(name) for name in names)
    if has_ended:
        _warn(f"{path} has lost its {METADATA} and cannot be loaded; it is put aside")
        _put_aside(path)
    elif all(name == TEMPORARY or is_ours(name) for name in names):
        shutil.rmtree(path)
    else:
        _warn(f"{path} is no checkpoint and has other files in it; it is left alone")


def _put_aside(path: Path) -> None:
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


@contextmanager
def _never_fatal() -> Iterator[None]:
    """Context that logs an error of tidying and goes on, as the other ranks have gone on already."""
    try:
        yield
    except OSError as error:
        _warn(f"not tidied: {error}")


@torch.no_grad()
def is_finite(model: Model, optimizer: torch.optim.Optimizer | None = None) -> bool:
    """Whether all weights, buffers and optimizer states on all ranks are finite.  Collective over all ranks.

    Args:
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer whose states are checked, too; None checks the model alone.
    """
    masters = [group.master for _, group in named_groups(model)]
    values = [master.flat.detach() for master in masters]
    buffers = [named for stage in stages_of(model) for named in persistent_buffers(stage)]
    # An infinite amax in a history is harmless: scales stay as they are.
    values += [
        buffer for name, buffer in buffers if buffer.is_floating_point() and not name.endswith(AMAX_HISTORIES)
    ]
    if optimizer is not None:
        states = (value for state in optimizer.state.values() for value in state.values())
        # `plain`, because a momentum that began as a gradient would take norms over all ranks.
        values += [plain(each) for each in states if isinstance(each, Tensor) and each.is_floating_point()]
    world, device = world_of(model)
    # The largest magnitude is finite only if all numbers are, and takes no memory.
    values = [each for each in values if each.numel()]
    norms = torch._foreach_norm(values, torch.inf) if values else []
    flags = [norm.isfinite().logical_not().to(device) for norm in norms]
    bad = torch.stack(flags).any().float() if flags else torch.zeros((), device=device)
    if world.size > 1:
        with launch(world, Identity(Action.NORM), device):
            raise_to_largest(bad, world)
    return not bad.item()


def _is_first() -> bool:
    return Ranks.of(default_group()).rank == 0


def _warn(message: str) -> None:
    """Warns on the first rank, because all ranks have the same warning."""
    if _is_first():
        warnings.warn(message, stacklevel=3)
