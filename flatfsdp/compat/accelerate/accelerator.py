"""`FlatAccelerator`: Accelerate's Accelerator, whose `prepare` shards models in place.

In:   model, optimizer, data loader and scheduler, as for DistributedDataParallel.
Out:  the same objects; the model is sharded, and the optimizer has this rank's parts.

Differences from `Accelerator` under torchrun, which wraps models in DistributedDataParallel:

    a model          stays the same object, so `unwrap_model` has nothing to unwrap
    an optimizer     may be made before `prepare` or after it
    save_state       is collective: `flatfsdp.checkpoint` writes models and optimizers, each rank its part

Everything else is Accelerator's own code.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakTensorKeyDictionary

from flatfsdp import checkpoint
from flatfsdp.checkpoint.background import BackgroundSave
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.comm.device import indexed
from flatfsdp.comm.meeting import meet
from flatfsdp.comm.paths import local_path, path_of_all_ranks
from flatfsdp.compat.accelerate import states
from flatfsdp.compat.accelerate.accelerator_options import unsupported
from flatfsdp.compat.accelerate.optimizers import hand_over, pairs, require_without_state
from flatfsdp.compat.training_loops import (
    on_first_rank,
    plain_optimizer,
    replaced,
    require_place,
    require_possible,
    shard_as_ddp,
)
from flatfsdp.compat.transformers.policy import policy_of
from flatfsdp.contract.claimed import is_unit
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.options import Options, Precision, require_known


class FlatAccelerator(Accelerator):
    """Accelerate's Accelerator, with FlatFSDP as its engine.

        accelerator = FlatAccelerator(gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    A program for `Accelerator` under torchrun needs only this one line changed.  All ranks start from the
    first rank's values, as under DistributedDataParallel.  A model without trained parameters is moved to the
    device and not sharded; an already sharded one is used as is.

    Args:
        policy: which modules become units; None: the layers that a Hugging Face model names
            (`flatfsdp.compat.transformers.policy_of`).
        shard_options: `Options` of `flatfsdp.shard`, such as `dp_shard` for HSDP.  With
            mixed_precision="bf16", `precision` defaults to Precision(compute=torch.bfloat16).
        async_save: whether a thread writes the sharded model while training goes on, from a copy in host
            memory.  The next `save_state` or `load_state`, and `end_training`, wait for it, and raise its
            error on every rank.  Until then the folder has the save before.
        options: options of Accelerator, by name.

    Raises:
        TypeError: for an unknown option of `shard`.
        ValueError: for a feature of Accelerator that FlatFSDP does not support; the message names an
            alternative.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(
        self,
        *,
        policy: WrapPolicy | None = None,
        shard_options: Options | None = None,
        async_save: bool = False,
        **options: Any,
    ) -> None:
        self._shard_options: Options = {} if shard_options is None else {**shard_options}
        require_known("shard", self._shard_options)
        # Before an Accelerator exists and keeps its global state.
        require_possible("FlatAccelerator", unsupported(options, self._shard_options))
        self._policy = policy
        self._background = BackgroundSave() if async_save else None
        # The shard that replaced each parameter, which stays in memory only as long as an optimizer holds it.
        self._parts = WeakTensorKeyDictionary()
        super().__init__(**options)

    # ---- setup ------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares objects as Accelerator does, and shards models with trained parameters.  Collective.

        Args:
            args: models, optimizers, data loaders and schedulers.
            device_placement: whether to move each of them to the device; default: Accelerator's.

        Raises:
            ValueError: if an optimizer of a model to be sharded has state; if the model's layers are not
                known; if `flatfsdp.shard` refuses the model.
            RuntimeError: if a model's structure differs between ranks.
        """
        taken = [each for arg in args if self._is_to_shard(arg) for each in arg.parameters()]
        for optimizer in self._plain_optimizers([*args, *self._optimizers]):
            require_without_state(optimizer, taken)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards a model instead of wrapping it in DistributedDataParallel.  Collective if it does.

        Args:
            model: the model.
            device_placement: whether to move it to the device; default: Accelerator's.
            evaluation_mode: True: the model is not sharded.

        Raises:
            ValueError: if it is sharded already, on another device or over other ranks, or has lanes.
        """
        if not evaluation_mode and self._is_to_shard(model):
            self._shard(model)
        if is_unit(model):
            way_out = "shard it with this device=, over all ranks, without tp_group"
            require_place(model, self._engine_device, self.num_processes, "Accelerate", way_out)
            sharded: Any = model
            if not evaluation_mode and sharded.fsdp_state.policy.lanes is not None:
                raise ValueError(
                    "the model has lanes, whose gradients are added over ranks, and Accelerate divides "
                    "losses and deals out data for an average; leave lanes out, or train with FlatTrainer, "
                    "Lightning, or a loop of your own over flatfsdp.microbatches(model, batches)"
                )
            device_placement = False
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepares an optimizer; parameters of a model that was sharded are replaced by this rank's parts.

        Args:
            optimizer: made before or after the model was sharded.
            device_placement: ignored; the optimizer's state stays with the shards.

        Raises:
            ValueError: if it has state of whole parameters, or was made before `flatfsdp.shard`.
        """
        hand_over(plain_optimizer(optimizer), self._parts)
        # Shards stay where they are, which may be CPU memory.
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a data loader as Accelerator does.

        Raises:
            ValueError: with `even_batches=False`: ranks with more batches would wait for the others.
        """
        if self.num_processes > 1 and not self.even_batches:
            instead = "ranks with more batches would wait; leave it out, gather_for_metrics drops repeats"
            raise ValueError(f"FlatAccelerator cannot do even_batches=False: {instead}")
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    @property
    def _engine_device(self) -> torch.device:
        """Accelerate's device: for CPUs without its per-rank index, because tensors are on plain "cpu"."""
        device: torch.device = self.device
        return torch.device("cpu") if device.type == "cpu" else indexed(device)

    def _is_to_shard(self, candidate: Any) -> bool:
        return (
            isinstance(candidate, nn.Module)
            and not is_unit(candidate)
            and any(parameter.requires_grad for parameter in candidate.parameters())
        )

    def _shard(self, model: nn.Module) -> None:
        if any(map(is_unit, model.modules())):
            name = type(model).__name__
            raise ValueError(f"modules in this {name} are sharded, and it is not; shard it, or pass it plain")
        try:
            policy = policy_of(model) if self._policy is None else self._policy
        except ValueError as error:
            raise ValueError(f"{error}: FlatAccelerator(policy=by_class(...))") from error
        _warn_of_batch_norm(model, self.num_processes)
        before = dict(model.named_parameters(remove_duplicate=False))
        precision = Precision(compute=torch.bfloat16) if self.mixed_precision == "bf16" else None
        options: Options = {"precision": precision, **self._shard_options}
        shard_as_ddp(model, policy, self._engine_device, options)
        for name, part in model.named_parameters(remove_duplicate=False):
            self._parts[before[name]] = part
        for optimizer in self._plain_optimizers(self._optimizers):
            hand_over(optimizer, self._parts)

    @staticmethod
    def _plain_optimizers(candidates: Iterable[Any]) -> list[torch.optim.Optimizer]:
        return [plain_optimizer(each) for each in candidates if isinstance(each, torch.optim.Optimizer)]

    # ---- training ---------------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clips gradients by their norm over all ranks, which it returns.  Collective.

        Raises:
            RuntimeError: while gradients are being accumulated and are not reduced yet.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        trained = {id(each) for each in parameters if each.requires_grad}
        for model in self._sharded:
            own = {id(each) for each in model.parameters() if each.requires_grad}
            if own & trained and not self.sync_gradients:
                way_out = "clip them under `if accelerator.sync_gradients:`"
                raise RuntimeError(f"accumulated gradients that are not reduced yet have no norm; {way_out}")
            if own == trained:
                return model.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Supports a single rank only, because each forward is collective.

        Raises:
            NotImplementedError: with several ranks.
        """
        if self.num_processes > 1:
            instead = "all ranks need as many batches, which Accelerate's data loaders give; leave it out"
            raise NotImplementedError(f"FlatAccelerator cannot do join_uneven_inputs: {instead}")
        return super().join_uneven_inputs(joinables, even_batches)

    # ---- whole parameters -------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole tensors on all ranks; those of a sharded model are in CPU memory.  Collective."""
        if is_unit(model):
            self._meet(model, "get_state_dict")
            return _apart(checkpoint.full_state_dict(model, cpu_offload=True))
        return _apart(super().get_state_dict(model, unwrap))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Saves as Accelerator does; tensors gathered into one buffer are not mistaken for tied ones.

        Raises:
            ValueError: if `f` is a URL.
        """
        super().save(_apart(obj) if safe_serialization else obj, local_path(f), safe_serialization)

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Saves as Accelerator does.  Collective.

        Args:
            model: sharded or not.
            save_directory: the same on all ranks.
            options: further options of Accelerator.

        Raises:
            ValueError: if the folder is a URL, or ranks pass different ones.
        """
        folder = self._same_folder(save_directory, "save_model") if is_unit(model) else save_directory
        super().save_model(model, str(local_path(folder)), **options)

    # ---- checkpoints ------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> Any:
        """Saves as Accelerator does, with sharded models and optimizers in `flatfsdp.checkpoint`'s format.

        Collective.  Any number of ranks can load the result; random-number states are restored only for as
        many ranks as saved them.  The folder's earlier save can be loaded until the new one is complete.

        Args:
            output_dir: the same on all ranks, in a file system that all ranks share.  With automatic names it
                is ignored, as by Accelerator.
            safe_serialization: whether plain models are saved as safetensors.
            options: further options of Accelerator.

        Returns:
            The folder.

        Raises:
            ValueError: if ranks pass different folders, or a URL; if an automatically named one holds a
                checkpoint; if a model has several optimizers, or one optimizer has several models; with
                `async_save`, if there are several sharded models.
            CheckpointError: if a rank could not write; with `async_save`, if the save before has failed.
            Each error is raised on every rank.
        """
        saved = self._saved()
        naming = self.project_configuration
        if naming.automatic_checkpoint_naming:
            output_dir = local_path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if not saved:
            return super().save_state(_checked(output_dir), safe_serialization, **options)
        first = saved[0][0]
        if self._background is not None and len(saved) > 1:
            raise ValueError(
                f"async_save writes one sharded model, and {len(saved)} are prepared; leave it out"
            )
        folder = self._same_folder(output_dir, "save_state")
        self._wait_for_save()
        name = on_first_rank(first, states.begin_save, folder, naming.automatic_checkpoint_naming)
        place, mark = folder / name, states.Mark(name, len(saved), self.num_processes, self.step)
        limit = naming.total_limit if naming.automatic_checkpoint_naming else None
        try:
            naming_is_off = replaced(naming, automatic_checkpoint_naming=False)
            with raising_on_all(first), self._without_sharded(), naming_is_off:
                super().save_state(str(place), safe_serialization, **options)
            if self._background is not None:
                self._write_in_background(folder, mark, limit)
                return folder
            for number, (model, optimizer) in enumerate(saved):
                checkpoint.save(place / f"flatfsdp-{number}", model, optimizer)
            on_first_rank(first, states.end_save, folder, mark)
        except Exception:
            # Also if another rank is gone by now, and this save is the folder's already.
            if self.is_main_process and not states.is_current(folder, name):
                shutil.rmtree(place, ignore_errors=True)
            raise
        # After the save: until it is complete, the earlier ones may be all there is.
        on_first_rank(first, states.remove_earlier, folder, name, limit)
        return folder

    def _write_in_background(self, folder: Path, mark: states.Mark, limit: int | None) -> None:
        """Begins to write the one sharded model; then the save becomes the folder's."""
        assert self._background is not None
        ((model, optimizer),) = self._saved()
        is_first = self.is_main_process

        def end() -> None:
            if is_first:
                states.end_save(folder, mark)
                states.remove_earlier(folder, mark.save, limit)

        writer = checkpoint.Writer(folder / mark.save / "flatfsdp-0")
        state = checkpoint.sharded_training_state(model, optimizer)
        self._background.start(str(folder), writer, state, model, end)

    def _wait_for_save(self) -> None:
        if self._background is not None:
            self._background.wait()

    def end_training(self) -> None:
        """Ends training as Accelerator does, after the save in flight.  Collective with `async_save`.

        Raises:
            CheckpointError: on every rank, if that save has failed.
        """
        self._wait_for_save()
        super().end_training()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Loads what `save_state` has written; call it after `prepare`.  Collective.

        Args:
            input_dir: the same on all ranks; None, with automatic names: the newest complete checkpoint.
            load_kwargs: options for loading plain models, as Accelerator's.
            options: further options of Accelerator.

        Raises:
            ValueError: if no save into the folder was completed, or it does not hold what was prepared; if
                ranks pass different folders, or a URL; if another number of ranks saved the positions of data
                loaders.
            DamagedCheckpoint: if the contents are not what was written.
            Each error is raised on every rank.
        """
        saved = self._saved()
        if not saved:
            if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
                local_path(self.project_dir)
            super().load_state(_checked(input_dir), load_kwargs, **options)
            return
        first = saved[0][0]
        self._meet(first, "load_state")
        self._wait_for_save()
        with raising_on_all(first):
            if input_dir is None:
                if not self.project_configuration.automatic_checkpoint_naming:
                    raise ValueError("load_state needs a folder, as automatic_checkpoint_naming is off")
                input_dir = states.newest(Path(self.project_dir) / "checkpoints")
        folder = self._same_folder(input_dir, "load_state")
        mark = on_first_rank(first, states.mark_of, folder, len(saved))
        if mark.ranks != self.num_processes and self.is_main_process:
            by = f"by {mark.ranks} ranks, and {self.num_processes} load it"
            warnings.warn(f"{folder} was saved {by}: random numbers are not restored", stacklevel=2)
        if mark.ranks != self.num_processes and any(map(_has_state, self._dataloaders)):
            raise ValueError(
                f"{folder} was saved by {mark.ranks} ranks, and {self.num_processes} load it, whose data "
                "loaders would go on elsewhere: load it on as many, or without use_stateful_dataloader, and "
                "leave out what was read by accelerator.skip_first_batches"
            )
        for number, (model, optimizer) in enumerate(saved):
            checkpoint.load(folder / mark.save / f"flatfsdp-{number}", model, optimizer)
        with raising_on_all(first), self._without_sharded():
            super().load_state(str(folder / mark.save), load_kwargs, **options)
        # Ranks beyond the number that saved have no file with their step.
        self.step = mark.step

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses hooks of `save_state` and `load_state` for models.

        Raises:
            NotImplementedError: always; such hooks save whole models, and ranks have only parts.
        """
        raise NotImplementedError(
            "FlatAccelerator has no hooks for models: for another format call save_pretrained or save_model "
            "on all ranks after save_state; for other objects there is register_for_checkpointing"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    @property
    def _sharded(self) -> list[Any]:
        return [model for model in self._models if is_unit(model)]

    def _saved(self) -> list[tuple[Any, torch.optim.Optimizer | None]]:
        """The sharded models, each with its optimizer."""
        return pairs(self._sharded, self._plain_optimizers(self._optimizers))

    def _without_sharded(self) -> AbstractContextManager[None]:
        """Context that hides sharded models and their optimizers from Accelerator."""
        ours = [id(optimizer) for _, optimizer in self._saved()]
        models = [model for model in self._models if not is_unit(model)]
        optimizers = [each for each in self._optimizers if id(plain_optimizer(each)) not in ours]
        return replaced(self, _models=models, _optimizers=optimizers)

    def _meet(self, model: Any, doing: str) -> None:
        """Waits until all ranks do this."""
        meet(world_of(model)[0], doing, model.fsdp_state.policy.timeout)

    def _same_folder(self, folder: str | os.PathLike[str] | None, doing: str) -> Path:
        """The folder that all ranks pass.

        Raises:
            ValueError: if their folders differ, or one is a URL; on all ranks.
            RuntimeError: if other ranks are not about to do the same.
        """
        if folder is None:
            raise ValueError(f"{doing} needs a folder, as automatic_checkpoint_naming is off")
        self._meet(self._sharded[0], doing)
        world, device = world_of(self._sharded[0])
        return path_of_all_ranks(os.path.expanduser(folder), [world], device)


def _has_state(loader: Any) -> bool:
    """Whether Accelerate saves and loads a data loader's position."""
    return getattr(loader, "use_stateful_dataloader", False)


def _checked(folder: str | os.PathLike[str] | None) -> str | None:
    """A folder for Accelerator's own methods, which is local."""
    return None if folder is None else str(local_path(folder))


def _warn_of_batch_norm(model: nn.Module, ranks: int) -> None:
    """Warns of running statistics that each rank keeps for itself.

    DistributedDataParallel copies the first rank's buffers to all ranks in each forward.
    """
    kinds = (module for module in model.modules() if not isinstance(module, nn.SyncBatchNorm))
    if ranks > 1 and any(isinstance(each, _BatchNorm) and each.track_running_stats for each in kinds):
        warnings.warn(
            f"{type(model).__name__} has BatchNorm, whose running statistics are each rank's own, not the "
            "first rank's as in DDP; convert it before: nn.SyncBatchNorm.convert_sync_batchnorm(model)",
            stacklevel=2,
        )


def _apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Gives each tensor that is a slice of a larger storage its own; tied ones keep a common one.

    Accelerate takes tensors with a common storage, such as slices of one gathered buffer, for tied weights:
    it would write one of them, and log that it left out the others.
    """
    found = dict(state)
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies:
                copies[place] = value.detach().clone(memory_format=torch.contiguous_format)
            found[name] = copies[place]
    return found
