"""Which ranks share scales inside a pipeline stage: those that have the same stage.

In:   the ranks of a stage (`parallel/stage.py`), and the group that a region was given.
Out:  the group over which the region reduces amaxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch.distributed as dist

from flatfsdp.comm.ranks import default_group
from flatfsdp.fp8.region import Region, current_region


@dataclass(frozen=True)
class StageRanks:
    """The ranks of a pipeline stage.

    Attributes:
        others: ranks that have other stages.  A reduction with them would never end: they wait for what this
            rank computes after it.
        make_group: a group of the ranks that have this stage; None for this one alone.  Collective.
        postponed: regions of this step were given ranks of other stages.
    """

    others: frozenset[int]
    make_group: Callable[[], dist.ProcessGroup | None]
    postponed: list[ValueError] = field(default_factory=list)

    def check(self, region: Region) -> None:
        """Checks over which ranks a region reduces amaxes.

        Raises:
            ValueError: if the region reduces amaxes over other stages.
        """
        if region.reduces and self.others & set(dist.get_process_group_ranks(region.group)):
            raise ValueError(
                "an fp8.autocast in a pipeline shares scales with ranks that have other stages, and ranks "
                "would wait for each other; enter it in the forward of the stage's module, or pass "
                "amax_reduction_group: the ranks that have the same stages (ParallelMesh.stage_group)"
            )

    def confine(self, region: Region) -> None:
        """Lets a region that should reduce over other stages reduce over this one, until `raise_postponed`.

        It is in a forward: an error now would come on one rank, and the others wait for its result.
        """
        try:
            self.check(region)
        except ValueError as error:
            self.postponed.append(error)
            region.group = self.make_group()

    def raise_postponed(self) -> None:
        """Raises what `confine` postponed, where all ranks come without waiting for each other.

        Raises:
            ValueError: if a region was confined.
        """
        errors = self.postponed.copy()
        self.postponed.clear()
        if errors:
            raise errors[0]


_stage: ContextVar[StageRanks | None] = ContextVar("flatfsdp_stage_ranks", default=None)


@contextmanager
def inside_stage(ranks: StageRanks) -> Iterator[None]:
    """Regions inside share scales with the ranks that have this stage, unless they are given others.

    Raises:
        ValueError: at once, if a region around has ranks of other stages.  One inside is confined.
    """
    outer = current_region()
    if outer is not None:
        ranks.check(outer)
    token = _stage.set(ranks)
    try:
        yield
    finally:
        _stage.reset(token)


def current_stage() -> StageRanks | None:
    """The ranks of the pipeline stage whose forward runs in this thread."""
    return _stage.get()


def sharing_scales(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that share scales, if a region is given `group`."""
    if group is not None or default_group() is None:
        return group
    stage = current_stage()
    return default_group() if stage is None or not stage.others else stage.make_group()
