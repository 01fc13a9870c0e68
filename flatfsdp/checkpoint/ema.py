"""`EMA`: an exponential moving average of a model's weights, as shards like the weights themselves.

In:   a sharded or wrapped model, whose optimizer has stepped.
Out:  the model with the averaged weights, for a while: to evaluate it, or to save it under its own names.
Next: `saving.py` writes the average beside the model, under the same names, and `loading.py` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from flatfsdp.checkpoint.fit import differences, entries_of, require_no_problems
from flatfsdp.checkpoint.opening import OpenCheckpoint
from flatfsdp.checkpoint.sharded import sharded_slots
from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.checking.journal import declare
from flatfsdp.engine.whole.units import Model, named_groups


class EMA:
    """An exponential moving average of the trained weights: average = decay * average + (1 - decay) * weight.

        ema = EMA(model, decay=0.999)
        for batch in loader:
            ...
            optimizer.step()
            ema.update()
        with ema.averaged():
            evaluate(model)
            model.save_pretrained("average")
        checkpoint.save(path, model, optimizer, ema=ema)

    The average is sharded like the weights.  Weights that are frozen when the EMA is made are not copied,
    and buffers are not averaged.

    Args:
        model: a sharded or wrapped model, or this rank's stages of a pipeline.  The average starts from its
            current weights.
        decay: weight of the old average in each update, from 0 to 1.
        dtype: dtype of the average.  16-bit dtypes lose updates smaller than their rounding.

    Attributes:
        decay: the decay of coming updates.
        updates: number of updates so far.

    Raises:
        ValueError: if the model is not sharded, all of it is frozen, or decay is out of range.
    """

    def __init__(self, model: Model, decay: float = 0.999, *, dtype: torch.dtype = torch.float32) -> None:
        self.decay, self.updates = _checked(decay), 0
        self._groups = [group for _, group in named_groups(model)]
        self.masters = [(prefix, group.master) for prefix, group in named_groups(model) if group.trains]
        if not self.masters:
            raise ValueError("EMA: all weights of the model are frozen, so there is nothing to average")
        self.shards = [weights.to(dtype, copy=True) for weights in self._weights]
        self._is_inside = False

    @property
    def _weights(self) -> list[Tensor]:
        return [master.flat.detach() for _, master in self.masters]

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Updates the average with the current weights, in a few kernel launches for the whole model.

        Args:
            decay: used for this update only, for a warm-up.

        Raises:
            RuntimeError: inside `averaged`; if weights are trained now that the EMA found frozen.
            ValueError: if decay is out of range.
        """
        self._require_outside("update")
        averaged = {master for _, master in self.masters}
        if any(group.trains and group.master not in averaged for group in self._groups):
            raise RuntimeError(
                "weights that were frozen when the EMA was made are trained now: it has no average of them; "
                "make the EMA after they are unfrozen"
            )
        share = 1 - (self.decay if decay is None else _checked(decay))
        weights, dtype = self._weights, self.shards[0].dtype
        if all(each.dtype == dtype for each in weights):
            torch._foreach_lerp_(self.shards, weights, share)
        else:
            for average, weight in zip(self.shards, weights, strict=True):
                # Compute in the wider of the two dtypes.
                wide = torch.promote_types(dtype, weight.dtype)
                average.copy_(average.to(wide).lerp_(weight.to(wide), share))
        self.updates += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; the trained ones come back bit for bit.

        Collective: all ranks enter and leave together.  Evaluate and save inside; do not train.  Takes memory
        for a copy of this rank's shards of the trained weights.

        Raises:
            RuntimeError: if nested; at the end, if the weights were written to inside: the write is dropped.
        """
        self._require_outside("averaged")
        trained = [weights.clone() for weights in self._weights]
        # Before the weights change: where another rank does something else, there is nothing to undo.
        self._declare()
        self._mark(is_inside=True)
        is_written = False
        try:
            torch._foreach_copy_(self._weights, self.shards)
            # Not the shards' generations: a save counts them up, too.
            versions = [weights._version for weights in self._weights]
            yield
            is_written = versions != [weights._version for weights in self._weights]
        finally:
            self._mark(is_inside=False)
            # Before anything that waits for other ranks: where one of them has failed, it raises.
            torch._foreach_copy_(self._weights, trained)
        self._declare()
        if is_written:
            raise RuntimeError(
                "the weights were written to inside EMA.averaged(), by a step or a load: the trained ones "
                "are back, and what was written is lost; train, and load, outside of it"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an EMA cannot be copied or pickled, because it has this rank's shards alone; save it by "
            "flatfsdp.checkpoint.save(path, model, optimizer, ema=ema)"
        )

    def _declare(self) -> None:
        """Checks that all ranks exchange their weights now; others would gather a mixture."""
        _, first = self.masters[0]
        declare(first.grid.shard, first.unit.identify(Action.AVERAGE), first.device)

    def _mark(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        for _, master in self.masters:
            master.is_average = is_inside

    def _require_outside(self, what: str) -> None:
        if self._is_inside:
            raise RuntimeError(
                f"EMA.{what} was called inside EMA.averaged(), where the model has the averaged weights"
            )


def _checked(decay: float) -> float:
    if not 0 <= decay <= 1:
        raise ValueError(f"EMA: decay is {decay}; it has to be from 0 to 1, such as 0.999")
    return decay


def sharded_average(ema: EMA, shards: list[Tensor]) -> dict[str, Any]:
    """Checkpoint entries of an average.  Collective, if the model is tensor-parallel.

    Args:
        ema: the average.
        shards: shards in the layout of the average's; the entries alias them.
    """
    return {"values": sharded_slots(ema.masters, shards), "updates": ema.updates}


def check_average_fits(opened: OpenCheckpoint, ema: EMA) -> None:
    """Compares names, shapes and dtypes.

    Raises:
        ValueError: if the checkpoint has no average, or one of other weights.
    """
    saved = {".".join(map(str, path)): about for path, about in opened.entries("ema", "values").items()}
    if not saved:
        raise ValueError("the checkpoint has no average; save it with save(path, model, optimizer, ema=ema)")
    missing, shapes, dtypes = differences(saved, entries_of(ema.masters, ema.shards))
    problems = {"missing": missing, "of another shape": shapes, "of another dtype": dtypes}
    require_no_problems("the checkpoint's average is not of these weights", problems)
