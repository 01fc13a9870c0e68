"""Quick looks: how a replayed microbatch finds in microseconds that nothing has changed since the last one.

In:   every change that the engine makes to a group; lists of what users may change.
Out:  `Changes.count`, which tells whether what was collected from all groups still holds; `fetched`.
Next: `unreduced.py`, `engine/step/root.py` and `engine/replay/facts.py` look before each microbatch.

A model has hundreds of modules and parameters, and between two microbatches other work has pushed them out of
the processor's caches.  To look at one of them again is to wait for memory, so what the engine itself changes
is counted, and only what users can change without being noticed is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Counts changes to the groups of one model, all of which share it.

    Whoever changes one of the following raises `count`:

        state of the gathered buffers                 `FlatGroup`, `FlatBuffer`
        what is measured, scaled and cast, and when   `ComputeShard`, `MasterShard.generation`
        gradients that have landed, and their buffer  `MainGrad`
        groups that take part in the step             `FlatGroup`
        markers in `.grad`                            `UnreducedMarks`

    Writes to a master shard raise the version that PyTorch counts instead, and a new step `Microbatch.step`.

    Attributes:
        count: number of changes so far.
        from_autograd: number of gradients that autograd has brought to the optimizer's parameters itself.
    """

    __slots__ = ("count", "from_autograd")

    def __init__(self) -> None:
        self.count = self.from_autograd = 0


def fetched(objects: Sequence[T]) -> Sequence[T]:
    """The same list, once all objects in it are on their way to the processor's caches.

    To copy a list is to count one more reference to each object, in a loop so short that the processor waits
    for many of them at once.  A loop that calls a function for each waits for one after the other.
    """
    return objects[:]
