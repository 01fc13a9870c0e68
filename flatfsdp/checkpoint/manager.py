"""`CheckpointManager`: the checkpoints of one training run: saves, resumes, and removes old ones.

In:   a folder with one subfolder for each saved step, such as `step-00000100`.
Out:  the newest checkpoint that is whole, loaded; older ones removed.
Next: `examples/pretrain_llama.py` saves and resumes with it.

    step-00000100              a checkpoint, or the rest of an interrupted save
    removed-step-00000100      the rest of an interrupted removal
    damaged-step-00000100      a damaged checkpoint, put aside for inspection
    abandoned-step-00000100    one that this run, saving an earlier step, did not go on from
    _owner.txt                 the process that saves here, see `owner.py`

In an object store nothing is called removed-step: of a removal, as of a save, a step without `.metadata` is
left.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.checkpoint.background import BackgroundSave
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.errors import DamagedCheckpoint
from flatfsdp.checkpoint.fit import Accepted
from flatfsdp.checkpoint.loading import load
from flatfsdp.checkpoint.manifest import METADATA, TEMPORARY, is_ours, save_id_of_manifest
from flatfsdp.checkpoint.media import medium_of
from flatfsdp.checkpoint.optimizer_state import with_pieces
from flatfsdp.checkpoint.owner import OwnedWriter, Owner
from flatfsdp.checkpoint.saving import sharded_training_state, write
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.checkpoint.store import Place, StorePath, place
from flatfsdp.comm.objects import all_gather_object, broadcast_object
from flatfsdp.comm.paths import same_on_all_ranks
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import Model, named_groups


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

    With `async_save` a save copies the state to host memory and returns; a thread writes the copy while
    training goes on.  One save is in flight: the next `save`, `resume`, `wait` or the end of a `with` block
    waits for it, and raises its error on every rank, instead of what it was called for:

        with checkpoint.CheckpointManager("out/checkpoints", async_save=True) as manager:
            ...

    Args:
        folder: folder for this run alone, the same on all ranks, made by the first save; or its URL in a
            store that fsspec has a library for, such as s3://bucket/run.
        keep: number of checkpoints to keep.
        async_save: whether a thread writes.  The manager then keeps host memory for a copy of this rank's
            state.
        digests: whether to hash data files while they are written, the same on all ranks, see
            `checkpoint.save`.  If not, `resume` does not notice a flipped bit in them, and goes on from it.

    Raises:
        ValueError: if `keep` is less than 1; if `folder` is a URL that fsspec does not know.
        ModuleNotFoundError: if the URL's library is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        async_save: bool = False,
        digests: bool = True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; a run needs at least 1 checkpoint to go on from")
        self.folder = place(folder)
        self.keep = keep
        self.digests = digests
        self._owner = Owner(self.folder)
        self._background = BackgroundSave() if async_save else None
        # This rank's tensors that had no infinity when they were saved or resumed, by name.
        self._finite: set[str] = set()

    def path(self, step: int) -> Place:
        """Folder of one step's checkpoint, for `load`; of one in a store, `str` makes the URL."""
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

        Checkpoints of later steps are put aside first, with a warning: this run did not go on from them. It
        was rolled back, or began anew in the folder of another run.  So `resume` finds what was saved last.

        Refuses parameters and optimizer states with a NaN, or with an infinity where the checkpoint before
        has none: no run could resume from them, and they would replace a checkpoint from which one can.  What
        was infinite from the beginning, such as the bias of a token that is never chosen, is saved; so are
        buffers, whatever they hold.

        Args:
            step: number of optimizer steps so far; a checkpoint of the same step is replaced.
            model: the model, or this rank's stages of a pipeline.
            optimizer: optimizer over all parameters of `model`.
            extra: tensors, numbers, strings, and lists and dicts of them, for `resume` to return.
            ema: an average of the weights of `model`.

        Returns:
            Whether the step was saved, or is being saved; if not, a warning names a tensor with the reason.

        Raises:
            CheckpointError: if a rank could not write, or a later checkpoint cannot be put aside; if
                another run has begun to save to this folder; with `async_save`, if the save before has
                failed: nothing is done then.
            Exception: whatever else `checkpoint.save` raises.
            Each error is raised on every rank.
        """
        self.wait()
        world, device = world_of(model)
        same_on_all_ranks(place, self.folder, [world], device)
        magnitudes = largest_magnitudes(model, optimizer)
        problem = self._problem(magnitudes, model)
        if problem is not None:
            _warn(f"step {step} is not saved: {problem}; the checkpoints before it stay")
            return False
        with raising_on_all(model):
            if _is_first():
                self._owner.require()
            # Before the save, and the oldest first: whatever the moment of a kill, the newest checkpoint is
            # the end of what was saved until then, or that from which this run went on.
            later = [each for each in self._complete() if each > step] if _is_first() else []
            aside = [medium_of(self.path(each)).put_aside("abandoned", METADATA) for each in later]
        if aside:
            _warn(
                f"{self.folder} has checkpoints of later steps than {step}, of another run or from before a "
                f"rollback; they are put aside as {', '.join(path.name for path in aside)}; give each run "
                "a folder of its own"
            )
        writer = OwnedWriter(self._owner, self.path(step), overwrite=True, extra=extra, digests=self.digests)
        if self._background is not None:
            state = sharded_training_state(model, optimizer, ema)
            self._background.start(f"step {step}", writer, state, model, partial(self._remove_older, step))
        else:
            write(writer, model, optimizer, ema)
            # The others wait here, without a time limit, rather than in the next step.
            with raising_on_all(model):
                self._remove_older(step)
        # Of a save in flight, too: if it fails, what was finite in it must be so in the next.
        self._finite = _without_infinity(magnitudes)
        return True

    def wait(self) -> None:
        """Waits until the save in flight has ended; without `async_save` there is none.

        Raises:
            CheckpointError: on every rank, if it has failed.
        """
        if self._background is not None:
            self._background.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._background is not None:
            # Other ranks may have no exception, and do not come here.
            self._background.join()

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
        interrupted saves and removals are removed, here and by `save`; folders with other files in them are
        left alone.

        Args:
            model: the model, or this rank's stages of a pipeline.
            optimizer: optimizer over all parameters of `model`.
            ema: an average of the weights of `model`, to be filled with the saved one.
            accept: differences to accept, see `checkpoint.load`.
            verify: compare the contents of all files with their digests, see `checkpoint.load`.

        Raises:
            DamagedCheckpoint: if there are checkpoints and all of them are damaged.
            CheckpointError: if the folder or the newest checkpoint cannot be read, or it has other lanes; if
                the save in flight has failed.
            ValueError: if ranks have different folders; if model, optimizer or parameter groups do not fit,
                see `checkpoint.load`.
        """
        self.wait()
        world, device = world_of(model)
        same_on_all_ranks(place, self.folder, [world], device)
        with raising_on_all(model):
            # One rank looks, so that all try the same steps.
            steps = self._complete() if world.rank == 0 else []
        steps = broadcast_object(steps, [world], device)
        damage: list[DamagedCheckpoint] = []
        found: Resumed | None = None
        while steps and found is None:
            step = steps.pop()
            try:
                extra = load(self.path(step), model, optimizer, ema=ema, accept=accept, verify=verify)
                found = Resumed(step, extra)
            except DamagedCheckpoint as error:
                damage.append(error)
        if damage and found is None:
            raise DamagedCheckpoint(
                f"all {len(damage)} checkpoints in {self.folder} are damaged; the newest: {damage[0]}"
            ) from damage[0]
        self._tidy(found.step if found else 0, damage)
        self._finite = _without_infinity(largest_magnitudes(model, optimizer))
        return found

    def _problem(self, magnitudes: Mapping[str, float], model: Model) -> str | None:
        """Says which tensor of which rank must not be saved; None if all may be.  Collective."""
        found = [f"{name} has a NaN" for name, largest in magnitudes.items() if math.isnan(largest)]
        new = self._finite - _without_infinity(magnitudes)
        found += [f"{name} has an infinite number, and had none before" for name in magnitudes if name in new]
        for rank, theirs in enumerate(all_gather_object(found[:1], *world_of(model))):
            if theirs:
                return f"on rank {rank}, {theirs[0]}"
        return None

    # ---- files ------------------------------------------------------------------------------------------

    def _complete(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(step for step, path in self._folders() if (path / METADATA).exists())

    def _remove_older(self, step: int) -> None:
        """Removes checkpoints before the newest `keep`, of which `step` is the last, and rests before it."""
        if _is_first():
            with _never_fatal():
                older = [each for each in self._complete() if each < step]
                for each in older[: max(0, len(older) + 1 - self.keep)]:
                    medium_of(self.path(each)).remove(METADATA)
                # No other save of this run is in flight: what has not ended is a rest.
                for each, path in self._folders():
                    if each < step and _is_rest(path, {file.name for file in path.iterdir()}):
                        medium_of(path).delete()

    def _folders(self) -> list[tuple[int, Place]]:
        if not self.folder.is_dir():
            return []
        named = [(re.fullmatch(r"step-(\d{8,})", path.name), path) for path in self.folder.iterdir()]
        return [(int(match[1]), path) for match, path in named if match and path.is_dir()]

    def _tidy(self, loaded: int, damage: Collection[DamagedCheckpoint]) -> None:
        """Puts damaged checkpoints after step `loaded` aside, and removes rests of interrupted saves."""
        for error in damage:
            _warn(f"{error}; going on from step {loaded}, and the damaged one is put aside")
        if not _is_first():
            return
        with _never_fatal():
            for path in [*self.folder.iterdir()] if self.folder.is_dir() else ():
                if path.name.startswith("removed-step-"):
                    with _never_fatal():
                        medium_of(path).delete()
            for step, path in self._folders():
                with _never_fatal():
                    if not (path / METADATA).exists():
                        _remove_incomplete(path)
                    elif step > loaded:
                        medium_of(path).put_aside("damaged", METADATA)


def _remove_incomplete(path: Place) -> None:
    """Removes the rest of an interrupted save or removal, and nothing else."""
    names = {file.name for file in path.iterdir()}
    if _has_lost_its_end(path, names):
        _warn(f"{path} has lost its {METADATA} and cannot be loaded; it is put aside")
        medium_of(path).put_aside("damaged", METADATA)
    elif _is_rest(path, names):
        medium_of(path).delete()
    else:
        _warn(f"{path} is no checkpoint and has other files in it; it is left alone")


def _has_lost_its_end(path: Place, names: Collection[str]) -> bool:
    # Just before its end a save has both files; its last act is to rename the first.  In a store a removal
    # that was interrupted looks the same.
    is_renamed = not isinstance(path, StorePath)
    return is_renamed and TEMPORARY not in names and any(save_id_of_manifest(name) for name in names)


def _is_rest(path: Place, names: Collection[str]) -> bool:
    are_ours = all(name == TEMPORARY or is_ours(name) for name in names)
    return are_ours and METADATA not in names and not _has_lost_its_end(path, names)


@contextmanager
def _never_fatal() -> Iterator[None]:
    """Context that logs an error of tidying and goes on, as the other ranks have gone on already."""
    try:
        yield
    except OSError as error:
        _warn(f"not tidied: {error}")


@torch.no_grad()
def largest_magnitudes(model: Model, optimizer: torch.optim.Optimizer | None = None) -> dict[str, float]:
    """The largest magnitude in this rank's part of each parameter and optimizer state, by name.

    It is NaN or infinite if one of the numbers is, and takes no memory to compute.

    Args:
        model: the model, or this rank's stages of a pipeline.
        optimizer: optimizer whose states are included; None: the parameters alone.
    """
    named = {name: value for name, value in _parts(model, optimizer) if value.numel()}
    if not named:
        return {}
    _, device = world_of(model)
    values = [*named.values()]
    if all(value.is_cuda for value in values):
        # Few kernels for all.  On CPUs it is 15 times slower than the other.
        norms = list(torch._foreach_norm(values, torch.inf))
    else:
        norms = [torch.maximum(high, -low) for low, high in map(torch.aminmax, values)]
    # One copy to the host for all.
    largest = torch.stack([norm.to(device, torch.float64) for norm in norms]).tolist()
    return dict(zip(named, largest, strict=True))


def _without_infinity(magnitudes: Mapping[str, float]) -> set[str]:
    return {name for name, largest in magnitudes.items() if not math.isinf(largest)}


def _parts(model: Model, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for prefix, group in named_groups(model):
        flat = group.master.flat.detach()
        for (parameter, first, _), pieces in with_pieces(group.master):
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for piece in pieces:
                name, start = prefix + piece.slot.name, piece.shard_offset
                stop = start + piece.stop - piece.start
                yield name, flat[start:stop]
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        # `plain`: a momentum that began as a gradient would take norms over all ranks.
                        value = plain(value)
                        is_cut = value.shape == parameter.shape
                        yield f"{key} of {name}", value[start - first : stop - first] if is_cut else value


def _is_first() -> bool:
    return Ranks.of(default_group()).rank == 0


def _warn(message: str) -> None:
    """Warns on the first rank, because all ranks have the same warning."""
    if _is_first():
        warnings.warn(message, stacklevel=3)
