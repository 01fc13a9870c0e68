"""`FlatTrainer`: transformers' Trainer on a model that it shards in place.

In:   the arguments of `Trainer`, and `FlatArguments`.
Out:  the results of `Trainer`: losses, gradient norms, checkpoints that `from_pretrained` reads.

Differences from `Trainer` under torchrun, which wraps the model in DistributedDataParallel:

    the model       is sharded as soon as the trainer is made, before there is an optimizer
    other models    (references, rewards) are moved to the device, and sharded if requested
    a microbatch    tells the engine its place in the step; it runs as a CUDA graph if requested
    AdamW           is `flatfsdp.optim.AdamW`, one kernel
    with lanes      data, divisions and dropout depend on a microbatch's number over all ranks (`in_lanes.py`)
    a checkpoint    is written by all ranks: files for `from_pretrained`, and `flatfsdp/` for resuming
    logs            have the figures of `flatfsdp.profiling.Metrics`, too

Everything else is `Trainer`'s own code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset, SequentialSampler
from transformers.trainer import OPTIMIZER_NAME, PREFIX_CHECKPOINT_DIR, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import rotate_checkpoints

import flatfsdp.optim
from flatfsdp import checkpoint
from flatfsdp.checkpoint.background import BackgroundSave
from flatfsdp.checkpoint.owner import OwnedWriter, Owner
from flatfsdp.checkpoint.saving import write
from flatfsdp.checkpoint.stages import raising_on_all, world_of
from flatfsdp.comm.lanes import Lanes
from flatfsdp.comm.paths import local_path, path_of_all_ranks
from flatfsdp.compat.samples_in_lanes import SamplesInLanes
from flatfsdp.compat.training_loops import (
    on_first_rank,
    plain_optimizer,
    replaced,
    require_current,
    require_possible,
)
from flatfsdp.compat.transformers.files.load import load_hf
from flatfsdp.compat.transformers.files.save import save_hf
from flatfsdp.compat.transformers.trainer.flat_arguments import FlatArguments, unsupported
from flatfsdp.compat.transformers.trainer.flops import FlopsOfTokens
from flatfsdp.compat.transformers.trainer.in_lanes import StepInLanes
from flatfsdp.compat.transformers.trainer.whole import STATE, begin_save, end_save, newest_whole, whole_one
from flatfsdp.contract.claimed import is_unit
from flatfsdp.engine.replay.eager_or_replayed import Replayed, replayed
from flatfsdp.fp8 import autocast
from flatfsdp.microbatch import microbatches
from flatfsdp.profiling.metrics import Metrics

logger = logging.getLogger(__name__)

SIZES = "sizes of a step"
"""What such a folder has beside them: from it and the steps follows which samples have been read."""

T = TypeVar("T", bound="FlatTrainer")


class _ShardsLast(type):
    """Shards a trainer's model when the `__init__` of every class has returned.

    Trainers change their model there: they load it, add adapters, switch dropout off, replace its forward.
    """

    def __call__(cls: type[T], *args: Any, **options: Any) -> T:  # type: ignore[misc]  # a class of trainers
        trainer: T = type.__call__(cls, *args, **options)
        trainer._shard()
        return trainer


class FlatTrainer(transformers.Trainer, metaclass=_ShardsLast):
    """transformers' Trainer, whose model FlatFSDP shards in place.

        trainer = FlatTrainer(model, TrainingArguments("out", bf16=True), train_dataset=data)
        trainer.train()

    A program for `Trainer` under torchrun needs only this one line changed: pass the model from
    `from_pretrained`, or one on the meta device.  Afterwards `trainer.model` is sharded, with the same class,
    names and methods.  All ranks have to call `train`, `evaluate`, `predict` and `save_model`.

    A trainer that is derived from `Trainer` becomes one of these by `class Mine(FlatTrainer, Theirs)`.  The
    model is sharded after the `__init__` of all classes, or when one of them creates the optimizer.

    Args:
        args: positional arguments of `Trainer`, or of the class after this one.  The model may be already
            sharded in place.
        flat: how to shard and compute the model; None: `FlatArguments()`.
        options: arguments of `Trainer` by name, except `model_init`.  An optimizer in `optimizers` has to be
            made from an already sharded model; otherwise use `optimizer_cls_and_kwargs`.

    Raises:
        ValueError: for unsupported TrainingArguments; if `output_dir` is a URL; if the model cannot be
            sharded; for an optimizer made before the model was sharded.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, flat: FlatArguments | None = None, **options: Any) -> None:
        self._flat = FlatArguments() if flat is None else flat
        self._microbatch: Callable[..., Tensor] | None = None
        self._places: Any = None
        self._left = 0
        self._lane_step: StepInLanes | None = None
        self._background = BackgroundSave() if self._flat.async_save else None
        self._owners: dict[Path, Owner] = {}
        super().__init__(*args, **options)

    # ---- what surrounds the model -----------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Creates `Trainer`'s Accelerator, which leaves the model to this trainer."""
        # The first thing that Trainer does with model and arguments.
        if self.model is None:
            raise ValueError("FlatTrainer shards one model: pass model, and no model_init")
        local_path(self.args.output_dir or ".")
        require_possible("FlatTrainer", unsupported(self.model, self.args, self._flat))
        super().create_accelerator_and_postprocess()
        self._prepare_other = self.accelerator.prepare_model
        self.accelerator.prepare_model = self._prepare_model

    def _prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Accelerate's `prepare_model`: the trained model stays as it is, and others may be sharded."""
        if model is self.model:
            if model not in self.accelerator._models:
                self.accelerator._models.append(model)
            return model
        if evaluation_mode and self._flat.shard_others and not is_unit(model):
            self._flat.prepare_other(model, self.args)
        if is_unit(model):
            device_placement, evaluation_mode = False, True
        prepared: nn.Module = self._prepare_other(model, device_placement, evaluation_mode)
        return prepared

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: sharding moves it part by part, so that no device holds all of it."""

    def _shard(self) -> None:
        """Shards the model, once.  Collective."""
        if self._microbatch is not None:
            return
        # Before parameters are sharded, which changes their shapes.
        self._flops_of = FlopsOfTokens.of(self.model)
        model = self._flat.prepare(self.model, self.args)
        if self.optimizer is not None:
            require_current(self.optimizer, "pass optimizer_cls_and_kwargs, and FlatTrainer makes it")
        self._microbatch = replayed(model, self._run) if self._flat.replay else self._run
        compute = self.model.fsdp_state.policy.precision.compute
        self._figures = Metrics(
            self.args.device,
            gemms="fp8" if self._flat.fp8 is not None else "fp32" if compute == torch.float32 else "bf16",
            replayed=self._microbatch if isinstance(self._microbatch, Replayed) else None,
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Creates `Trainer`'s optimizer, of the sharded model."""
        self._shard()
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """The optimizer class and options of `Trainer`, with our AdamW instead of torch's."""
        made, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        if made is torch.optim.AdamW:
            return flatfsdp.optim.AdamW, {key: value for key, value in options.items() if key != "fused"}
        return made, options

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Not supported: each trial needs its own model.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("FlatTrainer has one model; make a trainer for each trial")

    # ---- data -------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The data loader of `Trainer`; with lanes, this rank's samples come in the order of its lanes.

        Raises:
            ValueError: with lanes, if samples have no order that is the same on any number of ranks, or lanes
                cannot have equally many microbatches.
        """
        loader: Any = super().get_train_dataloader()
        if self._lanes is None:
            return loader
        batches: Any = getattr(loader, "batch_sampler", None)
        # With several ranks Accelerate's own is around it.
        batches = getattr(batches, "batch_sampler", batches)
        if isinstance(loader.dataset, IterableDataset) or not hasattr(batches, "sampler"):
            raise ValueError(
                "with lanes a batch is known by its number over all ranks, for which this data set or its "
                "loader has no order; take a data set with a length, and the loader of FlatTrainer"
            )
        if not isinstance(batches.sampler, SequentialSampler) and not hasattr(batches.sampler, "set_epoch"):
            kind = type(batches.sampler).__name__
            raise ValueError(
                f"with lanes the order of samples has to be the same on all ranks, and {kind} has no "
                "set_epoch(), so it may draw random numbers that are each rank's own; give it one"
            )
        grid, on_rank = self.model.fsdp_state.grid, self.args.gradient_accumulation_steps
        if grid.num_ranks != self.args.world_size:
            raise ValueError(
                f"the model is data parallel over {grid.num_ranks} of {self.args.world_size} ranks, and "
                "Trainer gives each of them other data; shard it over all"
            )
        names = "gradient_accumulation_steps", "dataloader_drop_last=True"
        # Accelerate makes batches of the samples, and gives each N-th to this rank.
        samples = SamplesInLanes(batches, on_rank, names, self._lanes, grid, copies=grid.num_ranks)
        loader.set_sampler(samples)
        return loader

    @property
    def _lanes(self) -> Lanes | None:
        lanes: Lanes | None = self.model.fsdp_state.policy.lanes if is_unit(self.model) else None
        return lanes

    # ---- microbatches -----------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """The microbatches of a step, as `Trainer` collects them; tells the engine their number."""
        with self._figures.loading():
            samples, count = super().get_batch_samples(*args, **kwargs)
        self._end_step()
        numbers: Sequence[int] = range(len(samples))
        if self._lanes is not None:
            grid = self.model.fsdp_state.grid
            self._lane_step = StepInLanes(self._lanes, grid, len(samples), self.args.device)
            numbers = self._lane_step.numbers
        self._places, self._left = microbatches(self.model, numbers), len(samples)
        return samples, count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a microbatch; returns its loss, detached.

        With lanes, the last microbatch returns the loss of the step over all ranks, and others return 0.
        """
        number = 0 if self._places is None else next(self._places)
        step = self._lane_step
        # Trainers that generate what they learn from bring a list here.
        tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if isinstance(tokens, Tensor):
            flops = None if self._flops_of is None else self._flops_of(tokens)
            self._figures.count(tokens.numel(), flops)
        if isinstance(num_items_in_batch, int):
            num_items_in_batch = torch.tensor(num_items_in_batch, device=self.args.device)
        if self._flat.replay:
            # Before what is recorded; tokenizers return a mapping that `replayed` cannot inspect.
            inputs = dict(self._prepare_inputs(inputs))
        assert self._microbatch is not None
        # Random numbers outside of microbatches stay the same on all ranks.
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=step is not None):
            if step is not None:
                # Dropout depends on the number of the microbatch, not on the rank that runs it.
                # Counted as if each step had as many, which the last one of an epoch may not have.
                most = self.args.gradient_accumulation_steps * self.model.fsdp_state.grid.num_ranks
                torch.manual_seed(self.args.seed * 1_000_003 + self.state.global_step * most + number)
                # By which `Trainer` divides losses that are not divided by a number of items.
                self.current_gradient_accumulation_steps = step.total
            loss = self._microbatch(inputs, num_items_in_batch, self.current_gradient_accumulation_steps)
        self._left -= 1
        if step is not None:
            step.note(number, loss)
            loss = torch.zeros_like(loss) if self._left else step.loss(self.accelerator)
        if not self._left:
            self._end_step()
        return loss

    def _run(self, inputs: Any, num_items_in_batch: Tensor | None, _accumulated: int) -> Tensor:
        """Runs one microbatch.

        Args:
            inputs: the batch.
            num_items_in_batch: number of labels in the step.
            _accumulated: number of microbatches, by which `Trainer` divides; another number needs another
                recording.
        """
        # `Trainer` multiplies by the number of ranks what is then averaged over them; lanes are added.
        averages = self.args.average_tokens_across_devices and self._lane_step is None
        with replaced(self.args, average_tokens_across_devices=averages):
            if not self._flat.replay:
                return super().training_step(self.model, inputs, num_items_in_batch)
            # `Trainer` would prepare them a second time.
            vars(self)["_prepare_inputs"] = lambda prepared: prepared
            try:
                return super().training_step(self.model, inputs, num_items_in_batch)
            finally:
                del vars(self)["_prepare_inputs"]

    def _end_step(self) -> None:
        if self._places is not None:
            self._places.close()
            self._places = self._lane_step = None

    def compute_loss_context_manager(self) -> Any:
        """The contexts of `Trainer`, in training and evaluation, with FP8 autocast inside."""
        contexts = super().compute_loss_context_manager()
        if self._flat.fp8 is not None:
            contexts.enter_context(autocast(recipe=self._flat.fp8))
        return contexts

    # ---- figures ----------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any], *rest: Any, **options: Any) -> None:
        """Logs as `Trainer` does; with the loss of training steps, the figures of `Metrics` as well."""
        if self.control.should_log and "loss" in logs:
            figures = self._figures.report().items()
            logs |= {name: value for name, value in figures if value is not None}
        super().log(logs, *rest, **options)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluates as `Trainer` does; its time is none of the training's figures."""
        with self._figures.paused():
            return super().evaluate(*args, **options)

    # ---- checkpoints ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **options: Any) -> Any:
        """Trains as `Trainer` does.  Collective over all ranks.

        Args:
            resume_from_checkpoint: True: the newest checkpoint in `output_dir` that is whole; or the folder
                of one.
            rest: further positional arguments of `Trainer.train`.
            options: further arguments of `Trainer.train`.

        Raises:
            ValueError: if there is no whole checkpoint; if ranks pass different folders, or a URL.
            CheckpointError: if a checkpoint could not be saved; with `async_save`, raised by the next save,
                or at the end.
        """
        self._wait_for_save()
        if resume_from_checkpoint is not None and resume_from_checkpoint is not False:
            resume_from_checkpoint = self._to_resume_from(resume_from_checkpoint)
        self._figures.restart()
        result = super().train(resume_from_checkpoint, *rest, **options)
        self._wait_for_save()
        return result

    def _wait_for_save(self) -> None:
        if self._background is not None:
            self._background.wait()

    def _to_resume_from(self, asked: str | bool) -> str:
        world, device = world_of(self.model)
        path = (self.args.output_dir or ".") if isinstance(asked, bool) else asked
        folder = path_of_all_ranks(path, [world], device)
        # One rank looks, so that all load the same.
        return str(on_first_rank(self.model, newest_whole if isinstance(asked, bool) else whole_one, folder))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves as `Trainer` does; an earlier checkpoint of this step stays whole until the new one is."""
        with self._figures.paused():
            self._wait_for_save()
            world, device = world_of(self.model)
            run = path_of_all_ranks(self._get_output_dir(trial), [world], device)
            folder = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            # One for each folder: `output_dir` may be another one in the next training.
            owner = self._owners.setdefault(run, Owner(run))
            with raising_on_all(self.model):
                if self.args.should_save:
                    owner.require()
                    begin_save(run, folder)
            if self._background is None or self.args.save_only_model:
                super()._save_checkpoint(model, trial)
                if self.args.should_save:
                    end_save(folder)
                return
            # Others are removed when this one is whole, by the thread.
            with replaced(self.args, save_total_limit=None):
                super()._save_checkpoint(model, trial)
            self._write_in_background(run, folder)

    def _write_in_background(self, run: Path, folder: Path) -> None:
        args, best, is_first = self.args, self.state.best_model_checkpoint, self.args.should_save
        limit = args.save_total_limit
        if is_first:
            # Again, with the limit.
            torch.save(args, folder / TRAINING_ARGS_NAME)

        def remove_others() -> None:
            if is_first:
                rotate_checkpoints(str(run), limit, best, use_mtime=True)
                end_save(folder)

        assert self._background is not None
        state = checkpoint.sharded_training_state(self.model, plain_optimizer(self.optimizer))
        step = f"step {self.state.global_step}"
        self._background.start(step, self._writer(folder), state, self.model, remove_others)

    def _writer(self, folder: Path) -> OwnedWriter:
        """Writes the shards of a checkpoint of the run whose folder it is in."""
        return OwnedWriter(self._owners[folder.parent], folder / STATE, extra=self._extra, overwrite=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes files for `from_pretrained`; of a PEFT model its adapters.  Collective over all ranks."""
        folder = local_path(output_dir or self.args.output_dir or ".")
        if isinstance(self.model, transformers.PreTrainedModel):
            save_hf(self.model, folder)
        elif hasattr(self.model, "peft_config"):
            self.model.save_pretrained(str(folder))
        else:
            values = self.model.state_dict()
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                safetensors.torch.save_file(
                    {name: value.clone() for name, value in values.items()}, folder / "model.safetensors"
                )
        if self.args.should_save:
            tokenizer: Any = self.processing_class
            if tokenizer is None:
                tokenizer = getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(folder))
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if self._background is None:
            write(self._writer(folder), self.model, plain_optimizer(self.optimizer))
        elif self.args.should_save:
            # Without anything in it the checkpoint is not whole, see `is_whole`.
            (folder / STATE).mkdir(exist_ok=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        with raising_on_all(self.model):
            # The first rank then writes what tells that the checkpoint is whole.
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads weights alone; in a checkpoint for resuming they are loaded together with the optimizer.

        Raises:
            ValueError: for a checkpoint of plain Trainer, whose optimizer would be ignored.
        """
        if _goes_on(resume_from_checkpoint):
            return
        if os.path.exists(Path(resume_from_checkpoint) / OPTIMIZER_NAME):
            raise ValueError(
                f"{resume_from_checkpoint} is a checkpoint of plain Trainer, whose optimizer is not read; "
                "begin a new run from its weights, with from_pretrained(that folder)"
            )
        logger.warning("%s holds weights alone: optimizer and schedule begin anew", resume_from_checkpoint)
        self._load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None or not _goes_on(checkpoint_folder):
            return
        extra = checkpoint.load(Path(checkpoint_folder) / STATE, self.model, plain_optimizer(self.optimizer))
        skips_data = self._lanes is not None or not self.args.ignore_data_skip
        if skips_data and extra.get(SIZES, self._step_sizes) != self._step_sizes:
            way_out = "choose gradient_accumulation_steps such that ranks times its value stay"
            if self._lanes is None:
                # From its steps Trainer computes what it has read.
                way_out = (
                    "samples would be left out, or come again; choose gradient_accumulation_steps such that "
                    "this stays, or begin the data anew with ignore_data_skip=True"
                )
            raise ValueError(
                f"{checkpoint_folder} is of a training with {extra[SIZES]}, and this one has "
                f"{self._step_sizes}: {way_out}"
            )
        scheduler = torch.load(Path(checkpoint_folder) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
        # Trainer's own finds no optimizer of its own in the folder; one in between may have saved more.
        super()._load_optimizer_and_scheduler(checkpoint_folder)

    @property
    def _extra(self) -> dict[str, Any]:
        """What `flatfsdp/` has beside the shards."""
        return {SIZES: self._step_sizes}

    @property
    def _step_sizes(self) -> str:
        """What a step consists of, on all ranks together."""
        batch, total = self.args.train_batch_size, self.args.gradient_accumulation_steps
        accelerator_config: Any = self.args.accelerator_config
        if not accelerator_config.split_batches:
            total *= self.model.fsdp_state.grid.num_ranks
        if self._lanes is None:
            return f"{total * batch} samples a step"
        return f"{total} microbatches of {batch} a step"

    def _load_best_model(self) -> None:
        self._wait_for_save()
        folder = self.state.best_model_checkpoint
        assert folder is not None
        if _goes_on(folder):
            checkpoint.load(Path(folder) / STATE, self.model)
        else:
            self._load_weights(folder)

    def _load_weights(self, folder: str) -> None:
        if not isinstance(self.model, transformers.PreTrainedModel):
            kind = type(self.model).__name__
            raise ValueError(
                f"{folder} has no {STATE}/ to load a {kind} from; save_only_model=False saves it"
            )
        load_hf(self.model, folder)


class FlatSeq2SeqTrainer(FlatTrainer, transformers.Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer, whose model FlatFSDP shards in place, like `FlatTrainer`.

    With `predict_with_generate`, evaluations generate on all ranks until the last one has finished.
    """


def _goes_on(folder: str) -> bool:
    """Whether a checkpoint holds more than weights, so that training can resume."""
    return os.path.isdir(Path(folder) / STATE)
