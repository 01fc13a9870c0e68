"""Notices in-place writes to gathered parameters, which are lost: `nn.Embedding(max_norm=...)`, `nn.init`.

In:   the groups of one unit.
Out:  an error that names the parameter: after a forward that wrote, or before the forward or backward that
      follows the write.

Such a forward changes the gathered copy, which is lost when the unit is freed or the next step casts and
gathers again.  Without a gather, replicas would each keep their own change.  A single rank raises, too, so
that a program means the same on any number of ranks.

PyTorch counts calls of in-place operators, whether or not they find anything to change, so all ranks raise in
the same forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.torch_private import never_traced


class WriteCheck:
    """Compares the versions of a unit's parameters before and after its forward, and until the next one.

    A write through `.data` is not counted: of one to a placeholder its memory tells, of others nothing.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = groups

    def require_none(self) -> None:
        """Checks for writes between two forwards, or between a forward and its backward.

        Raises:
            RuntimeError: if a parameter was written to since the last forward; once.
        """
        for group, names in self._written():
            raise RuntimeError(
                f"parameter {names} of unit {group.name} was written to as an attribute of its module, which "
                "is lost: a forward reads the attribute, which is NaN at other times; write inside "
                "summon_full_params(), or before sharding (on the meta device, shard initialises it)"
            )

    @never_traced
    def end(self) -> None:
        """Checks for writes inside a forward that has ended or failed.

        Raises:
            RuntimeError: if it has written to a parameter.
        """
        for group, names in self._written():
            raise RuntimeError(
                f"the forward of unit {group.name} wrote in place to parameter {names}, and what a forward "
                "changes is lost with the gathered copy; compute with a changed copy (no max_norm in an "
                "embedding), or write between steps, inside summon_full_params()"
            )

    def _written(self) -> Iterator[tuple[FlatGroup, str]]:
        """Yields groups that were written to, with the parameters' names; the next call starts afresh."""
        # All of them, before anything is raised, so that a write is reported once.
        for group, written in [(group, group.params.take_writes()) for group in self._groups]:
            if written:
                prefix, slots = group.unit.prefix, group.layout.slots
                names = [prefix + slots[index].name for index in written]
                # Views of one tensor count together, and of these a table with `max_norm` has written.
                sites = [site for sites in group.binding.sites for site in sites]
                renormed = (site for site in sites if getattr(site.module, "max_norm", None) is not None)
                tables = {prefix + site.name for site in renormed}
                yield group, " or ".join([name for name in names if name in tables] or names)
