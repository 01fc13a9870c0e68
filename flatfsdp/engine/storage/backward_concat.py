"""Connects modules to a flat buffer, and gradients to `main_grad`: one class a setting of the flag.

In:   the unsharded flat buffer of one group, and the places in the module where its parameters were.
Out:  `module.weight` in forward and backward; gradients in `MainGrad`; a call of `landed` for each.
Next: `engine/step/unit.py` counts what has landed.

`Leaves` (`optimize_backward_concat=True`) and `Views` (False) are used alike:

    follow     train or freeze each of the parameters from now on
    show       the buffer has been gathered
    conceal    the buffer is about to be freed: show NaN, in memory that is safe to read
    take_back  find, and undo, what somebody did to the tensors that no version counts
    rebind     bind the parameters again after something else was bound
    pack      the tensor that layers read in place of several parameters, see `packed_parts.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flatfsdp.contract.claimed import TAKEN_AS
from flatfsdp.engine.storage.fp8_weights import FP8Weights
from flatfsdp.engine.storage.main_grad import MainGrad
from flatfsdp.engine.storage.packed_parts import PackedTensors
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import FlatLayout
from flatfsdp.torch_private import (
    FREED,
    copied_on_write,
    is_copied_on_write,
    mark_freed,
    run_as_soon_as_ready,
    running_backward,
    shares_memory,
    unmark_freed,
    weakly,
)

_ADDRESS = Tensor.data_ptr


class Leaves:
    """The module keeps its own Parameter objects, as leaves that alias the flat buffer.

    Each gradient lands by itself; nothing is concatenated.  Also serves parameters that were built frozen,
    which have no `main_grad` until they are trained.

    Args:
        parameters: the binding's parameters, in slot order.
        unsharded: 1-D, padded; its memory must be there now, and may come and go later.
        landed: called with the slot's index once a gradient is in `main_grad`.
        fp8: FP8 form of the parameters, for `packs`; None for others.

    Attributes:
        packs: what layers have in place of several parameters.
        trained: for each slot, whether graphs of coming forwards lead to its parameter.
    """

    def __init__(
        self,
        binding: Binding,
        parameters: Sequence[nn.Parameter],
        unsharded: Tensor,
        main_grad: MainGrad | None,
        landed: Callable[[int | None], None],
        fp8: FP8Weights | None,
    ) -> None:
        self._binding = binding
        self._main_grad: MainGrad | None = None
        self._landed = landed
        self._parameters = parameters
        self.trained = [main_grad is not None] * len(parameters)
        self.packs = PackedTensors(binding.layout, unsharded, fp8)
        self._views = binding.layout.views(unsharded)
        self._absent = _Absent(binding.layout, unsharded)
        # Graphs save the parameters, views of them, and packs, which count with the buffer.
        self._counters = (*parameters, unsharded)
        mark_freed(self._counters)
        self._is_concealed = True
        self.show()
        if main_grad is not None:
            self.land_in(main_grad)
        self.rebind()

    def land_in(self, main_grad: MainGrad) -> None:
        """Trains the parameters, with gradients that land in `main_grad`."""
        self._main_grad = main_grad
        self.follow([True] * len(self._parameters))
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(weakly(self, Leaves._land, index))
        main_grad.expose(self._parameters)
        self.packs.train(self._parameters, main_grad)

    def remake_packs(self) -> None:
        """Makes new autograd nodes, whose backward runs on the current stream."""
        assert self._main_grad is not None
        self.packs.train(self._parameters, self._main_grad)

    @property
    def shown(self) -> Sequence[Sequence[Tensor]]:
        """What the module may have while the parameters are there, in slot order."""
        return [self._parameters]

    def follow(self, trained: Sequence[bool]) -> None:
        """Sets whether graphs of coming forwards lead to the parameter of each slot."""
        self.trained = list(trained)
        for parameter, trains in zip(self._parameters, trained, strict=True):
            parameter.requires_grad_(trains)

    @property
    def shown_now(self) -> Sequence[Tensor]:
        """What the module has at this moment, in slot order."""
        return self._parameters

    @property
    def versions(self) -> list[int]:
        """Version counters of the parameters, in slot order; an in-place write to one raises its own."""
        freed = FREED if self._is_concealed else 0
        return [parameter._version - freed for parameter in self._parameters]

    def take_back(self) -> Sequence[int]:
        """Undoes `parameter.data = ...`, and uncounted writes to placeholders; returns the slots."""
        if self._is_concealed:
            return self._absent.take_back(self._parameters)
        return _take_back(self._parameters, self._views)

    def show(self) -> None:
        """Lets modules see the gathered parameters."""
        if self._is_concealed:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.data = view
            unmark_freed(self._counters)
            self._is_concealed = False

    def conceal(self) -> None:
        """Takes the gathered parameters away from modules."""
        if self._is_concealed:
            return
        for parameter, absent in zip(self._parameters, self._absent.tensors, strict=True):
            parameter.data = absent
        # Whoever saved one, and whose backward does not gather the unit first, would read NaN.
        mark_freed(self._counters)
        self._is_concealed = True

    def pack(self, index: int) -> Tensor | None:
        """What layers read in place of the parts of pack `index`.

        None while those are whole parameters, and if some of them are frozen, and others trained.
        """
        if self._binding.is_registered:
            return None
        return self.packs.get(index, is_there=not self._is_concealed, trained=self.trained)

    def rebind(self) -> None:
        """Binds the parameters to their modules again."""
        self._binding.bind(self._parameters)

    @property
    def displaced(self) -> str | None:
        """Name of a parameter that somebody has replaced."""
        return self._binding.displaced(self._parameters)

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


class Views:
    """The module has autograd views of one flat leaf; several uses in one graph add up in the view.

    Autograd concatenates their gradients in each backward, with zeros for unused parameters, and all slots
    land at once.

    Attributes:
        packs: what layers have in place of several parameters.
        trained: for each slot, whether coming forwards see a view that leads to the leaf.

    Raises:
        ValueError: for a parameter whose hooks need a leaf.
    """

    def __init__(
        self,
        binding: Binding,
        parameters: Sequence[nn.Parameter],
        unsharded: Tensor,
        main_grad: MainGrad,
        landed: Callable[[int | None], None],
        fp8: FP8Weights | None,
    ) -> None:
        self._binding = binding
        self._main_grad = main_grad
        self._landed = landed
        self._absent = _Absent(binding.layout, unsharded)
        self._places = binding.layout.views(unsharded)
        self._frozen_views = binding.layout.views(unsharded)
        self.packs = PackedTensors(binding.layout, unsharded, fp8)
        # A leaf, not a view: its views tell by it whether they are trained (`receives_gradient`).
        self._leaf = unsharded.detach().requires_grad_()
        self._leaf.register_post_accumulate_grad_hook(weakly(self, Views._land))
        # The graph of a view saves no tensors, so one set of views serves all forwards.
        with torch.inference_mode(False), torch.enable_grad():
            self._views = binding.layout.views(self._leaf)
        # The backward in which a gradient last came to each view.
        self._arrived: dict[int, int] = {}
        for index, view in enumerate(self._views):
            # Autograd would run the concat of every unit last, because it is older than any forward.
            run_as_soon_as_ready(view, depth=2)
            view.register_hook(weakly(self, Views._arrive, index))
        self.packs.train(self._views, main_grad)
        self._take_over_hooks(parameters)
        self._is_concealed = False
        self.follow([True] * len(self._views))
        for tensors in (self._views, self._frozen_views, self._absent.tensors):
            # An optimizer that has one of them would update nothing.
            for slot, tensor in zip(binding.layout.slots, tensors, strict=True):
                TAKEN_AS.leave(tensor, slot.name)

    def _take_over_hooks(self, parameters: Sequence[nn.Parameter]) -> None:
        """Moves the user's hooks to the views: the module will not see the old parameters again."""
        for slot, parameter, view in zip(self._binding.layout.slots, parameters, self._views, strict=True):
            if parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"parameter {slot.name} has a post-accumulate-gradient hook, which only a leaf can have; "
                    "pass optimize_backward_concat=True, or register a tensor hook"
                )
            for hook in (parameter._backward_hooks or {}).values():
                view.register_hook(hook)

    @property
    def shown(self) -> Sequence[Sequence[Tensor]]:
        """What the module may have while the parameters are there, in slot order."""
        return [self._views, self._frozen_views]

    def follow(self, trained: Sequence[bool]) -> None:
        """Sets whether graphs of coming forwards lead from the view of each slot to the flat leaf."""
        self.trained = list(trained)
        self._leaf.requires_grad_(any(trained))
        views = zip(self._views, self._frozen_views, trained, strict=True)
        self._present = [view if trains else frozen for view, frozen, trains in views]
        for absent, trains in zip(self._absent.tensors, trained, strict=True):
            absent.requires_grad_(trains)
        self.rebind()

    @property
    def versions(self) -> list[int]:
        """Version counters, in slot order: an in-place write to one view raises those of all."""
        shared = self._leaf._version - (FREED if self._is_concealed else 0)
        return [shared + absent._version for absent in self._absent.tensors]

    def take_back(self) -> Sequence[int]:
        """Undoes `view.data = ...`, and uncounted writes to placeholders; returns the slots."""
        if self._is_concealed:
            return self._absent.take_back(self._absent.tensors)
        return _take_back(self.shown_now, self._places)

    def show(self) -> None:
        """Lets modules see the gathered parameters."""
        if self._is_concealed:
            self._is_concealed = False
            unmark_freed((self._leaf,))
            self.rebind()

    def conceal(self) -> None:
        """Takes the gathered parameters away from modules."""
        if self._is_concealed:
            return
        self._is_concealed = True
        # Its views count with it.  Whoever saved one would read freed memory, and crash.
        mark_freed((self._leaf,))
        self.rebind()

    def pack(self, index: int) -> Tensor | None:
        """What layers read in place of the parts of pack `index`.

        None while those are whole parameters, and if some of them are frozen, and others trained.
        """
        if self._binding.is_registered:
            return None
        return self.packs.get(index, is_there=not self._is_concealed, trained=self.trained)

    def rebind(self) -> None:
        """Binds the parameters to their modules again."""
        self._binding.bind(self.shown_now)
        if any(self.trained):
            self._main_grad.expose(self.shown_now)

    @property
    def displaced(self) -> str | None:
        """Name of a parameter that somebody has replaced."""
        return self._binding.displaced(self.shown_now)

    @property
    def shown_now(self) -> Sequence[Tensor]:
        """What the module has at this moment, in slot order."""
        return self._absent.tensors if self._is_concealed else self._present

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
            for index in [index for index in used if not self.trained[index]]:
                # Frozen since the forward, too; the concat does not know.
                self._binding.layout.views(grad)[index].zero_()
                used.remove(index)
            self._main_grad.land_flat(grad, used)
        self._landed(None)


class _Absent:
    """Placeholders for sharded parameters: their shapes, full of NaN, in the memory of one element.

    Printing a view of freed memory would crash the process.  The memory is copied on write: PyTorch gives it
    up at the first write to one of its tensors, through `.data` as well, which tells without reading a value.

    Attributes:
        tensors: the placeholders, in slot order.
    """

    def __init__(self, layout: FlatLayout, like: Tensor) -> None:
        self._shapes = [slot.shape for slot in layout.slots]
        self._nans = torch.full((len(self._shapes),), torch.nan, dtype=like.dtype, device=like.device)
        self.tensors = self._fresh()

    def _fresh(self) -> list[Tensor]:
        self._shared = copied_on_write(self._nans)
        # `.data` gives each a version counter of its own.
        return [nan.data.expand(shape) for nan, shape in zip(self._shared, self._shapes, strict=True)]

    def take_back(self, shown: Sequence[Tensor]) -> Sequence[int]:
        """Makes `shown` placeholders again if they no longer are; returns the slots that somebody changed.

        Args:
            shown: tensors that have the memory of the placeholders, in slot order.
        """
        if all(map(is_copied_on_write, shown)):
            return ()
        # `data_ptr()` and `numpy()` may write, for all that PyTorch knows; what they have read is NaN still.
        still_nan, memory = self._shared.isnan().tolist(), self._shared.untyped_storage()
        written = [
            slot
            for slot, tensor in enumerate(shown)
            if not (still_nan[slot] and shares_memory(tensor, memory)) and not is_copied_on_write(tensor)
        ]
        for tensor, fresh in zip(self.tensors, self._fresh(), strict=True):
            tensor.data = fresh
        for tensor, absent in zip(shown, self.tensors, strict=True):
            tensor.data = absent
        return written


def _take_back(shown: Sequence[Tensor], places: Sequence[Tensor]) -> Sequence[int]:
    """Gives `shown` the memory of `places` again; returns the indices of those that had other memory."""
    ours, theirs = list(map(_ADDRESS, places)), list(map(_ADDRESS, shown))
    if ours == theirs:
        return ()
    moved = [slot for slot, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their]
    for slot in moved:
        shown[slot].data = places[slot]
    return moved
