"""A user's own model, or one that is trained like it, as a job for the training loop.

In:   a function that builds a model, and one that yields batches.
Out:  for each `Sharding` a `Trainee`.
Next: `loop.py` trains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp import microbatches, replayed, shard
from flatfsdp.comm.launch import Rank
from flatfsdp.contract.any_model import Batches, BuildModel, Loss, layers_of, loss_of
from flatfsdp.engine.api.wrap import WrapPolicy
from flatfsdp.fp8 import autocast
from flatfsdp.parity.loop import Trainee, unchanged
from flatfsdp.parity.switches import Sharding


@dataclass(frozen=True)
class ModelJob:
    """Model, data and settings of a training run.

    Attributes:
        policy: policy that picks units; None takes the items of the outermost lists of modules.
        loss: function of model and batch; None takes the loss that the model returns, see `loss_of`.
        microbatches: number of microbatches of each rank in a step; with lanes, of all ranks together.
        max_norm: largest norm of the gradient of one step.
        seed: seed of parameters, which all ranks share, and of dropout.
        optimizer: class of the optimizer, or a function of parameters and `lr`.
        options: further options of `flatfsdp.shard`.
        interrupts: do other things between steps, see `Interruptions`.
        swaps: two lanes of a step that change places, which has to be noticed.
    """

    build_model: BuildModel
    batches: Batches
    policy: WrapPolicy | None = None
    loss: Loss | None = None
    steps: int = 4
    microbatches: int = 2
    lr: float = 1e-3
    max_norm: float = 1.0
    seed: int = 0
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    interrupts: bool = False
    swaps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def built(self) -> nn.Module:
        """A new model, unsharded."""
        torch.manual_seed(self.seed)
        return self.build_model()

    def trainee(self, sharding: Sharding, rank: Rank) -> Trainee:
        """Builds and shards the model.  Collective."""
        built = self.built()
        if sharding.fusion is not None:
            for layer in fusing(built):
                layer.fuse_wgrad_accumulation = sharding.fusion
        options = {"device": rank.device, **sharding.options, **self.options}
        model: Any = shard(built, self.policy or layers_of(built), **options)
        torch.manual_seed(self.seed + 1 + rank.index)
        optimizer = self.optimizer(model.parameters(), lr=self.lr)
        loss_of_batch = partial(self.loss or loss_of, model)
        is_fp8, recipe = sharding.recipe is not None, sharding.recipe
        region = partial(autocast, is_fp8, recipe=recipe, amax_reduction_group=rank.group)
        numbers = self._numbers(model)

        def run(batch: Any) -> Tensor:
            is_first = model.fsdp_state.shared.microbatch.is_first
            loss = loss_of_batch(batch, **({"is_first_microbatch": is_first} if sharding.cache else {}))
            (loss / self.microbatches).backward()
            return loss.detach()

        graphs = replayed(model, run) if sharding.replay else None
        microbatch = graphs or run

        def forward_backward(batches: list[Any]) -> list[Tensor]:
            losses, done = [], model.fsdp_state.shared.microbatch.steps_reduced * self.microbatches
            with region():
                for place, batch in enumerate(microbatches(model, batches)):
                    if numbers:
                        # Dropout of a microbatch is the same on whichever rank it runs.
                        torch.manual_seed(self.seed + 1 + done + numbers[place])
                    losses.append(microbatch(batch))
            return losses

        def update() -> Tensor:
            norm: Tensor = model.clip_grad_norm_(self.max_norm)
            optimizer.step()
            return norm

        def require_replays() -> None:
            if graphs is not None and rank.device.type == "cuda" and not graphs.replays:
                raise RuntimeError(
                    f"no microbatch of {self.steps} steps was replayed: the log says why, or take more steps"
                )

        interruptions = Interruptions(model, optimizer, microbatch, loss_of_batch, region)
        return Trainee(
            model,
            [model],
            optimizer,
            self.steps,
            len(numbers) or self.microbatches,
            self._batches_of(numbers) if numbers else self.batches(rank.index, rank.world),
            forward_backward,
            update,
            numbers=numbers,
            before_step=interruptions.before if self.interrupts else unchanged,
            at_end=require_replays,
        )

    def _numbers(self, model: Any) -> Sequence[int]:
        """With lanes, this rank's microbatches among those of all ranks in a step."""
        if model.fsdp_state.policy.lanes is None:
            return ()
        numbers: list[int] = model.microbatch_numbers(self.microbatches)
        if self.swaps is None:
            return numbers
        length = self.microbatches // model.fsdp_state.policy.lanes.number
        changed = dict(zip(self.swaps, reversed(self.swaps), strict=True))
        places = (divmod(number, length) for number in numbers)
        return [changed.get(lane, lane) * length + place for lane, place in places]

    def _batches_of(self, numbers: Sequence[int]) -> Iterator[Any]:
        """Yields the batches of these microbatches of each step, out of those that one rank would have."""
        every = iter(self.batches(0, 1))
        for _ in range(self.steps):
            of_step = list(islice(every, self.microbatches))
            # If there are too few, the loop says so.
            yield from (of_step[number] for number in numbers if number < len(of_step))


def fusing(model: nn.Module) -> Iterator[Any]:
    """The layers that can fuse their weight gradients."""
    return (module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation"))


# ---- interruptions, as in real trainings, which must not affect the following steps -----------------------

Batch = tuple[Tensor, ...]

EVERY = 4
"""Number of steps from one interruption to the next, which is of another kind."""


@dataclass
class Interruptions:
    """Interrupts a training before each fourth step.

    In turn: an evaluation, a microbatch that raises, a step of shorter microbatches, and a load of the state
    dict from the last evaluation.

    Attributes:
        microbatch: function of a batch, tokens and targets, that runs forward and backward.
        loss: function that computes the loss of a batch, with its graph; used in evaluations.
        region: function that makes the autocast context around these.
        saved: state dict of the last evaluation.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    microbatch: Callable[[Batch], Tensor]
    loss: Callable[[Batch], Tensor]
    region: Callable[[], AbstractContextManager[Any]]
    saved: dict[str, Tensor] = field(default_factory=dict)

    def before(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """Interrupts if it is time; returns the step's microbatches."""
        turn, rest = divmod(step, EVERY)
        if rest != EVERY - 1:
            return list(batches)
        kind = turn % 4
        if kind == 0:
            self._evaluate(batches[0])
        elif kind == 1:
            self._fail(batches[0])
        elif kind == 2:
            # Half of the sequences, or half of each sequence.
            return [tuple(_half(tensor) for tensor in batch) for batch in batches]
        else:
            self.model.load_state_dict(self.saved)
        return list(batches)

    def _evaluate(self, batch: Batch) -> None:
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.eval()
        with torch.no_grad(), self.region():
            self.loss(batch)
        self.model.train()

    def _fail(self, batch: Batch) -> None:
        """Runs a microbatch whose targets do not fit, which raises between its forward and its backward."""
        tokens_bt, targets_bt = batch
        try:
            with self.region():
                self.microbatch((tokens_bt, targets_bt[:, 1:].contiguous()))
        except (RuntimeError, ValueError):
            self.optimizer.zero_grad()
            return
        raise AssertionError("targets of another length than the tokens made no error")


def _half(tensor: Tensor) -> Tensor:
    sequences, length = tensor.shape
    return tensor[: sequences // 2] if sequences > 1 else tensor[:, : length // 2].contiguous()
