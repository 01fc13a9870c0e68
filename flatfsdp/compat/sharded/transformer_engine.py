"""Transformer Engine's modules in a unit.

Two of their methods are replaced, in the module itself:

    set_activation_dtype      compares the input's dtype with those of the listed parameters, which are this
                              rank's local shards, in master precision
    _get_weight_quantizers    makes the FP8 weights of a forward, which are saved for its backward: 2 bytes an
                              element.  A unit that frees its parameters between the two frees these, too,
                              and makes them again
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.engine.step.unit import Unit

_Saved = tuple[list[weakref.ref[Tensor]], Callable[[], Sequence[Tensor]]]
"""What one forward has made of one weight, and what makes tensors with the same contents again."""


class DerivedWeights:
    """What layers make of gathered weights, such as FP8 copies, and graphs of one unit's forwards have saved.

    They are freed with the parameters, and are there again, with the same bits, in the backward.
    """

    def __init__(self) -> None:
        self._there: list[_Saved] = []
        self._freed: list[_Saved] = []

    def add(self, tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        """Adds what one forward has made of one weight.

        Args:
            tensors: what autograd may save; only weak references are kept.
            again: makes tensors with the same contents from the gathered weight.
        """
        self._there.append(([weakref.ref(tensor) for tensor in tensors], again))

    def free(self) -> None:
        """Frees the memory of what is still saved."""
        saved = self._freed + self._there
        if saved:
            self._freed, self._there = _alive(saved), []
        for references, _ in self._freed:
            for reference in references:
                if (tensor := reference()) is not None:
                    # Autograd has saved the tensor, not its memory, which `.data` changes uncounted.
                    tensor.data = tensor.new_empty(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Fills the freed ones with what they held; the weights are gathered."""
        self._freed = _alive(self._freed)
        # One by one: if one fails, such as for lack of memory, the others are still known as freed.
        while self._freed:
            references, again = self._freed[0]
            for reference, value in zip(references, again(), strict=True):
                if (tensor := reference()) is not None:
                    tensor.data = value
            self._there.append(self._freed.pop(0))


def _alive(saved: list[_Saved]) -> list[_Saved]:
    """Those that a graph may still need."""
    return [each for each in saved if any(reference() is not None for reference in each[0])]


def _note_dtype(module: Any, inp: Tensor) -> None:
    """In the place of a module's `set_activation_dtype`: compares with the tensors that it computes with.

    Raises:
        TypeError: if the module computes with parameters of another dtype.
    """
    if torch.is_autocast_enabled():
        type(module).set_activation_dtype(module, inp)
        return
    for name, listed in module._parameters.items():
        tensor = vars(module).get(name, listed)
        if tensor is not None and tensor.dtype != inp.dtype:
            raise TypeError(
                f"{type(module).__name__} is given {inp.dtype}, and computes with {name} in {tensor.dtype}; "
                f"pass Precision(compute={inp.dtype}), or cast the input"
            )
    module.fast_setattr("activation_dtype", inp.dtype)


def _quantizers_of_weights(module: Any, unit: Unit) -> list[Any]:
    """In the place of a module's `_get_weight_quantizers`: tells the unit what they make.

    What they make again in the backward has the scale of its forward: delayed scaling's moves on between.

    Returns:
        The quantizers of one forward, or None where a weight is not quantized.
    """
    quantizers = type(module)._get_weight_quantizers(module)
    if not unit.policy.reshard_after_forward:
        return list(quantizers)
    return [None if each is None else _own(each, unit) for each in quantizers]


def _own(quantizer: Any, unit: Unit) -> Any:
    """A copy of the quantizer for one forward, which tells the unit what it makes."""
    own = quantizer.copy()
    own.quantize_impl = partial(_quantize, own, unit)
    return own


def _quantize(own: Any, unit: Unit, weight: Tensor) -> Any:
    # From here on it is an ordinary quantizer, and no cycle.
    del own.quantize_impl
    made, weight = own.quantize_impl(weight), weight.detach()
    # A tensor, not the parts of one, is kept by the module for the other microbatches of the step.
    if not isinstance(made, Tensor) and any(group.holds(weight) for group in unit.groups):
        tensors, _ = made.prepare_for_saving()
        # To save them takes them out of what was made.
        made.restore_from_saved(tensors)
        assert isinstance(unit.derived, DerivedWeights)
        unit.derived.add(_as_large(tensors, weight), partial(_made, _as_of_now(own), weight))
    return made


def _as_of_now(quantizer: Any) -> Any:
    """A copy whose scale stays as it is, and whose amaxes nobody reads."""
    copied = quantizer.copy()
    if "scale" in vars(copied):
        copied.scale, copied.amax = copied.scale.clone(), torch.empty_like(copied.amax)
    return copied


def _made(quantizer: Any, weight: Tensor) -> list[Tensor]:
    """The large tensors of the weight, quantized."""
    tensors, _ = quantizer.quantize_impl(weight).prepare_for_saving()
    return _as_large(tensors, weight)


def _as_large(tensors: Sequence[Tensor | None], weight: Tensor) -> list[Tensor]:
    """The tensors with as many elements as the weight: its values, but not their scales."""
    return [each for each in tensors if each is not None and each.numel() >= weight.numel()]


def adapt(module: nn.Module, unit: Unit) -> None:
    """Lets a module of Transformer Engine compute in a unit, which frees what it makes of weights, too."""
    if hasattr(module, "_get_weight_quantizers"):
        unit.derived = unit.derived or DerivedWeights()
        vars(module)["_get_weight_quantizers"] = partial(_quantizers_of_weights, module, unit)
    if hasattr(module, "set_activation_dtype"):
        vars(module)["set_activation_dtype"] = partial(_note_dtype, module)
