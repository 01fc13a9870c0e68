"""Lets an optimizer's `zero_grad()` drop gradients that it cannot see: accumulated, not yet reduced.

In:   the parameters of one master shard that the optimizer has.
Out:  a tensor in each `.grad` while gradients are accumulated; `were_zeroed` once these are gone.
Next: `engine/step/root.py` asks at every forward and backward, and drops what was accumulated.

    .grad of the parameter       zero_grad() is noticed by
    none: an `Unreduced` marker  another object, or None
    from an earlier reduction    another object, or None, or a `ShardGrad` that was zeroed
    a tensor set by the user     another object, or None, or zeros written to it

PyTorch has no hook for `zero_grad()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.main_grad import GRAD
from flatfsdp.engine.storage.changes import Changes, fetched
from flatfsdp.engine.storage.shard_grad import ShardGrad

_GRAD_FN: Any = Tensor.grad_fn


class Unreduced(Tensor):
    """Stands in `.grad` for gradients that are accumulated and not yet reduced; all its elements are one.

    `zero_grad(set_to_none=False)` puts zeros in its place.  Any other use raises, because an optimizer would
    take it for a zero gradient.
    """

    _parameter: weakref.ref[nn.Parameter]

    @staticmethod
    def of(parameter: nn.Parameter) -> Unreduced:
        """Makes the marker for a parameter whose gradient is being accumulated."""
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        marker = zero.expand(parameter.shape).as_subclass(Unreduced)
        # The parameter refers to the marker; a reference back would keep both alive for good.
        marker._parameter = weakref.ref(parameter)
        return marker

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _GRAD_FN.__get__:
            return None
        if func is Tensor.__repr__:
            return "<gradients that are accumulated and not yet reduced>"
        if func in (Tensor.requires_grad_, Tensor.zero_):
            # Optimizers and modules do this to every gradient that they are about to zero in place.
            marker = args[0]
            parameter = marker._parameter()
            if parameter is not None and parameter.grad is marker:
                parameter.grad = torch.zeros_like(parameter.detach())
            return marker
        raise RuntimeError(
            "`.grad` of a flat parameter was read (by an optimizer's step, say) while its gradients are "
            "accumulated and not yet reduced; run the last backward of the step outside of no_sync(), or "
            "with set_is_last_backward(True), before that; zero_grad() drops what is accumulated"
        )


def reduced_grad(parameter: nn.Parameter, where: Attribute[Tensor | None] = GRAD) -> Tensor | None:
    """The reduced gradient of an optimizer's parameter, in `.grad` or `.main_grad`; None if there is none."""
    grad = where.of(parameter)
    return None if isinstance(grad, Unreduced) else grad


class _Watched(NamedTuple):
    """State of gradients when the watch began.

    Attributes:
        grads: gradient of each parameter.
        writes: for each, the number of times it had been zeroed; for a user's tensor, its version; for a
            marker, None.  Empty if all are markers.
        are_markers: whether all are markers.
    """

    parameters: Sequence[nn.Parameter]
    grads: Sequence[Tensor]
    writes: Sequence[int | None]
    are_markers: bool


_GRAD_OF = attrgetter("grad")
_NOTHING = _Watched((), (), (), True)


class UnreducedMarks:
    """Watches `.grad` of some parameters from the end of one backward to the next.

    Attributes:
        changes: raised when a watch begins or ends.
    """

    def __init__(self) -> None:
        self.changes = Changes()
        self._watched = _NOTHING
        self._marked: Sequence[nn.Parameter] = ()
        self._markers: Sequence[Unreduced] = ()

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Puts markers where there is no gradient, and watches the gradients that are there."""
        self.changes.count += 1
        markers = self._markers_of(parameters)
        for parameter, marker in zip(parameters, markers, strict=True):
            if parameter.grad is None:
                parameter.grad = marker
        grads = list(map(_GRAD_OF, parameters))
        are_markers = all(map(is_, grads, markers))
        writes = () if are_markers else list(map(_writes, grads))
        self._watched = _Watched(parameters, grads, writes, are_markers)

    def _markers_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[Unreduced]:
        """Markers, one a parameter, kept for the next time."""
        if len(self._marked) != len(parameters) or not all(map(is_, self._marked, parameters)):
            self._marked, self._markers = parameters, [Unreduced.of(parameter) for parameter in parameters]
        return self._markers

    @property
    def is_on(self) -> bool:
        """Whether markers are watched for."""
        return bool(self._watched.parameters)

    @property
    def were_zeroed(self) -> bool:
        """Whether the gradients were zeroed or taken away.

        Raises:
            RuntimeError: if only some of them were.
        """
        parameters, grads, writes, are_markers = self._watched
        # The common case, unchanged markers, without a loop in Python: this runs in every forward.
        if are_markers and all(map(is_, map(_GRAD_OF, parameters), grads)):
            return False
        zeroed = list(map(_was_zeroed, parameters, grads, writes or repeat(None)))
        if not any(zeroed):
            return False
        if not all(zeroed):
            raise RuntimeError(
                "an optimizer has zeroed a part of a unit's gradients while they were accumulated, and they "
                "are dropped together or not at all; zero those of all optimizers, or none, between two "
                "microbatches"
            )
        return True

    def stop(self) -> None:
        """Removes the markers."""
        self.changes.count += 1
        for parameter, grad in zip(self._watched.parameters, self._watched.grads, strict=True):
            if parameter.grad is grad and isinstance(grad, Unreduced):
                parameter.grad = None
        self._watched = _NOTHING


class AllMarkers:
    """The markers of a model in one list: between two replayed microbatches, one look at all of them.

    Args:
        marks: those of all groups.
        changes: raised by each of them.
    """

    def __init__(self, marks: Sequence[UnreducedMarks], changes: Changes) -> None:
        self._marks = marks
        self._changes = changes
        self._collected: int | None = None
        self._parameters: list[nn.Parameter] = []
        self._markers: list[Tensor] = []
        self._are_all = False

    @property
    def are_in_place(self) -> bool:
        """Whether every `.grad` is a marker, where it was put; if not, ask each of the groups."""
        if self._collected != self._changes.count:
            self._collect()
        found = map(_GRAD_OF, fetched(self._parameters))
        return self._are_all and all(map(is_, found, fetched(self._markers)))

    def _collect(self) -> None:
        watched = [marks._watched for marks in self._marks]
        self._parameters = [parameter for each in watched for parameter in each.parameters]
        self._markers = [grad for each in watched for grad in each.grads]
        self._are_all = all(each.are_markers for each in watched)
        self._collected = self._changes.count


def _writes(grad: Tensor) -> int | None:
    if isinstance(grad, Unreduced):
        return None
    return grad.zeroings if isinstance(grad, ShardGrad) else grad._version


def _was_zeroed(parameter: nn.Parameter, grad: Tensor, writes: int | None) -> bool:
    if parameter.grad is not grad:
        return True
    if _writes(grad) == writes:
        return False
    # Clipping changes the version, too, so look at the values.
    return isinstance(grad, ShardGrad) or not bool(grad.any())
