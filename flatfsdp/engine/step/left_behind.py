"""Finds tensors that a forward left on its modules, for a loss outside: `self.aux = weight.square().mean()`.

In:   the modules of one unit, and when its forward began.
Out:  the tensors that this forward has made and left there, as attributes, buffers, or in containers.
Next: `unit.py` treats them like outputs: a backward that begins with one of them gathers the unit first.
      Otherwise it would read freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.claimed import taken_from
from flatfsdp.flat.nested import tensors_in

MAX_ENTRIES = 1024
"""Length of the longest container that is searched: a log of all losses would take longer in each step."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_buffers"}

_DICT_OF = attrgetter("__dict__")


class LeftBehind:
    """The attributes of a unit's modules, in which each training forward looks for new tensors.

    Args:
        modules: all modules of the unit, without those of inner units.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._sizes: list[int] = []
        self._readers: list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], tuple[Any, ...]]]] = []

    def since(self, number: int) -> list[tuple[Tensor, int]]:
        """The tensors whose operation has this number or a later one, each with the number."""
        found = {id(tensor): tensor for value in self._values() for tensor in tensors_in(value)}
        made = [(t, t.grad_fn._sequence_nr()) for t in found.values() if t.grad_fn is not None]
        # Views of the parameters themselves are older than any forward, and have a number above all others.
        return [(tensor, its) for tensor, its in made if number <= its < _ABOVE_ALL]

    def _values(self) -> Iterator[Any]:
        """Values of attributes that may hold tensors, found out without a loop over all attributes."""
        if list(map(len, map(_DICT_OF, self._modules))) != self._sizes:
            self._list_attributes()
        values: list[Any] = []
        try:
            for attributes, read in self._readers:
                values += read(attributes)
        except KeyError:
            # One was deleted when another one came.
            self._sizes.clear()
            yield from self._values()
            return
        if any(map(_may_hold, set(map(type, values)))):
            for value in values:
                if _may_hold(type(value)) and (isinstance(value, Tensor) or len(value) <= MAX_ENTRIES):
                    yield value

    def _list_attributes(self) -> None:
        self._readers.clear()
        for module in self._modules:
            attributes = vars(module)
            taken = {*module._parameters, *taken_from(module), *_OF_EVERY_MODULE}
            names = [name for name in attributes if name not in taken and not name.startswith("_flatfsdp")]
            if not module._buffers:
                names.remove("_buffers")
            if names:
                # Twice, because a reader of one name returns no tuple.
                self._readers.append((attributes, itemgetter(names[0], *names)))
        self._sizes = list(map(len, map(_DICT_OF, self._modules)))


_ABOVE_ALL = 2**63


def _may_hold(kind: type) -> bool:
    return issubclass(kind, (Tensor, list, tuple, dict, set))
