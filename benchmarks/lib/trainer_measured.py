"""Timing of a program with transformers' Trainer, and with ours in its place, for `trainer.py`.

In:   a `Job`: engines, a size of Llama, TrainingArguments.
Out:  a `Trained` for each engine: times and losses of its steps; whether a resumed run has the same bits.
Next: `trainer.py` shows and draws them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import Dataset

from flatfsdp.comm.launch import Rank
from flatfsdp.compat.transformers.trainer import FlatArguments, FlatTrainer
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.fp8 import DelayedScaling
from flatfsdp.models.text import Sampler, load_corpus
from lib.common import on_all_ranks
from lib.device import Clock, free_memory, peak_gib, start_together
from lib.hf_models import SIZES, build, layer_class
from lib.llama import LlamaConfig
from lib.measuring import SEED


class Engine(str, Enum):
    """The measured engines."""

    fsdp2 = "fsdp2"
    flat = "flat"
    flat_fused = "flat-fused"
    flat_fused_fp8 = "flat-fused-fp8"
    flat_fused_replay = "flat-fused-replay"
    flat_fused_fp8_replay = "flat-fused-fp8-replay"

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return _LABELS[self]

    @property
    def arguments(self) -> FlatArguments:
        """The `FlatArguments` of our engines."""
        is_fp8 = "fp8" in self.value
        return FlatArguments(
            fuse="fused" in self.value,
            fp8=DelayedScaling(amax_history_len=16) if is_fp8 else None,
            fp8_weights=is_fp8,
            replay="replay" in self.value,
        )


_LABELS = {
    Engine.fsdp2: "Trainer, FSDP2",
    Engine.flat: "FlatTrainer",
    Engine.flat_fused: "FlatTrainer, fused",
    Engine.flat_fused_fp8: "FlatTrainer, fused, FP8",
    Engine.flat_fused_replay: "FlatTrainer, fused, replayed",
    Engine.flat_fused_fp8_replay: "FlatTrainer, fused, FP8, replayed",
}


@dataclass(frozen=True)
class Job:
    """The settings of a measurement.

    Attributes:
        size: key of `SIZES`.
        microbatches: microbatches of a step, one sequence each.
        steps, warmup: timed steps of each run, and steps before those.
        engines: in this order.
        folder: for checkpoints of runs that are interrupted and resumed, which are deleted; None: no such
            runs.
    """

    size: str
    microbatches: int
    steps: int
    warmup: int
    engines: tuple[Engine, ...]
    folder: Path | None

    @property
    def seq(self) -> int:
        """Tokens of a sequence."""
        return SIZES[self.size].seq


@dataclass(frozen=True)
class Trained:
    """One engine over all ranks: the slowest one's times, the highest peak.

    Attributes:
        ms: time of each timed step.
        losses: losses that the trainer has logged, of all steps.
        is_resumed_equal: whether a run that was interrupted in the middle and resumed has losses and shards
            bit-equal to an uninterrupted one; None if not requested.
        failed: its error, or empty.
    """

    engine: Engine
    ms: list[float]
    losses: list[float]
    peak_gib: float
    is_resumed_equal: bool | None = None
    failed: str = ""


class Text(Dataset[dict[str, Tensor]]):
    """Windows of real text, one byte per token."""

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(load_corpus(None), 1, self._config.seq, SEED)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The tiny model for tests has fewer tokens than there are bytes.
        tokens = self._sampler.sample(index, 0, 0)[0][0] % self._config.vocab
        return {"input_ids": tokens, "labels": tokens}


class Timer(transformers.TrainerCallback):
    """Marks the end of each step; stops after a given number if requested."""

    def __init__(self, device: torch.device, warmup: int, last: int | None = None) -> None:
        self.clock = Clock(device)
        self._device, self._warmup, self._last = device, warmup, last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks the step's end; starts counting after warm-up."""
        if state.global_step == self._warmup:
            start_together(self._device)
        if state.global_step >= self._warmup:
            self.clock.mark()
        if state.global_step == self._last:
            control.should_training_stop = True


def measure_all(rank: Rank, job: Job) -> list[Trained]:
    """Measures all engines; all ranks return the same."""
    found = []
    for engine in job.engines:
        outcome = on_all_ranks(lambda: _measure(rank, job, engine), rank)  # noqa: B023 - called here
        if isinstance(outcome, str):
            found.append(Trained(engine, [], [], 0.0, failed=outcome))
            continue
        found.append(
            Trained(
                engine,
                [max(step) for step in zip(*(each.ms for each in outcome), strict=True)],
                outcome[0].losses,
                max(each.peak_gib for each in outcome),
                _all_or_none([each.is_resumed_equal for each in outcome]),
            )
        )
    return found


def _all_or_none(answers: list[bool | None]) -> bool | None:
    return None if None in answers else all(answers)


def _measure(rank: Rank, job: Job, engine: Engine) -> Trained:
    timer = Timer(rank.device, job.warmup)
    with TemporaryDirectory() as folder, _started(rank, job, engine, Path(folder), timer) as trainer:
        trainer.train()
        losses, peak = _losses_of(trainer), peak_gib(rank.device)
        del trainer
    free_memory(rank.device)
    is_equal = None
    if job.folder is not None and engine is not Engine.fsdp2:
        is_equal = _is_resumed_equal(rank, job, engine, job.folder / engine.value)
    return Trained(engine, timer.clock.gaps(), losses, peak, is_equal)


def _is_resumed_equal(rank: Rank, job: Job, engine: Engine, folder: Path) -> bool:
    steps = job.warmup + job.steps
    half = steps // 2
    deterministic = {"full_determinism": True}
    with _started(rank, job, engine, folder, **deterministic) as trainer:
        trainer.train()
        losses, shards = _losses_of(trainer), _shards_of(trainer)
        del trainer
    free_memory(rank.device)
    saving = {**deterministic, "save_strategy": "steps", "save_steps": half}
    with _started(rank, job, engine, folder, Timer(rank.device, steps, half), **saving) as trainer:
        trainer.train()
        del trainer
    free_memory(rank.device)
    with _started(rank, job, engine, folder, **deterministic) as trainer:
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
        is_equal = _losses_of(trainer) == losses and all(map(torch.equal, _shards_of(trainer), shards))
        del trainer
    torch.use_deterministic_algorithms(False)
    dist.barrier()
    if rank.index == 0:
        shutil.rmtree(folder)
    return is_equal


def _losses_of(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def _shards_of(trainer: Any) -> list[Tensor]:
    return [group.master.flat.detach().cpu() for _, group in named_groups(trainer.model)]


@contextmanager
def _started(
    rank: Rank, job: Job, engine: Engine, folder: Path, callback: Any = None, **options: Any
) -> Iterator[Any]:
    """Makes a trainer; what Accelerate keeps of it for the whole process is cleared at the end."""
    before, common = dict(os.environ), {"save_strategy": "no"}
    os.environ |= {name: str(rank.index) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(rank.world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if engine is Engine.fsdp2:
        options |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer_class().__name__]},
        }
    try:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            bf16=rank.device.type == "cuda",
            use_cpu=rank.device.type == "cpu",
            max_steps=job.warmup + job.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=job.microbatches,
            learning_rate=1e-4,
            logging_steps=1,
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=0,
            seed=SEED,
            **{**common, **options},
        )
        torch.manual_seed(SEED)
        with rank.device:
            model = build(SIZES[job.size])
        ours = {} if engine is Engine.fsdp2 else {"flat": engine.arguments}
        kind: Any = transformers.Trainer if engine is Engine.fsdp2 else FlatTrainer
        callbacks = [] if callback is None else [callback]
        trainer = kind(model, arguments, train_dataset=Text(SIZES[job.size]), callbacks=callbacks, **ours)
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        del model
        yield trainer
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ |= before
