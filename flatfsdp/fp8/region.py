"""`Region`: one `autocast`, with the scaling state used by forwards and backwards inside it.

In:   layers, which call `current_region()` in their forward.
Out:  scales are updated when the outermost region ends, and at the end of each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch.distributed as dist

from flatfsdp.comm.ranks import default_group
from flatfsdp.contract.recipe import DelayedScaling, Recipe
from flatfsdp.fp8.delayed_scaling import Scaling, update
from flatfsdp.torch_private import call_at_end_of_backward, running_backward


class Region:
    """One `autocast`, and the scales used in it.

    Attributes:
        recipe: how to scale.
        enabled: whether GEMMs are in FP8.
        calibrating: whether amaxes are recorded although GEMMs are not in FP8.
        group: rank group that shares scales; None for this rank alone.
        has_layers: of the outermost region: whether a layer that can compute in FP8 has run in it.
    """

    def __init__(
        self,
        recipe: Recipe,
        enabled: bool,
        calibrating: bool,
        group: dist.ProcessGroup | None,
        outer: Region | None,
    ) -> None:
        self.recipe = recipe
        self.enabled = enabled
        self.calibrating = calibrating
        self.group = group
        self._outer = outer
        self.has_layers = False
        # There is one update, at the end of the outermost region.
        self._used: dict[Scaling, None] = {} if outer is None else outer._used
        self._used_backward: dict[Scaling, None] = {}
        self._backward = -1

    @property
    def outermost(self) -> Region:
        """The region around all others; may be this one."""
        # Not kept: a region that holds itself would keep the process group, and gloo's threads.
        return self if self._outer is None else self._outer.outermost

    @property
    def reduces(self) -> bool:
        """Whether ranks communicate when scales are updated."""
        is_delayed = isinstance(self.recipe, DelayedScaling) and self.recipe.reduce_amax
        return is_delayed and self.group is not None and (self.enabled or self.calibrating)

    @contextmanager
    def noted(self) -> Iterator[list[Scaling]]:
        """Context whose list contains, at exit, the scales for which forwards inside recorded amaxes."""
        found: list[Scaling] = []
        # The region may have recorded amaxes before, which are not of the code inside; at its end it updates
        # all.
        before, self._used = self._used, {}
        try:
            yield found
        finally:
            found += self._used
            self._used = {**before, **self._used}

    def use(self, scaling: Scaling) -> None:
        """Notes that a forward records amaxes in `scaling`."""
        if scaling.held_by is None:
            self._used[scaling] = None
        else:
            scaling.held_by.hold(scaling, self.group)

    def use_in_backward(self, scaling: Scaling) -> None:
        """Notes that the running backward records amaxes in `scaling`."""
        if scaling.held_by is not None:
            scaling.held_by.hold(scaling, self.group)
            return
        self._used_backward[scaling] = None
        # One callback a backward.  Its number is kept, rather than a flag: if a backward raises, the callback
        # is dropped, and a flag would stay.
        if self._backward != running_backward():
            self._backward = running_backward()
            call_at_end_of_backward(self._end_backward)

    def end_forward(self) -> None:
        """Updates the scales that forwards have used."""
        used, self._used = self._used, {}
        update(used, self.group)

    def forget(self) -> None:
        """Discards the amaxes of a failed forward: they may be NaN, and would stay as long as the history."""
        for scaling in self._used:
            scaling.forget()
        self._used.clear()

    def _end_backward(self) -> None:
        # Taken out first: if ranks differ, the update raises, and the next backward must not repeat it.
        used, self._used_backward = self._used_backward, {}
        update(used, self.group)


_current: ContextVar[Region | None] = ContextVar("flatfsdp_autocast", default=None)


def current_region() -> Region | None:
    """The innermost autocast of this thread."""
    return _current.get()


@contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Makes `region` the current one, without an update at its end."""
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)


# ---- pipelines: scales are shared by the ranks with the same stage ----------------------------------------


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
