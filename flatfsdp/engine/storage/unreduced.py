"""Lets an optimizer's `zero_grad()` drop gradients that it cannot see: accumulated, not yet reduced.

In:   the parameters of one master shard that the optimizer has.
Out:  a tensor in each `.grad` while gradients are accumulated; `were_zeroed` once these are gone.
Next: `engine/step/root.py` asks at every forward and backward, and drops what was accumulated.

    .grad of the parameter       zero_grad() is noticed by
    none: an `Unreduced` marker  another object, or None
    any other gradient           another object, or None, or its own `zero_` (`ShardGrad.zeroings`)

PyTorch has no hook for `zero_grad()`.  The values of a gradient do not tell: that of a penalty may be zero.

A penalty, `loss + w * sum(p.pow(2).sum() for p in model.parameters())`, reaches the optimizer's parameters
themselves.  Autograd adds its gradient to `.grad`, in any microbatch, and the reduction adds to that
(`MasterShard.add_grad`).  Two hooks on each parameter keep the marker out of autograd's way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.main_grad import GRAD
from flatfsdp.engine.storage.shard_grad import Place, ShardGrad, ShardInModel
from flatfsdp.engine.storage.state import GroupState
from flatfsdp.torch_private import receives_gradient, weakly

_GRAD_FN: Any = Tensor.grad_fn


class Unreduced(Tensor):
    """Stands in `.grad` for gradients that are accumulated and not yet reduced; all its elements are one.

    `zero_grad(set_to_none=False)` puts zeros in its place.  Any other use raises, because an optimizer would
    take it for a zero gradient.
    """

    _parameter: weakref.ref[nn.Parameter]
    _place: Place

    @staticmethod
    def of(parameter: nn.Parameter, place: Place) -> Unreduced:
        """Makes the marker for a parameter whose gradient is being accumulated."""
        marker = parameter.new_zeros(()).expand(parameter.shape).as_subclass(Unreduced)
        # The parameter refers to the marker; a reference back would keep both alive for good.
        marker._parameter = weakref.ref(parameter)
        marker._place = place
        return marker

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func == _GRAD_FN.__get__:
            return None
        if func is Tensor.__repr__:
            return "<gradients that are accumulated and not yet reduced>"
        if func in (Tensor.requires_grad_, Tensor.zero_):
            # Optimizers and modules do this to every gradient that they are about to zero in place.
            marker = args[0]
            parameter = marker._parameter()
            if parameter is not None and parameter.grad is marker:
                zeros = ShardGrad.of(torch.zeros_like(parameter.detach()), marker._place)
                zeros.stands_for_none = True
                parameter.grad = zeros
            return marker
        raise RuntimeError(f"`.grad` of a parameter was read (by an optimizer's step, say) while {UNREDUCED}")


UNREDUCED = (
    "gradients are accumulated and not yet reduced.  Run the last backward of the step first: outside of "
    "no_sync(), with set_is_last_backward(True), or in the microbatches() loop; zero_grad() drops them"
)
"""End of a message about a use of gradients that came too early."""


def reduced_grad(parameter: nn.Parameter, where: Attribute[Tensor | None] = GRAD) -> Tensor | None:
    """The reduced gradient of an optimizer's parameter, in `.grad` or `.main_grad`; None if there is none."""
    grad = where.of(parameter)
    return None if isinstance(grad, Unreduced) else grad


_GRAD_OF = attrgetter("grad")


class UnreducedMarks:
    """Watches `.grad` of the parameters of one shard from the end of one backward to the next.

    Args:
        parameters: the parameters of the shard that the optimizer has.
        shard: the shard, as its gradients know it.
        state: facts about the group; `changes` is raised when a watch begins or ends.

    Attributes:
        places: whose gradients those of the parameters are.
        is_on: whether the gradients are watched.
        watched: what is in the `.grad` of each parameter while it is watched.
        zeroings: how often each was zeroed; empty if all are markers, of which identity tells all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shard: ShardInModel, state: GroupState) -> None:
        self.parameters, self._state = parameters, state
        self.places = [Place(shard, index) for index in range(len(parameters))]
        self.is_on = False
        self._markers: Sequence[Unreduced] = ()
        self.watched: list[Tensor] = []
        self.zeroings: list[int] = []
        # Of each gradient that autograd is about to add: was there none before, or the one that is watched?
        self._arriving: dict[int, tuple[bool, bool]] = {}
        self._brought: set[int] = set()
        for index, parameter in enumerate(parameters):
            # PyTorch takes hooks for parameters that are trained, and keeps them while they are frozen.
            trains = parameter.requires_grad
            # A penalty may reach a parameter that is trained later.
            parameter.requires_grad_(True)
            parameter.register_hook(weakly(self, UnreducedMarks._before_autograd, index))
            parameter.register_post_accumulate_grad_hook(weakly(self, UnreducedMarks._after_autograd, index))
            parameter.requires_grad_(trains)

    def start(self) -> None:
        """Puts markers where there is no gradient, and watches the gradients that are there."""
        self._state.changes += 1
        self._markers = self._markers or list(map(Unreduced.of, self.parameters, self.places))
        for parameter, marker, place in zip(self.parameters, self._markers, self.places, strict=True):
            grad = parameter.grad
            if grad is None:
                parameter.grad = marker
            elif type(grad) not in (Unreduced, ShardGrad):
                # The same memory, which counts from now on how often it is zeroed.
                parameter.grad = ShardGrad.of(grad, place)
        self.is_on = True
        self.watched = list(map(_GRAD_OF, self.parameters))
        are_markers = all(map(is_, self.watched, self._markers))
        self.zeroings = [] if are_markers else list(map(_zeroings, self.watched))

    @property
    def were_zeroed(self) -> bool:
        """Whether the gradients were zeroed or taken away.

        Raises:
            RuntimeError: if only some of them were.
        """
        # The common case, unchanged markers, without a loop in Python: this runs in every forward.
        if not self.zeroings and all(map(is_, map(_GRAD_OF, self.parameters), self.watched)):
            return False
        found = zip(self.parameters, self.watched, self.zeroings or [0] * len(self.watched), strict=True)
        zeroed = [p.grad is not grad or _zeroings(grad) != before for p, grad, before in found]
        if any(zeroed) and not all(zeroed):
            raise RuntimeError(
                "an optimizer has zeroed a part of a unit's gradients while they were accumulated, which are "
                "dropped together; zero those of all optimizers, or none, between two microbatches"
            )
        return any(zeroed)

    def stop(self) -> None:
        """Ends the watch, and removes the markers."""
        self._state.changes += 1
        for parameter, marker in zip(self.parameters, self._markers, strict=False):
            if parameter.grad is marker:
                parameter.grad = None
        self.is_on, self.watched, self.zeroings = False, [], []

    def autograds(self) -> dict[int, ShardGrad]:
        """Gradients that autograd has made since the last reduction, by the numbers of their parameters."""
        found = ((index, self.parameters[index].grad) for index in self._brought)
        return {i: grad for i, grad in found if isinstance(grad, ShardGrad) and grad.is_autograds}

    def take_autograds(self) -> dict[int, ShardGrad]:
        """Takes these gradients from the parameters."""
        taken = self.autograds()
        for index in taken:
            self.parameters[index].grad = None
        self._brought.clear()
        return taken

    def _before_autograd(self, index: int, _grad: Tensor) -> None:
        """Autograd is about to add a gradient of its own to `.grad`."""
        parameter = self.parameters[index]
        if not receives_gradient(parameter):
            # `autograd.grad` asks for it, and accumulates nothing.
            return
        if len(parameter._post_accumulate_grad_hooks or ()) > 1:
            raise RuntimeError(
                "a parameter with a post-accumulate-grad hook got a gradient of its own (of a penalty, say), "
                "before that of the loss; make it outside of autograd, in the hook, or take the hook away"
            )
        grad = parameter.grad
        is_watched = self.is_on and grad is self.watched[index]
        if isinstance(grad, Unreduced) or (isinstance(grad, ShardGrad) and grad.stands_for_none):
            # Autograd would add to it in place.
            grad = parameter.grad = None
        self._arriving[index] = grad is None, is_watched

    def _after_autograd(self, index: int, parameter: nn.Parameter) -> None:
        (was_empty, is_watched), grad = self._arriving.pop(index), parameter.grad
        assert grad is not None
        self._state.changes += 1
        self._state.from_autograd += 1
        if was_empty:
            parameter.grad = grad = ShardGrad.of(grad, self.places[index])
            grad.is_autograds = True
            self._brought.add(index)
        # A penalty is no `zero_grad()`.
        if is_watched and grad is not self.watched[index]:
            # Another object, but not by the user's hand.
            self.watched[index] = grad
            self.zeroings = self.zeroings or [0] * len(self.watched)
            self.zeroings[index] = _zeroings(grad)


def _zeroings(grad: Tensor) -> int:
    return grad.zeroings if isinstance(grad, ShardGrad) else 0
