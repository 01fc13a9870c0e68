"""Connects modules to a flat buffer, and gradients to `main_grad`: one class a setting of the flag.

In:   the unsharded flat buffer of one group, and the places in the module where its parameters were.
Out:  `module.weight` in forward and backward; gradients in `MainGrad`; a call of `landed` for each.
Next: `engine/step/driven_unit.py` counts what has landed.

`Leaves` (`optimize_backward_concat=True`) and `Views` (False) are used alike:

    follow     train or freeze each of the parameters from now on
    show       the buffer has been gathered
    conceal    the buffer is about to be freed: show NaN, in memory that is safe to read
    rebind     bind the parameters again after something else was bound
    pack       the tensor that layers read in place of several parameters, see `packed_operands.py`

    take_writes  find what somebody wrote to the tensors, and undo what no version counts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.contract.packed import leave_packed
from flatfsdp.engine.storage.flat_buffer import Placeholders
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.storage.packed_operands import Operands, PackedTensors
from flatfsdp.flat.binding import Binding
from flatfsdp.torch_private import FREED, mark_freed, run_as_soon_as_ready, running_backward, weakly

_ADDRESS = Tensor.data_ptr

Landed = Callable[[int | None], None]
"""Called once a gradient is in `main_grad`, with its slot's index, or None for all slots."""


class Shown(ABC):
    """What the modules of one group have as parameters, in slot order, and what layers read in place of them.

    Args:
        binding: places in the modules, which have their own parameters still.
        operands: what GEMMs read; its memory must be there now, and may come and go later.
        into: where gradients land; None for parameters that are built frozen.
        landed: called for each gradient.

    Attributes:
        trained: for each slot, whether graphs of coming forwards lead to its parameter.
        shown_now: what the module has at this moment.
    """

    trained: list[bool]
    shown_now: Sequence[Tensor]
    _parts: Sequence[Tensor]
    _counters: tuple[Tensor, ...]

    def __init__(self, binding: Binding, operands: Operands, into: MainGrad | None, landed: Landed) -> None:
        self._binding = binding
        self._landed = landed
        self._main_grad = into
        # Made now, because views cannot be made of memory that is gone.
        self._places = binding.layout.views(operands.shown)
        self._absent = Placeholders(binding.layout, operands.shown)
        self._packs = PackedTensors(binding.layout, operands)
        self._is_concealed = False
        for tensors in self._open(binding.parameters(), operands.shown):
            for slot, tensor in enumerate(tensors):
                operands.leave_on(tensor, range(slot, slot + 1))
        for index, owners in enumerate(binding.pack_owners):
            for owner, name in owners:
                leave_packed(owner, name, partial(self.pack, index))
        self._known = self._versions()

    @abstractmethod
    def _open(self, parameters: Sequence[nn.Parameter], unsharded: Tensor) -> list[Sequence[Tensor]]:
        """Shows the parameters for the first time.

        Sets `_parts`, to which graphs lead, and `_counters`, with the versions of all that graphs save.

        Returns:
            Lists of what the module may have while the parameters are there.
        """

    @abstractmethod
    def _place(self) -> None:
        """Shows the gathered parameters, or placeholders if they are concealed."""

    def remake_packs(self) -> None:
        """Makes new autograd nodes, whose backward runs on the current stream."""
        if self._main_grad is not None:
            self._packs.train(self._parts, self._main_grad)

    @abstractmethod
    def _versions(self) -> list[int]:
        """Version counters of the parameters, in slot order."""

    def take_writes(self) -> Sequence[int]:
        """Slots that were written to since the last call; `parameter.data = ...` is undone."""
        # First, as it writes: `tensor.data = ...` undoes what has been done to a tensor.
        is_absent, shown = self._is_concealed, self.shown_now
        taken = self._absent.take_back(shown) if is_absent else _take_back(shown, self._places)
        before, self._known = self._known, self._versions()
        if before == self._known and not taken:
            return ()
        pairs = enumerate(zip(before, self._known, strict=True))
        return [slot for slot, (old, new) in pairs if old != new or slot in taken]

    def show(self) -> None:
        """Lets modules see the gathered parameters."""
        if self._is_concealed:
            self._is_concealed = False
            mark_freed(self._counters, is_freed=False)
            self._place()

    def conceal(self) -> None:
        """Takes the gathered parameters away from modules."""
        if not self._is_concealed:
            self._is_concealed = True
            # Whoever saved one, and whose backward does not gather the unit first, would read NaN, or freed
            # memory, and crash.
            mark_freed(self._counters, is_freed=True)
            self._place()

    def pack(self, index: int) -> Tensor | None:
        """What layers read in place of the parts of pack `index`.

        None while those are whole parameters, and if some of them are frozen, and others trained.
        """
        if self._binding.is_registered:
            return None
        return self._packs.get(index, is_there=not self._is_concealed, trained=self.trained)

    def rebind(self) -> None:
        """Binds the parameters to their modules again."""
        self._binding.bind(self.shown_now)


class Leaves(Shown):
    """The module keeps its own Parameter objects, as leaves that alias the flat buffer.

    Each gradient lands by itself; nothing is concatenated.  Also serves parameters that were built frozen,
    which have no `main_grad` until they are trained.
    """

    def _open(self, parameters: Sequence[nn.Parameter], unsharded: Tensor) -> list[Sequence[Tensor]]:
        self._parts = self.shown_now = parameters
        # Graphs save the parameters, views of them, and packs, which count with the buffer.
        self._counters = (*parameters, unsharded)
        self._place()
        self.trained = [False] * len(parameters)
        if self._main_grad is not None:
            self.land_in(self._main_grad)
        self.rebind()
        return [parameters]

    def land_in(self, main_grad: MainGrad) -> None:
        """Trains the parameters, with gradients that land in `main_grad`."""
        self._main_grad = main_grad
        self.follow([True] * len(self._parts))
        for index, parameter in enumerate(self._parts):
            parameter.register_post_accumulate_grad_hook(weakly(self, Leaves._land, index))
        main_grad.expose(self._parts)
        self.remake_packs()

    def follow(self, trained: Sequence[bool]) -> None:
        """Sets whether graphs of coming forwards lead to the parameter of each slot."""
        self.trained = list(trained)
        for parameter, trains in zip(self._parts, trained, strict=True):
            parameter.requires_grad_(trains)

    def _versions(self) -> list[int]:
        """Version counters of the parameters, in slot order; an in-place write to one raises its own."""
        freed = FREED if self._is_concealed else 0
        return [parameter._version - freed for parameter in self._parts]

    def _place(self) -> None:
        # `.data` changes neither the object that users and graphs have, nor its version.
        values = self._absent.tensors if self._is_concealed else self._places
        for parameter, value in zip(self._parts, values, strict=True):
            parameter.data = value

    def _land(self, index: int, parameter: Tensor) -> None:
        if not self.trained[index]:
            # Frozen since the forward: autograd accumulates nothing, but calls the hook.
            return
        grad, parameter.grad = parameter.grad, None
        # No gradient: the layer wrote it into main_grad itself.
        if grad is not None:
            assert self._main_grad is not None
            self._main_grad.land(index, grad)
        self._landed(index)


class Views(Shown):
    """The module has autograd views of one flat leaf; several uses in one graph add up in the view.

    Autograd concatenates their gradients in each backward, with zeros for unused parameters, and all slots
    land at once.

    Raises:
        ValueError: for a parameter whose hooks need a leaf.
    """

    def _open(self, parameters: Sequence[nn.Parameter], unsharded: Tensor) -> list[Sequence[Tensor]]:
        slots = self._binding.layout.slots
        # A leaf, not a view: its views tell by it whether they are trained (`receives_gradient`).
        self._leaf = unsharded.detach().requires_grad_()
        self._leaf.register_post_accumulate_grad_hook(weakly(self, Views._land))
        # The graph of a view saves no tensors, so one set of views serves all forwards.
        with torch.inference_mode(False), torch.enable_grad():
            self._parts = views = self._binding.layout.views(self._leaf)
        self._frozen_views = self._binding.layout.views(unsharded)
        # The views count with the leaf.
        self._counters = (self._leaf,)
        # The backward in which a gradient last came to each view.
        self._arrived: dict[int, int] = {}
        for index, (view, parameter) in enumerate(zip(views, parameters, strict=True)):
            # Autograd would run the concat of every unit last, because it is older than any forward.
            run_as_soon_as_ready(view, depth=2)
            view.register_hook(weakly(self, Views._arrive, index))
            if parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter {slots[index].name} has a post-accumulate-gradient hook, which only leaves "
                    "have; pass optimize_backward_concat=True, or register a tensor hook"
                )
            # The module will not see the old parameters again.
            for hook in (parameter._backward_hooks or {}).values():
                view.register_hook(hook)
        self.remake_packs()
        self.follow([True] * len(views))
        for tensors in (views, self._frozen_views, self._absent.tensors):
            # An optimizer that has one of them would update nothing.
            for slot, tensor in zip(slots, tensors, strict=True):
                TAKEN_AS.leave(tensor, slot.name)
        return [views, self._frozen_views]

    def follow(self, trained: Sequence[bool]) -> None:
        """Sets whether graphs of coming forwards lead from the view of each slot to the flat leaf."""
        self.trained = list(trained)
        self._leaf.requires_grad_(any(trained))
        views = zip(self._parts, self._frozen_views, trained, strict=True)
        self._present = [view if trains else frozen for view, frozen, trains in views]
        for absent, trains in zip(self._absent.tensors, trained, strict=True):
            absent.requires_grad_(trains)
        self._place()

    def _versions(self) -> list[int]:
        """Version counters, in slot order: an in-place write to one view raises those of all."""
        shared = self._leaf._version - (FREED if self._is_concealed else 0)
        return [shared + absent._version for absent in self._absent.tensors]

    def _place(self) -> None:
        self.shown_now = self._absent.tensors if self._is_concealed else self._present
        self.rebind()

    def rebind(self) -> None:
        """Binds what modules have now to them again, with what layers find gradients' places by."""
        super().rebind()
        if self._main_grad is not None and any(self.trained):
            self._main_grad.expose(self.shown_now)

    def _arrive(self, index: int, grad: Tensor | None) -> None:
        # None: the layer wrote it into main_grad itself.
        if grad is not None:
            self._arrived[index] = running_backward()

    def _land(self, leaf: Tensor) -> None:
        if not any(self.trained):
            # Frozen since the forward, as in `Leaves`.
            return
        grad, leaf.grad = leaf.grad, None
        # No gradient: the layers wrote all of them into main_grad themselves (torch 2.13 makes zeros of it).
        if grad is not None:
            now = running_backward()
            used = {index for index, backward in self._arrived.items() if backward == now}
            for index in used:
                if not self.trained[index]:
                    # Frozen since the forward, too; the concat does not know.
                    self._binding.layout.views(grad)[index].zero_()
            assert self._main_grad is not None
            self._main_grad.land_flat(grad, (index for index in used if self.trained[index]))
        self._landed(None)


def _take_back(shown: Sequence[Tensor], places: Sequence[Tensor]) -> Sequence[int]:
    """Gives `shown` the memory of `places` again; returns the indices of those that had other memory."""
    ours, theirs = list(map(_ADDRESS, places)), list(map(_ADDRESS, shown))
    if ours == theirs:
        return ()
    moved = [slot for slot, address in enumerate(ours) if address != theirs[slot]]
    for slot in moved:
        shown[slot].data = places[slot]
    return moved
