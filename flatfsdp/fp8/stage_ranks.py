"""`StageRanks`: the ranks that share scales inside a pipeline stage, which are those with the same stage.

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
        others: ranks with other stages.  A reduction with them would deadlock: they wait for later results of
            this rank.
        make_group: returns a group of the ranks with this stage; None for this rank alone.  Collective.
        postponed: errors of regions in this step that were given ranks of other stages.
    """

    others: frozenset[int]
    make_group: Callable[[], dist.ProcessGroup | None]
    postponed: list[ValueError] = field(default_factory=list)

    def check(self, region: Region) -> None:
        """Checks the ranks over which a region reduces amaxes.

        Raises:
            ValueError: if they include ranks with other stages.
        """
        if region.reduces and self.others & set(dist.get_process_group_ranks(region.group)):
            raise ValueError(
                "an fp8.autocast in a pipeline shares scales with ranks that have other stages, and ranks "
                "would wait for each other; enter it in the forward of the stage's module, or pass "
                "amax_reduction_group: the ranks that have the same stages (ParallelMesh.stage_group)"
            )

    def confine(self, region: Region) -> None:
        """Makes a region that would reduce over other stages reduce over this one, until `raise_postponed`.

        It runs in a forward: an error there would occur on one rank while the others wait for its result.
        """
        try:
            self.check(region)
        except ValueError as error:
            self.postponed.append(error)
            # The forward goes on with scales of this stage, and its results reach the ranks that wait for
            # them.
            region.group = self.make_group()

    def raise_postponed(self) -> None:
        """Raises an error that `confine` postponed; call it where no rank waits for another.

        Raises:
            ValueError: if a region was confined.
        """
        errors = self.postponed.copy()
        # Before the raise, so that the next step begins without errors.
        self.postponed.clear()
        if errors:
            raise errors[0]


_stage: ContextVar[StageRanks | None] = ContextVar("flatfsdp_stage_ranks", default=None)


@contextmanager
def inside_stage(ranks: StageRanks) -> Iterator[None]:
    """Context in which regions share scales with the ranks of this stage, unless they are given others.

    Raises:
        ValueError: immediately, if a region around it has ranks of other stages.  Regions inside are
            confined.
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
    """The rank group that shares scales if a region is given `group`."""
    if group is not None or default_group() is None:
        return group
    stage = current_stage()
    return default_group() if stage is None or not stage.others else stage.make_group()
