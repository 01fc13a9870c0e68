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
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatfsdp import checkpoint
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.comm.device import indexed
from flatfsdp.comm.meeting import meet
from flatfsdp.comm.objects import broadcast_object
from flatfsdp.comm.paths import local_path, path_of_all_ranks
from flatfsdp.comm.ranks import Ranks
from flatfsdp.compat.accelerate import states
from flatfsdp.compat.accelerate.accelerator_options import precision_of, require_possible, require_shardable
from flatfsdp.compat.accelerate.apart import apart
from flatfsdp.compat.accelerate.renamed import Renamed, require_without_state
from flatfsdp.compat.transformers.policy import policy_of
from flatfsdp.contract.claimed import is_unit
from flatfsdp.engine.api.shard import shard
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.options import Options


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
        shard_options: `Options` of `flatfsdp.shard`, such as `reshard_after_forward`.  With
            mixed_precision="bf16", `precision` defaults to Precision(compute=torch.bfloat16).
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
        **options: Any,
    ) -> None:
        require_possible(options)
        self._shard_options: Options = {} if shard_options is None else {**shard_options}
        require_shardable(self._shard_options)
        self._policy = policy
        self._renamed = Renamed()
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
        """
        if not evaluation_mode and self._is_to_shard(model):
            self._shard(model)
        if is_unit(model):
            self._require_of_all_ranks(model)
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
        self._renamed.hand_to(states.plain_optimizer(optimizer))
        # Shards stay where they are, which may be CPU memory.
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a data loader as Accelerator does.

        Raises:
            ValueError: with `even_batches=False`: ranks with more batches would wait for the others.
        """
        if self.num_processes > 1 and not self.even_batches:
            raise ValueError(
                "FlatAccelerator cannot do even_batches=False: each forward is collective, and ranks with "
                "more batches would wait; leave it out, and gather_for_metrics drops what was added"
            )
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
            raise ValueError(
                f"modules in this {type(model).__name__} are sharded, and it is not; shard it, too, by "
                "flatfsdp.shard, or give FlatAccelerator a plain model"
            )
        try:
            policy = policy_of(model) if self._policy is None else self._policy
        except ValueError as error:
            raise ValueError(f"{error}: FlatAccelerator(policy=by_class(...))") from error
        _warn_of_batch_norm(model, self.num_processes)
        before = dict(model.named_parameters(remove_duplicate=False))
        # As under DistributedDataParallel: programs need not seed all ranks alike.
        options: Options = {
            "precision": precision_of(self.mixed_precision),
            "sync_module_states": True,
            **self._shard_options,
            "device": self._engine_device,
        }
        shard(model, policy, **options)
        self._renamed.note(before, dict(model.named_parameters(remove_duplicate=False)))
        for optimizer in self._plain_optimizers(self._optimizers):
            self._renamed.hand_to(optimizer)

    def _require_of_all_ranks(self, model: Any) -> None:
        """Checks that the model is sharded on Accelerate's device and over all ranks.

        Raises:
            ValueError: if the model is sharded on another device, or over other ranks.
        """
        device, ranks = model.fsdp_state.shared.device, model.fsdp_state.grid.num_ranks
        if device != self._engine_device:
            raise ValueError(
                f"the model is sharded on {device}, and Accelerate's device is {self._engine_device}; shard "
                "it with this device="
            )
        if ranks != self.num_processes:
            raise ValueError(
                f"the model is data parallel over {ranks} of {self.num_processes} ranks, and Accelerate "
                "gives each of them other data; shard it over all ranks, without tp_group"
            )

    @staticmethod
    def _plain_optimizers(candidates: Iterable[Any]) -> list[torch.optim.Optimizer]:
        return [
            states.plain_optimizer(each) for each in candidates if isinstance(each, torch.optim.Optimizer)
        ]

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
                raise RuntimeError(
                    "gradients are accumulated and not reduced yet, so they have no norm; clip them under "
                    "`if accelerator.sync_gradients:`"
                )
            if own == trained:
                return model.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Supports a single rank only, because each forward is collective.

        Raises:
            NotImplementedError: with several ranks.
        """
        if self.num_processes > 1:
            raise NotImplementedError(
                "FlatAccelerator cannot do join_uneven_inputs: each forward is collective, and all ranks "
                "need as many batches; leave it out, Accelerate's data loaders see to that"
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # ---- whole parameters -------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole tensors on all ranks; those of a sharded model are in CPU memory.  Collective."""
        if is_unit(model):
            self._meet(model, "get_state_dict")
            return apart(checkpoint.full_state_dict(model, cpu_offload=True))
        return apart(super().get_state_dict(model, unwrap))

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Saves as Accelerator does; tensors gathered into one buffer are not mistaken for tied ones.

        Raises:
            ValueError: if `f` is a URL.
        """
        super().save(apart(obj) if safe_serialization else obj, local_path(f), safe_serialization)

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
                checkpoint; if a model has several optimizers, or one optimizer has several models.
            CheckpointError: if a rank could not write.
            Each error is raised on every rank.
        """
        saved = self._saved()
        naming = self.project_configuration
        if naming.automatic_checkpoint_naming:
            output_dir = local_path(self.project_dir) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if not saved:
            return super().save_state(_checked(output_dir), safe_serialization, **options)
        first = saved[0].model
        folder = self._same_folder(output_dir, "save_state")
        with raising_on_all(first):
            if naming.automatic_checkpoint_naming and states.is_marked(folder):
                raise ValueError(
                    f"{folder} holds a checkpoint; set project_configuration.iteration to the number of the "
                    "next one"
                )
            name = states.begin_save(folder) if self.is_main_process else ""
        name = broadcast_object(name, *_all_ranks(first))
        try:
            with raising_on_all(first), self._without_sharded(), _without_names(naming):
                super().save_state(str(folder / name), safe_serialization, **options)
            for number, (model, optimizer) in enumerate(saved):
                checkpoint.save(states.checkpoint_of(folder / name, number), model, optimizer)
            with raising_on_all(first):
                if self.is_main_process:
                    states.end_save(folder, states.Mark(name, len(saved), self.num_processes, self.step))
        except Exception:
            # Also if another rank is gone by now, and this save is the folder's already.
            if self.is_main_process and not states.is_current(folder, name):
                states.discard_save(folder, name)
            raise
        # After the save: until it is complete, the earlier ones may be all there is.
        with raising_on_all(first):
            if self.is_main_process:
                states.remove_earlier(folder, name)
                if naming.automatic_checkpoint_naming and naming.total_limit:
                    states.remove_others(folder, naming.total_limit)
        return folder

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
                ranks pass different folders, or a URL.
            DamagedCheckpoint: if the contents are not what was written.
            Each error is raised on every rank.
        """
        saved = self._saved()
        if not saved:
            if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
                local_path(self.project_dir)
            super().load_state(_checked(input_dir), load_kwargs, **options)
            return
        self._meet(saved[0].model, "load_state")
        with raising_on_all(saved[0].model):
            input_dir = self._folder_to_load(input_dir)
        folder = self._same_folder(input_dir, "load_state")
        with raising_on_all(saved[0].model):
            mark = states.mark_of(folder, len(saved))
        if mark.ranks != self.num_processes and self.is_main_process:
            warnings.warn(
                f"{folder} was saved by {mark.ranks} ranks, and {self.num_processes} load it: random "
                "numbers are not restored",
                stacklevel=2,
            )
        for number, (model, optimizer) in enumerate(saved):
            checkpoint.load(states.checkpoint_of(folder / mark.save, number), model, optimizer)
        with raising_on_all(saved[0].model), self._without_sharded():
            super().load_state(str(folder / mark.save), load_kwargs, **options)
        # Ranks beyond the number that saved have no file with their step.
        self.step = mark.step

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses hooks of `save_state` and `load_state` for models.

        Raises:
            NotImplementedError: always; such hooks save whole models, and ranks have only parts.
        """
        raise NotImplementedError(
            "FlatAccelerator has no hooks for models in save_state and load_state: flatfsdp.checkpoint saves "
            "them. For another format call unwrap_model(model).save_pretrained(folder), or save_model, on "
            "all ranks after save_state; what else is to be saved takes register_for_checkpointing"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    @property
    def _sharded(self) -> list[Any]:
        return [model for model in self._models if is_unit(model)]

    def _saved(self) -> list[states.Saved]:
        return states.pairs(self._sharded, self._plain_optimizers(self._optimizers))

    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Hides sharded models and their optimizers from Accelerator inside the context."""
        models, optimizers = self._models, self._optimizers
        ours = [saved.optimizer for saved in self._saved()]
        self._models = [model for model in models if not is_unit(model)]
        self._optimizers = [
            each for each in optimizers if not any(states.plain_optimizer(each) is own for own in ours)
        ]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _folder_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser()
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, as automatic_checkpoint_naming is off")
        return states.newest(Path(self.project_dir) / "checkpoints")

    def _meet(self, model: Any, doing: str) -> tuple[Ranks, torch.device]:
        """Waits until all ranks do this; returns the ranks and the device of their communication."""
        world, device = world_of(model)
        meet(world, doing, model.fsdp_state.policy.timeout)
        return world, device

    def _same_folder(self, folder: str | os.PathLike[str] | None, doing: str) -> Path:
        """The folder that all ranks pass.

        Raises:
            ValueError: if their folders differ, or one is a URL; on all ranks.
            RuntimeError: if other ranks are not about to do the same.
        """
        if folder is None:
            raise ValueError(f"{doing} needs a folder, as automatic_checkpoint_naming is off")
        world, device = self._meet(self._sharded[0], doing)
        return path_of_all_ranks(os.path.expanduser(folder), [world], device)


def _all_ranks(model: Any) -> tuple[list[Ranks], torch.device]:
    world, device = world_of(model)
    return [world], device


def _checked(folder: str | os.PathLike[str] | None) -> str | None:
    """A folder for Accelerator's own methods, which is local."""
    return None if folder is None else str(local_path(folder))


@contextmanager
def _without_names(naming: Any) -> Iterator[None]:
    """Context in which Accelerator saves to the folder it is given."""
    before, naming.automatic_checkpoint_naming = naming.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        naming.automatic_checkpoint_naming = before


def _warn_of_batch_norm(model: nn.Module, ranks: int) -> None:
    """Warns of running statistics that each rank keeps for itself.

    DistributedDataParallel copies the first rank's buffers to all ranks in each forward.
    """
    kinds = (module for module in model.modules() if not isinstance(module, nn.SyncBatchNorm))
    if ranks > 1 and any(isinstance(each, _BatchNorm) and each.track_running_stats for each in kinds):
        warnings.warn(
            f"{type(model).__name__} has BatchNorm, whose running statistics are each rank's own here, and "
            "the first rank's under DistributedDataParallel: evaluations differ; convert it before, by "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model)",
            stacklevel=2,
        )
