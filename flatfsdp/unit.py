"""One wrapped module through forward and backward: when its parameters come and go, when it is done.

In:   calls of the module (`before_forward`, `after_forward`), gradients (`landed`), autograd's hooks.
Out:  `unshard`, `wait` and `reshard` on its groups, `Reducer.ready` when its last gradient has landed.
Next: `root.py` ends the backward for all units together.

    event             parameters                         gradients
    before_forward    unshard, prefetch, wait            -
    after_forward     reshard, unless kept (see below)   -
    _before_backward  unshard, prefetch, wait            -
    landed            -                                  one more slot of this backward is in main_grad
    _after_backward   reshard, unless kept               all slots are in: ready to reduce, if reducing
    end_of_backward   reshard, unless kept               slots that got nothing are settled by the root

Kept: with `reshard_after_forward=False` until the last backward of a step; the root module from its forward
to its backward, because its head runs last in one and first in the other.  Nothing is kept where no
backward follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatfsdp.tensors import tensors_in
from flatfsdp.unshard import FlatGroup, ShardState

if TYPE_CHECKING:
    from flatfsdp.root import Root


def in_backward() -> bool:
    """Whether autograd is running: a forward that runs now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Unit:
    """The flat groups of one wrapped module and their bookkeeping.

    Attributes:
        groups: of the parameters that are trained, and of those that are frozen; either may be missing.
        trained: the group that is trained.
        root: shared state of the model; set when the root module is first used.
    """

    def __init__(self, reshard_after_forward: bool) -> None:
        self.groups: list[FlatGroup] = []
        self.trained: FlatGroup | None = None
        self._has_frozen = False
        self.root: Root
        self._reshard_after_forward = reshard_after_forward
        self._landed_slots: set[int] = set()
        self._inputs_done = False

    def add(self, group: FlatGroup) -> None:
        self.groups.append(group)
        if group.trainable:
            self.trained = group
        else:
            self._has_frozen = True

    # ---- parameters -------------------------------------------------------------------------------------

    def unshard(self) -> None:
        for group in self.groups:
            group.unshard(self.root.gather_lane)

    def _wait(self) -> None:
        for group in self.groups:
            group.wait()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def drop_unused(self) -> None:
        """Frees what was gathered ahead and not waited for."""
        for group in self.groups:
            if group.state is ShardState.GATHERING:
                group.reshard()

    def expire(self) -> None:
        for group in self.groups:
            group.expire()

    def _use(self, upcoming: Iterator[Unit]) -> None:
        """Gathers this unit first, then what comes after it, and waits for this one only."""
        self.unshard()
        for unit in upcoming:
            unit.unshard()
        self._wait()

    # ---- forward ----------------------------------------------------------------------------------------

    def before_forward(self) -> int:
        """Makes the parameters ready; returns the unit's position in this forward."""
        if in_backward():
            # A recomputation: its order says nothing about the next forward, and a unit gathered ahead of
            # it may have finished its backward already, so that nobody would free it.
            position = -1
            self._use(iter(()))
        else:
            position = self.root.order.record(self)
            self._use(self.root.order.after(position))
        for group in self.groups:
            group.params.begin_forward()
        return position

    def after_forward(self, position: int, inputs: Any, outputs: Any) -> None:
        """Frees the parameters, or arranges for the backward to find them."""
        differentiable = (
            [t for t in tensors_in(outputs) if t.requires_grad] if torch.is_grad_enabled() else []
        )
        for tensor in differentiable:
            tensor.register_hook(partial(self._before_backward, self.root.order.current, position))
        if differentiable and self._has_frozen:
            needing_grad = [t for t in tensors_in(inputs) if t.requires_grad]
            if needing_grad:
                torch.autograd.graph.register_multi_grad_hook(needing_grad, self._inputs_ready)
        if in_backward():
            return
        # A backward that starts from something in which no tensor was found could not gather them again.
        is_opaque = torch.is_grad_enabled() and next(tensors_in(outputs), None) is None
        keeps = self is self.root.unit or not self._reshard_after_forward
        if not is_opaque and not (differentiable and keeps):
            self.reshard()

    # ---- backward ---------------------------------------------------------------------------------------

    def _before_backward(self, order: list[Unit], position: int, _grad: Tensor) -> None:
        self.root.begin_backward()
        self._use(self.root.order.before(order, position))
        for group in self.groups:
            group.params.begin_backward()

    @property
    def backward_done(self) -> bool:
        """Whether all gradients of the running backward have landed."""
        return self.trained is not None and len(self._landed_slots) == len(self.trained.layout.slots)

    def landed(self, index: int | None) -> None:
        """Slot `index` of the trained group, or every slot, holds this backward's gradient."""
        self.root.begin_backward()
        assert self.trained is not None
        if index is None:
            self._landed_slots.update(range(len(self.trained.layout.slots)))
        else:
            self._landed_slots.add(index)
        if self.backward_done:
            if self.root.reduces:
                self.root.reducer.ready(self.trained)
            # Every gradient has landed, so no trained parameter is needed any more; a frozen one may be.
            if not self._has_frozen or self._inputs_done:
                self._after_backward()

    def _inputs_ready(self, _grads: Any) -> None:
        self._inputs_done = True
        if self.backward_done or self.trained is None:
            self._after_backward()

    def _after_backward(self) -> None:
        if self._reshard_after_forward or self.root.microbatch.is_last:
            self.reshard()

    def end_of_backward(self) -> None:
        """The whole backward is over: frees what is still there and starts to count anew."""
        self._after_backward()
        self._landed_slots.clear()
        self._inputs_done = False

    def abandon(self) -> None:
        """After an exception: frees parameters and drops gradients."""
        self.reshard()
        self.expire()
        self._landed_slots.clear()
        self._inputs_done = False
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops what was accumulated and not yet reduced."""
        for group in self.groups:
            if group.main_grad is not None:
                group.main_grad.drop()
