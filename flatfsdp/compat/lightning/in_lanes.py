"""`StepsInLanes`: what the Trainer's strategy does otherwise if the module has lanes.

In:   the sharded module and the Trainer.
Out:  the loader of this rank's microbatches, the number of each, its share of the loss, and the Trainer's
      counters on another number of ranks.
Next: `trainer.py` asks it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
        ValueError: if the number of ranks is no power of two; for manual optimization.
    """

    def __init__(self, module: Any, trainer: Any) -> None:
        grid = module.fsdp_state.grid
        if grid.num_ranks & (grid.num_ranks - 1):
            raise ValueError(
                f"lanes on {grid.num_ranks} ranks: Lightning divides losses by accumulate_grad_batches, and "
                "only a power of two divides them further without rounding; take 1, 2, 4, 8 ... ranks"
            )
        if not module.automatic_optimization:
            raise ValueError(
                "lanes with manual optimization, whose steps Lightning does not know; leave lanes out, or "
                "train with Fabric in a loop over flatfsdp.microbatches(model, batches)"
            )
        self._module, self._trainer, self._grid = module, trainer, grid
        self._lanes = module.fsdp_state.policy.lanes
        self._on_rank: int = trainer.accumulate_grad_batches
        self._total = self._on_rank * grid.num_ranks
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._numbers: Iterator[int] | None = None
        self._left = 0

    # ---- data -------------------------------------------------------------------------------------------

    def dealt(self, loader: object) -> object:
        """The Trainer's loader of training data, changed to load this rank's microbatches.

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
                "with a length, with its own batches and no sampler, which the Trainer then brings"
            )
        every: Any = DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
        batches = BatchSampler(every, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
        progress = self._trainer.fit_loop
        done, epochs = progress.epoch_loop.batch_progress.current.ready, progress.epoch_progress.current.ready
        samples = SamplesInLanes(batches, self._on_rank, "accumulate_grad_batches", self._lanes, self._grid)
        if 0 < done < len(samples) // batches.batch_size:
            # A checkpoint from within an epoch, which Lightning would begin once more with its first data.
            samples.skipped, epochs = done, epochs - 1
        # Workers ask for their first batches before Lightning sets it.
        samples.set_epoch(epochs)
        loader.batch_sampler.sampler = samples
        return loader

    # ---- microbatches -----------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Context of a training step: tells the engine its number, by which dropout is seeded.

        Raises:
            ValueError: if Lightning's step has not the microbatches that were dealt out.
        """
        if not self._left:
            self._begin_step()
        assert self._numbers is not None
        number = next(self._numbers)
        device = self._module.device
        # Random numbers outside of microbatches stay the same on all ranks.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self._seed * 1_000_003 + self._trainer.global_step * self._total + number)
            yield

    def _begin_step(self) -> None:
        trainer, place = self._trainer, self._trainer.fit_loop.batch_idx
        if trainer.accumulate_grad_batches != self._on_rank:
            raise ValueError(
                f"accumulate_grad_batches has become {trainer.accumulate_grad_batches}, and data were dealt "
                f"out to lanes for {self._on_rank}; leave out GradientAccumulationScheduler"
            )
        length = len(trainer.train_dataloader)
        dealt, self._left = (
            min(self._on_rank, end - place) for end in (length, int(trainer.num_training_batches))
        )
        if dealt != self._left:
            raise ValueError(
                f"limit_train_batches ends an epoch after {self._left} of the {dealt} microbatches of a "
                f"step; with lanes take a multiple of accumulate_grad_batches={self._on_rank}"
            )
        of_step = self._lanes.microbatches(self._grid, dealt * self._grid.num_ranks)
        self._numbers = iter(microbatches(self._module, of_step))

    def share(self, loss: Tensor) -> Tensor:
        """The loss of a microbatch, divided by those of one rank, divided by those of all."""
        return loss / self._grid.num_ranks

    def end_microbatch(self) -> None:
        """Tells the engine, after the last backward of a step, that the step is over."""
        self._left -= 1
        if not self._left:
            self.close()

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
        for counts in (progress["total"], progress["current"]):
            processed, rest = divmod(counts["processed"] * saved["ranks"], ranks)
            if rest:
                raise ValueError(
                    f"the checkpoint was saved within a step, after {counts['processed']} microbatches of "
                    f"each of {saved['ranks']} ranks, which {ranks} cannot share; save at ends of steps"
                )
            # Hooks save between one count and the next, which Lightning finds out from their differences.
            moved = processed - counts["processed"]
            counts.update({name: count + moved for name, count in counts.items()})
