"""`StepsInLanes`: what the Trainer's strategy does otherwise if the module has lanes.

In:   the sharded module and the Trainer.
Out:  the loader of this rank's microbatches, the number of each, its share of the loss, and the Trainer's
      counters on another number of ranks.
Next: `trainer.py` asks it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from flatfsdp.compat.samples_in_lanes import SamplesInLanes
from flatfsdp.microbatch import microbatches

_SAVED = "flatfsdp_lanes"
"""Key of a checkpoint: numbers of ranks, and of microbatches of a step on all of them."""


class StepsInLanes:
    """The microbatches of a fit, which are numbered over all ranks.

    Args:
        module: the sharded LightningModule, which has lanes.
        trainer: Lightning's Trainer, in `fit`.

    Raises:
        ValueError: for manual optimization.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        if not module.automatic_optimization:
            raise ValueError(
                "lanes with manual optimization, whose steps Lightning does not know; leave lanes out, or "
                "train with Fabric in a loop over flatfsdp.microbatches(model, batches)"
            )
        self._module, self._trainer, self._grid = module, trainer, module.fsdp_state.grid
        self._lanes = module.fsdp_state.policy.lanes
        self._on_rank: int = trainer.accumulate_grad_batches
        self._total = self._on_rank * self._grid.num_ranks
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._samples: SamplesInLanes | None = None
        # Of the first step after the data were dealt out.
        self._epoch: int | None = None
        self._numbers: Iterator[int] | None = None
        self._left = 0
        self._loss: Tensor | None = None
        self._forget_data()

    def _forget_data(self) -> None:
        """Lets the Trainer ask for data again; `estimated_stepping_batches` may have done so too early."""
        self._trainer.fit_loop._combined_loader = None

    def require_schedulers(self) -> None:
        """Checks that learning rates change by steps, or by epochs.

        Raises:
            ValueError: if one changes by microbatches, of which ranks have more or fewer.
        """
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency != 1:
                raise ValueError(
                    f"a learning rate scheduler with frequency={config.frequency}, which counts microbatches "
                    "of each rank; with lanes leave it at 1, and let the scheduler count steps"
                )

    # ---- data -------------------------------------------------------------------------------------------

    def dealt(self, loader: object) -> object:
        """A loader of this rank's microbatches, in place of the Trainer's loader of training data.

        Raises:
            ValueError: if the data have no order that all ranks know, or lanes cannot have equally many.
        """
        sampler = getattr(loader, "sampler", None)
        if not (
            isinstance(loader, DataLoader)
            and type(loader.batch_sampler) is BatchSampler
            and type(sampler) is DistributedSampler
        ):
            raise ValueError(
                "with lanes a batch is known by its number over all ranks; take a DataLoader of a data set "
                "with a length, with its own batches and no sampler, for which the Trainer brings one (leave "
                "use_distributed_sampler=False out)"
            )
        if hasattr(loader, "load_state_dict"):
            raise ValueError(
                f"with lanes a fit goes on within an epoch by itself, and {type(loader).__name__} would do "
                "so once more; take a DataLoader"
            )
        every: Any = DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
        batches = BatchSampler(every, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
        names = "accumulate_grad_batches", "drop_last=True of the DataLoader"
        samples = SamplesInLanes(batches, self._on_rank, names, self._lanes, self._grid)
        fit = self._trainer.fit_loop
        epochs, done = fit.epoch_progress.current, fit.epoch_loop.batch_progress
        self._epoch = epochs.processed
        if fit.restarting and epochs.processed < epochs.started:
            # From a checkpoint within an epoch, which Lightning would begin once more with its first data, or
            # after its last batch.
            if done.is_last_batch:
                self._epoch += 1
            else:
                samples.skipped = done.current.processed
        # Workers ask for their first batches before Lightning sets it.
        samples.set_epoch(self._epoch)
        self._samples = samples
        # The loader may be the user's own, which validation loads, too.
        mine = copy.copy(loader)
        in_lanes = BatchSampler(samples, batches.batch_size, batches.drop_last)
        vars(mine).update(sampler=samples, batch_sampler=in_lanes)
        return mine

    # ---- microbatches -----------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Context of a training step, which seeds dropout by the number of the microbatch.

        Raises:
            ValueError: if a step of Lightning has not the microbatches that were dealt out.
            RuntimeError: if a step begins elsewhere than Lightning's.
        """
        place = self._trainer.fit_loop.batch_idx
        if place % self._on_rank == 0:
            self._begin_step(place)
        if self._numbers is None:
            raise RuntimeError(
                f"microbatch {place} of an epoch follows a step that has ended, or was not begun; with lanes "
                "steps are whole: leave out a whole step instead of a batch, on all ranks"
            )
        number = next(self._numbers)
        device = self._module.device
        # What is drawn between microbatches must not depend on how many of them this rank runs.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed * 1_000_003 + self._trainer.global_step * self._total + number)
            yield

    def _begin_step(self, place: int) -> None:
        self.close()
        trainer, loaders = self._trainer, self._trainer.fit_loop._combined_loader.flattened
        if len(loaders) != 1 or loaders[0].sampler is not self._samples:
            raise ValueError(
                f"lanes with {len(loaders)} loaders of training data, whose batches have no common numbers; "
                "take one DataLoader"
            )
        if trainer.accumulate_grad_batches != self._on_rank:
            raise ValueError(
                f"accumulate_grad_batches has become {trainer.accumulate_grad_batches}, and data were dealt "
                f"out to lanes for {self._on_rank}; leave out GradientAccumulationScheduler"
            )
        length = len(loaders[0])
        if trainer.num_training_batches != length:
            raise ValueError(
                f"{trainer.num_training_batches} of the {length} batches of an epoch: limit_train_batches, "
                "overfit_batches and fast_dev_run count those of each rank; with lanes leave them out, and "
                "take max_steps"
            )
        if place >= length or (self._epoch is not None and trainer.current_epoch != self._epoch):
            raise ValueError(
                f"Lightning goes on with batch {place} of epoch {trainer.current_epoch}, and data were dealt "
                f"out for {length} batches of epoch {self._epoch}; go on with max_epochs instead of "
                "max_steps, or from a checkpoint that was saved within an epoch"
            )
        self._epoch = None
        self._left = min(self._on_rank, length - place)
        of_step = self._lanes.microbatches(self._grid, self._left * self._grid.num_ranks)
        self._numbers = iter(microbatches(self._module, of_step))

    def keep_loss(self, output: Any) -> None:
        """Keeps the loss in a result of `training_step`, from which Lightning makes another one."""
        self._loss = output.get("loss") if isinstance(output, Mapping) else output

    def share(self) -> Tensor:
        """The loss of this microbatch, divided by those of a step on all ranks.

        Lightning divides by the microbatches of a rank.  A second division, by the ranks, would round again,
        and other numbers of ranks in other ways.
        """
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss / self._total

    def end_microbatch(self) -> None:
        """Tells the engine, after the last backward of a step, that the step is over."""
        self._left -= 1
        if not self._left:
            self.close()

    def whole(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer's step, which runs the last microbatch, with a check after it.

        Raises:
            RuntimeError: when called, if the step lacks a backward.
        """

        def checked() -> Any:
            found = closure()
            if self._left:
                raise RuntimeError(
                    f"an optimizer's step {self._left} backwards before its end: with lanes each batch has "
                    "one, so training_step may not return None"
                )
            return found

        return checked

    def close(self) -> None:
        """Ends the running step, whether or not it is complete."""
        self._left = 0
        if self._numbers is not None:
            self._numbers.close()  # type: ignore[attr-defined]
            self._numbers = None

    # ---- checkpoints ------------------------------------------------------------------------------------

    def note_ranks(self, checkpoint: dict[str, Any]) -> None:
        """Notes the number of ranks, of which each counts its own microbatches."""
        checkpoint[_SAVED] = {"ranks": self._grid.num_ranks, "microbatches": self._total}

    def count_on_these_ranks(self, checkpoint: dict[str, Any]) -> None:
        """Changes Lightning's counters to the microbatches of each of these ranks.

        Raises:
            ValueError: if it was saved without lanes, or within a step; if its steps had other microbatches.
        """
        saved = checkpoint.pop(_SAVED, None)
        if saved is None:
            raise ValueError(
                "the checkpoint was saved without lanes, and its steps are counted in another way; begin "
                "from its weights, without ckpt_path: flatfsdp.checkpoint.load in on_fit_start"
            )
        ranks = self._grid.num_ranks
        if saved["microbatches"] != self._total:
            raise ValueError(
                f"steps of the checkpoint have {saved['microbatches']} microbatches, and accumulate_grad_"
                f"batches={self._on_rank} on {ranks} ranks are {self._total}; with lanes their number stays"
            )
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        done = progress["current"]["processed"] * saved["ranks"]
        if done % self._total and not progress["is_last_batch"]:
            raise ValueError(
                f"the checkpoint was saved after {done} microbatches of an epoch, within a step of "
                f"{self._total}, whose gradients it does not have; save at ends of steps"
            )
        for counts in (progress["total"], progress["current"]):
            # Hooks save between one count and the next, which Lightning finds out from their differences.
            moved = counts["processed"] * saved["ranks"] // ranks - counts["processed"]
            counts.update({name: count + moved for name, count in counts.items()})
        self._forget_data()
