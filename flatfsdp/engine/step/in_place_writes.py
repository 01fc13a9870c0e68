"""Notices a forward that writes to its parameters in place, as `nn.Embedding(max_norm=...)` does.

In:   the groups of one unit, whose parameters are there.
Out:  an error after the forward, under the parameter's name.

What such a forward changes is the gathered copy.  It is gone when the unit is freed, or when the next step
casts and gathers anew.  Replicas, which are not gathered, would each keep their own change.  One rank by
itself raises, too, so that a program means the same on any number of ranks.

PyTorch counts in-place writes.  An operator that writes counts on every rank, whatever it finds to change, so
all ranks raise in the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.torch_private import never_traced


class WriteCheck:
    """Compares the versions of a unit's parameters before and after its forward.

    A write through `.data` is not counted.

    Args:
        groups: of the unit; more may be added before the first forward.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups
        self._before: list[list[int]] = []

    def begin(self) -> None:
        """The forward begins, and the parameters are there."""
        self._before = [group.params.versions for group in self._groups]

    @never_traced
    def end(self) -> None:
        """The forward has ended, or failed.

        Raises:
            RuntimeError: if it has written to a parameter.
        """
        for group, before in zip(self._groups, self._before, strict=True):
            after = group.params.versions
            if after != before:
                slots = zip(group.layout.slots, before, after, strict=True)
                names = [group.prefix + slot.name for slot, was, now in slots if was != now]
                raise RuntimeError(
                    f"the forward of unit {group.name} wrote in place to parameter {' or '.join(names)}, and "
                    "what a forward changes is lost with the gathered copy; compute with a changed copy "
                    "instead (no max_norm in an embedding), or write between steps, inside "
                    "summon_full_params()"
                )
