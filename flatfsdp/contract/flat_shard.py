"""What an optimizer has to know of a parameter that is a part of an engine's flat shard.

In:   a parameter, with a `FlatShard` as its attribute `flat_shard`, if an engine has set one; and with a
      `ViewedShard` as its `viewed_shard`, if it is one of several parameters in one shard.
Next: `optim/clip.py` takes the norm over its ranks, `optim/fused.py` writes what the next forward needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.attribute import Attribute


class Moved(Protocol):
    """What the forwards and backwards of a step have changed of a model, besides gradients: scales of FP8."""

    def settle(self, taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has decided on the step, and does not wait for the device to know how.

        Args:
            taken: 0-dim, FP32: 0 if the step is left out, so that everything goes back to what it was.
            optimizer: a model may have several; each counts once in a step.
        """


class FlatShard(Protocol):
    """A parameter, 1-D, that is this rank's part of a flat buffer or a portion of that part."""

    @property
    def grid(self) -> Grid:
        """The ranks over which the buffer is sharded, replicated and split.

        Replicas have the same part; tensor-parallel ranks have other parts of the same parameters.
        """

    @property
    def stages(self) -> Ranks:
        """The ranks of a pipeline, which have other parameters of the model; without one, alone."""

    def identify(self, action: Action) -> Identity | None:
        """What a collective for this parameter carries."""

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the gradient in a norm: of ranks that have the same one, one does."""

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; the parameter itself may be in host memory."""

    @property
    def moved(self) -> Moved | None:
        """What else a step has changed, one object for a whole model; None before the model is used."""

    @property
    def rounding(self) -> torch.dtype:
        """The dtype of `compute`, and what values are rounded to before an amax is taken."""

    @property
    def compute(self) -> Tensor | None:
        """The same part of the shard that is gathered for the forward, to be written in each step.

        1-D, as long as the parameter, and on its device; None if there is nothing to write.
        """

    def runs(self) -> Sequence[tuple[int, int, Tensor]]:
        """(start, stop, amax): elements whose largest magnitude is wanted, and the number to raise to it.

        `amax` is FP32, on the parameter's device.  Runs are ascending and disjoint, and need not cover all.
        Called once in each step that updates the parameter, so this is where amaxes are made zero.
        """

    def cast_done(self) -> None:
        """Says that the parameter, `compute` and each amax have been written from the same values.

        The parameter came first, and its version counter has been raised.
        """


FLAT_SHARD = Attribute[FlatShard | None]("flat_shard", None)
"""Left on what an optimizer updates; None for an ordinary parameter."""


class ViewedShard(Protocol):
    """This rank's part of a flat buffer, which is several parameters: one view for each that is in it.

    An optimizer that has neighbouring views may update them as one, from where the first one starts to where
    the view after them does; what lies between two views is zero, and so is its gradient.
    """

    @property
    def model(self) -> object:
        """The same object for all shards of a model, and no other; None before the model is used."""

    @property
    def number(self) -> int:
        """Place of the shard in its model, by which norms are added up; 0 before the model is used."""

    @property
    def flat(self) -> Tensor:
        """All elements, 1-D."""

    @property
    def views(self) -> Sequence[tuple[Tensor, int, int]]:
        """(parameter, start, stop): elements [start, stop) of `flat`.  Starts ascend; some are empty."""

    def joint_grad(self, first: int, last: int) -> Tensor | None:
        """A gradient as long as `flat`, of which views [first, last) have their parts as their gradients.

        Empty views do not count; None if another view has no gradient, or one from elsewhere.
        """

    def joined(self, start: int, stop: int) -> FlatShard:
        """Elements [start, stop), as one parameter would be described."""


VIEWED_SHARD = Attribute[ViewedShard | None]("viewed_shard", None)
"""Left on views, beside `FLAT_SHARD`; None for any other parameter."""
