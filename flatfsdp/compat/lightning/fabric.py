"""Lightning Fabric's interface: `from flatfsdp.compat.lightning import Fabric, FlatFSDPStrategy`.

In:   Fabric's calls, on a model that FlatFSDP has wrapped, or sharded in place.
Out:  the engine's; nothing is sharded, gathered or reduced here.

Fabric comes in two distributions, `lightning` and the smaller `lightning-fabric`, whose classes are
unrelated. So import `Fabric` from here as well: it is that of `lightning` if installed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatfsdp.checkpoint import Writer
from flatfsdp.checkpoint.ema import EMA
from flatfsdp.checkpoint.loading import load_opened
from flatfsdp.checkpoint.saving import write
from flatfsdp.comm.paths import local_path
from flatfsdp.compat.training_loops import (
    open_folder,
    require_current,
    require_no_checkpoint_io,
    require_place,
)
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.api.methods import UnitMethods

try:
    from lightning import fabric
except ModuleNotFoundError:
    try:
        import lightning_fabric as fabric
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flatfsdp.compat.lightning needs Lightning Fabric ({error}): pip install lightning-fabric"
        ) from error

__all__ = ["Fabric", "FlatFSDPStrategy"]

Fabric = fabric.Fabric


class FlatFSDPStrategy(fabric.strategies.DDPStrategy):
    """Fabric strategy with FlatFSDP as its engine: one process per device, started by Fabric or torchrun.

        fabric = Fabric(devices=2, strategy=FlatFSDPStrategy())
        fabric.launch()
        model = auto_wrap(GPT(config), by_class(Block), device=fabric.device)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = fabric.setup(model, optimizer)
        for tokens, targets in microbatches(model, batches):
            fabric.backward(model(tokens, targets))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        fabric.save("out", {"model": model, "optimizer": optimizer, "step": 1})

    Sharding and dtypes are chosen where the model is wrapped.  Accumulate gradients with `microbatches` or
    with `fabric.no_backward_sync`; the first also tells FP8 layers which microbatch is the first.  A
    checkpoint is a folder that `flatfsdp.checkpoint.load` reads as well, on any number of ranks; objects
    other than model and optimizer become its `extra`, as plain data.

    Args:
        overwrite: whether `fabric.save` replaces a checkpoint in the folder, as Fabric's own strategies do;
            the old one stays loadable until the new one is complete.  False: it raises FileExistsError.
        options: options of Fabric's DDPStrategy, except those for DistributedDataParallel.

    Raises:
        TypeError: for other options.
    """

    def __init__(self, *, overwrite: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._overwrite = overwrite
        if self._ddp_kwargs:
            names = ", ".join(self._ddp_kwargs)
            raise TypeError(f"FlatFSDPStrategy has no option {names}; pass the model's where it is wrapped")
        self._backward_sync_control = _BackwardSync()

    def __repr__(self) -> str:
        """The place of each strategy: the Trainer shows this when it refuses Fabric's as invalid."""
        return "Fabric's FlatFSDPStrategy (the Trainer's is in flatfsdp.compat.lightning.trainer)"

    # ---- setup ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Checks Fabric's precision and plugins, and sets up the processes.

        Raises:
            ValueError: if Fabric would cast, too; if it has a CheckpointIO.
        """
        if type(self.precision) is not fabric.plugins.Precision:
            raise ValueError(
                f"Fabric has precision={self.precision.precision!r}, but FlatFSDP casts; leave it out, and "
                "wrap the model with precision=flatfsdp.Precision(compute=...)"
            )
        instead = "checkpoint.CheckpointManager(folder, async_save=True) writes in a thread"
        require_no_checkpoint_io(self._checkpoint_io, instead)
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Checks that FlatFSDP has sharded the model for this device and these ranks; returns it unchanged.

        Raises:
            TypeError: if FlatFSDP has not wrapped the model.
            ValueError: if it has, but on another device or over other ranks.
        """
        unit = unwrapped(module)
        if not isinstance(unit, UnitMethods):
            raise TypeError(
                f"FlatFSDPStrategy runs a FlatFSDP module, not a {type(module).__name__}; wrap it before "
                "fabric.setup: auto_wrap(model, by_class(Block), device=fabric.device), or shard in place"
            )
        way_out = "wrap it after fabric.launch(), with device=fabric.device, over all ranks, without tp_group"
        require_place(unit, self.root_device, self.world_size, "Lightning", way_out)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer unchanged.

        Raises:
            ValueError: if it was made before the model was wrapped.
        """
        require_current(optimizer, "make it after the model is sharded, of model.parameters()")
        return optimizer

    def module_to_device(self, module: nn.Module) -> None:
        """Moves nothing for a FlatFSDP module: it is on its device, even if its shards are in CPU memory."""
        if not isinstance(unwrapped(module), UnitMethods):
            super().module_to_device(module)

    # ---- training ---------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: UnitMethods,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips gradients by their norm over all ranks, which it returns."""
        return module.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    # ---- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Writes a folder, each rank its part, with `flatfsdp.checkpoint.save`.

        Raises:
            NotImplementedError: with storage_options or a filter.
            ValueError: unless `state` has one model, and at most one optimizer and one EMA; if the path is a
                URL.
            FileExistsError: if the folder holds a checkpoint, and the strategy does not overwrite.
            TypeError: if an object in `state`, or its `state_dict()`, cannot be pickled, or is more than
                plain data, which `load_checkpoint` would refuse.
            CheckpointError: if one of the ranks could not write.
            Each error is raised on every rank.
        """
        if storage_options is not None or filter:
            raise NotImplementedError(
                "FlatFSDPStrategy saves whole models, to a folder; for a part take checkpoint.full_state_dict"
            )
        model, optimizer, ema, rest = _parts(state)
        extra = {key: each.state_dict() if _is_stateful(each) else each for key, each in rest.items()}
        writer = Writer(local_path(self.broadcast(path)), overwrite=self._overwrite, extra=extra)
        write(writer, model, optimizer, ema)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads a folder; or, into a model alone, a file with a plain model's state dict (`load_raw`).

        It is stricter than `flatfsdp.checkpoint.load`, which reads the same folder.

        Args:
            path: the folder or file.
            state: a dict of objects to load into, or a model.
            strict: whether everything in `state` has to be in the checkpoint.
            weights_only: passed to `torch.load` for objects other than model and optimizer; None means True.

        Returns:
            Objects that `state` has no place for.

        Raises:
            ValueError: unless `state` has one model and at most one optimizer; if one of them is not what was
                saved; if the path is a URL.
            KeyError: if another object is missing.
            DamagedCheckpoint: if the contents are not what was written.
            CheckpointError: if `weights_only` refuses an object other than model and optimizer.
            `state` is unchanged after an error.
        """
        folder = local_path(self.broadcast(path))
        if isinstance(unwrapped(state), UnitMethods):
            saved = torch.load(folder, map_location="cpu", mmap=True, weights_only=weights_only)
            state.load_state_dict(saved, strict)
            return {}
        model, optimizer, ema, rest = _parts(state)
        opened, saved = open_folder(folder, model, weights_only)
        missing = rest.keys() - saved.keys()
        if strict and missing:
            raise KeyError(f"the checkpoint {folder} has no {', '.join(sorted(missing))}; it has {[*saved]}")
        load_opened(opened, model, optimizer, ema=ema)
        for key in rest.keys() - missing:
            value = saved.pop(key)
            if _is_stateful(state[key]):
                state[key].load_state_dict(value)
            else:
                state[key] = value
        return saved


class _BackwardSync:
    """Implements `fabric.no_backward_sync`."""

    def no_backward_sync(self, module: UnitMethods, enabled: bool) -> AbstractContextManager[None]:
        """Context that accumulates gradients without reducing them, if enabled."""
        return module.no_sync() if enabled else nullcontext()


def _parts(state: Any) -> tuple[UnitMethods, Optimizer | None, EMA | None, dict[str, Any]]:
    """Splits a state into the model, the optimizer, the EMA of the weights, and everything else by its key.

    Raises:
        ValueError: unless there is one model, and at most one of each of the others.
    """
    state = state if isinstance(state, dict) else {}
    models = [each for each in state.values() if isinstance(unwrapped(each), UnitMethods)]
    optimizers = [each for each in state.values() if isinstance(each, Optimizer)]
    averages = [each for each in state.values() if isinstance(each, EMA)]
    if len(models) != 1 or len(optimizers) > 1 or len(averages) > 1:
        raise ValueError(
            "a checkpoint is of one sharded model and at most one optimizer and one EMA, and the state has "
            f"{len(models)}, {len(optimizers)} and {len(averages)}; pass a dict with one of each"
        )
    known = UnitMethods | Optimizer | EMA
    rest = {key: each for key, each in state.items() if not isinstance(unwrapped(each), known)}
    return models[0], next(iter(optimizers), None), next(iter(averages), None), rest


def _is_stateful(value: object) -> bool:
    """Whether an object has state to save, such as a learning-rate scheduler."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
