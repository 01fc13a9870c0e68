"""`FlatShard`: the interface that an optimizer has to a parameter in an engine's flat shard.

In:   a parameter with a `FlatShard` as its attribute `flat_shard`, if an engine has set it, and with a
      `ViewedShard` as its `viewed_shard`, if the shard has several parameters.

Next: `optim/clip.py` takes norms over its ranks, `optim/fused.py` writes what the next forward needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flatfsdp.comm.checking.identity import Action, Identity
from flatfsdp.comm.grid import Grid
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.attribute import Attribute


class Moved(Protocol):
    """Changes to a model in the forwards and backwards of a step, besides gradients: FP8 scales."""

    def settle(self, taken: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Keeps or undoes the changes, as an optimizer has decided; does not wait for the device.

        Args:
            taken: 0-dim, FP32: 0 if the step is left out, so that all changes are undone.
            optimizer: the optimizer; of several in a model, each counts once a step.
        """


class GradAt(NamedTuple):
    """A gradient that begins at element `start` of a shard, or of the whole buffer; 1-D."""

    start: int
    grad: Tensor


Range = tuple[int, int]
"""Elements [start, stop)."""


class Numbered(Protocol):
    """A flat buffer, of which only its number in the model is known."""

    number: int


class Pieces(NamedTuple):
    """What norms are taken of one by one, so that they do not depend on the number of ranks.

    Attributes:
        buffer: the same object for all flat shards that are in one buffer.
        start: first element of this flat shard in the buffer.
        bounds: ranges of all pieces of the whole buffer, ascending.  A flat shard has whole pieces, and zeros
            outside of them.
    """

    buffer: Numbered
    start: int
    bounds: Sequence[Range]


class FlatShard(Protocol):
    """A 1-D parameter that is this rank's part of a flat buffer, or a local shard in that part."""

    @property
    def grid(self) -> Grid:
        """The ranks over which the buffer is sharded, replicated and split.

        Replicas have the same part.  Tensor-parallel ranks have other parts of the same parameters.
        """

    @property
    def stages(self) -> Ranks:
        """The ranks of the pipeline, with other parameters of the model; this rank alone if there is none."""

    def identify(self, action: Action) -> Identity | None:
        """Identity that a collective for this parameter carries."""

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts the gradient in a norm: of ranks that have the same one, one does."""

    @property
    def pieces(self) -> Pieces | None:
        """Pieces of the buffer for norms; None if a norm is taken of all that a rank has (without lanes)."""

    @property
    def device(self) -> torch.device:
        """The device that the model computes on; the parameter itself may be in CPU memory."""

    @property
    def moved(self) -> Moved | None:
        """Other changes of a step, one object for a whole model; None before the model is used."""

    @property
    def rounding(self) -> torch.dtype:
        """Dtype of `compute`; values are rounded to it before an amax is taken."""

    @property
    def compute(self) -> Tensor | None:
        """The same part of the compute shard, for the optimizer to write in each step.

        1-D, as long as the parameter, on its device; None if there is nothing to write.
        """

    def runs(self) -> Sequence[tuple[int, int, Tensor]]:
        """Runs (start, stop, amax) of elements, with the tensor that takes their largest magnitude.

        `amax` is FP32, on the parameter's device.  Runs are ascending and disjoint, and need not cover all
        elements.  The call, once a step that updates the parameter, zeroes all amaxes.
        """

    def cast_done(self) -> None:
        """Notes that the parameter, `compute` and each amax have been written from the same values.

        Call it after the parameter was written and its version counter raised.
        """


Gradients = Sequence[tuple[FlatShard, Sequence[GradAt]]]
"""Flat shards of one model, in the same order on all ranks, each with its present gradients."""


FLAT_SHARD = Attribute[FlatShard | None]("flat_shard", None)
"""The `FlatShard` of a parameter that an optimizer updates; None for an ordinary parameter."""


class JointGrad(Protocol):
    """The gradient of a whole shard, in which its views have theirs."""

    @property
    def flat(self) -> Tensor:
        """The gradient, 1-D, as long as the shard; zero in idle views."""

    @property
    def idle(self) -> Collection[int]:
        """Numbers of the views that no rank has used, and that have no gradient."""


class ViewedShard(Protocol):
    """This rank's part of a flat buffer that has several parameters, with one view for each of them.

    An optimizer that has neighbouring views may update them as one, from the start of the first one to the
    start of the view after them.  Gaps between views are zero, and so are their gradients.
    """

    @property
    def place(self) -> tuple[object, int]:
        """The same object for all shards of one model only, and the shard's index, by which norms add up.

        (None, 0) before the model is used.
        """

    @property
    def flat(self) -> Tensor:
        """All elements of the shard, 1-D."""

    @property
    def views(self) -> Sequence[tuple[Tensor, int, int]]:
        """Views (parameter, start, stop), elements [start, stop) of `flat`; starts ascend; some are empty."""

    def joint_grad(self, first: int, last: int) -> JointGrad | None:
        """Gradient of the whole shard, if views [first, last) all have their gradients in it, or are idle.

        Empty views do not count.  None if another view has no gradient, or one from elsewhere.
        """

    def joined(self, start: int, stop: int) -> FlatShard:
        """Describes elements [start, stop) as one parameter."""


VIEWED_SHARD = Attribute[ViewedShard | None]("viewed_shard", None)
"""The `ViewedShard` of a view, beside its `FLAT_SHARD`; None for any other parameter."""
