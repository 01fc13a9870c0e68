"""Finds tensors that a forward left on its modules, for a loss outside: `self.aux = weight.square().mean()`.

In:   the modules of one unit, and when its forward began.
Out:  the tensors that this forward has made and left there, as attributes, buffers, or in containers.
Next: `driven_unit.py` treats them like outputs: a backward that begins with one gathers the unit first.
      Otherwise it would read freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.claimed import taken_from
from flatfsdp.flat.nested import tensors_in

MAX_ENTRIES = 1024
"""Length of the longest container that is searched: a log of all losses would take longer in each step."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}

_ABOVE_ALL = 2**63


class LeftBehind:
    """The attributes of a unit's modules, in which each training forward looks for new tensors.

    Args:
        modules: all modules of the unit, without those of inner units.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._attributes = [vars(module) for module in self._modules]
        self._sizes: list[int] = []
        # PyTorch's own modules leave nothing on themselves; what others set there are new attributes.
        torchs = "torch.nn.modules."
        self._own = [set(vars(m)) if type(m).__module__.startswith(torchs) else set() for m in self._modules]
        self._readers: list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], tuple[Any, ...]]]] = []
        # Values that can hold no tensor; kept, so that no other object gets the address of one.
        self._plain: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies as that of no modules: a copy of a layer, which leads here, is in no unit."""
        return LeftBehind, ((),)

    def since(self, number: int) -> list[tuple[Tensor, int]]:
        """The tensors whose operation has this number or a later one, each with the number."""
        values = self._values()
        # Most forwards set nothing, and what they find has held no tensor before.
        if len(values) == len(self._plain) and all(map(is_, values, self._plain)):
            return []
        holders = [value for value in values if isinstance(value, _HOLDERS)]
        self._plain = [] if any(map(_may_change, holders)) else values
        searched = [each for each in holders if isinstance(each, Tensor) or len(each) <= MAX_ENTRIES]
        found = {id(t): t for value in searched for t in tensors_in(value) if t.grad_fn is not None}
        made = [(t, t.grad_fn._sequence_nr()) for t in found.values() if t.grad_fn is not None]
        # Views of the parameters themselves are older than any forward, and have a number above all others.
        return [(tensor, its) for tensor, its in made if number <= its < _ABOVE_ALL]

    def _values(self) -> list[Any]:
        if list(map(len, self._attributes)) != self._sizes:
            self._list_attributes()
        try:
            return list(chain.from_iterable([read(attributes) for attributes, read in self._readers]))
        except KeyError:
            # One was deleted when another one came.
            self._sizes = []
            return self._values()

    def _list_attributes(self) -> None:
        self._readers.clear()
        for module, attributes, own in zip(self._modules, self._attributes, self._own, strict=True):
            taken = {*own, *module._parameters, *taken_from(module), *_OF_EVERY_MODULE}
            names = [name for name in attributes if name not in taken and not name.startswith("_flatfsdp")]
            if not module._buffers and "_buffers" in names:
                names.remove("_buffers")
            if names:
                # Twice, because a reader of one name returns no tuple.
                self._readers.append((attributes, itemgetter(names[0], *names)))
        self._sizes = list(map(len, self._attributes))


_CHANGING = (Tensor, list, dict, set)
_HOLDERS = (*_CHANGING, tuple)


def _may_change(holder: Any) -> bool:
    """Whether a value may hold other tensors at the next look; a tuple does if something in it does."""
    return isinstance(holder, _CHANGING) or (isinstance(holder, tuple) and any(map(_may_change, holder)))
