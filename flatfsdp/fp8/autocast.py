"""Where FP8 is on, with which recipe, and when scales move on.

In:   `with autocast(recipe=...)` around a forward.
Out:  `current_region()`, which layers ask in their forward; scales are updated at the exit of the outermost
      region (forward tensors) and at the end of each backward (gradients).
Next: `roles.py` makes quantizers from a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch.distributed as dist

from flatfsdp.autograd import call_at_end_of_backward, running_backward
from flatfsdp.comm import default_group
from flatfsdp.fp8 import state
from flatfsdp.fp8.recipe import DelayedScaling, Recipe
from flatfsdp.fp8.state import Scaling


class Region:
    """One `autocast`, and what ran in it.

    Attributes:
        recipe: how to scale.
        enabled: whether products are in FP8.
        calibrating: whether amaxes are recorded although products are not in FP8.
        group: ranks that share scales; None for this one alone.
    """

    def __init__(
        self, recipe: Recipe, enabled: bool, calibrating: bool, group: dist.ProcessGroup | None
    ) -> None:
        self.recipe = recipe
        self.enabled = enabled
        self.calibrating = calibrating
        self.group = group
        self._used: dict[Scaling, None] = {}
        self._used_backward: dict[Scaling, None] = {}
        self._backward = -1

    @property
    def reduces(self) -> bool:
        """Whether ranks communicate when scales are updated."""
        is_delayed = isinstance(self.recipe, DelayedScaling) and self.recipe.reduce_amax
        return is_delayed and self.group is not None and (self.enabled or self.calibrating)

    def use(self, scaling: Scaling) -> None:
        """A forward records amaxes in it."""
        self._used[scaling] = None

    def use_in_backward(self, scaling: Scaling) -> None:
        """The running backward records amaxes in it."""
        self._used_backward[scaling] = None
        if self._backward != running_backward():
            self._backward = running_backward()
            call_at_end_of_backward(self._end_backward)

    def end_forward(self) -> None:
        used, self._used = self._used, {}
        state.update(used, self.group)

    def forget(self) -> None:
        """The forward failed: what it recorded may be NaN, and would stay for as long as a history is."""
        for scaling in self._used:
            scaling.forget()
        self._used.clear()

    def _end_backward(self) -> None:
        used, self._used_backward = self._used_backward, {}
        state.update(used, self.group)


_current: ContextVar[Region | None] = ContextVar("flatfsdp_autocast", default=None)


def current_region() -> Region | None:
    """The innermost autocast of this thread."""
    return _current.get()


@dataclass(frozen=True)
class StageRanks:
    """A pipeline stage's.

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
        """
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
        """Where all ranks come without waiting for each other.

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
    outer = _current.get()
    if outer is not None:
        ranks.check(outer)
    token = _stage.set(ranks)
    try:
        yield
    finally:
        _stage.reset(token)


def _shared_by(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that share scales, if a region is given `group`."""
    if group is not None or default_group() is None:
        return group
    stage = _stage.get()
    return default_group() if stage is None or not stage.others else stage.make_group()


@contextmanager
def entered(region: Region | None) -> Iterator[None]:
    """Makes `region` the current one, without an update at its end."""
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Runs the layers of `flatfsdp.layers` inside with FP8 products; backward may be outside.

        with autocast(recipe=DelayedScaling(amax_history_len=16)):
            loss = model(tokens)
        loss.backward()

    With `DelayedScaling`, the forward's scales are updated when the outermost region ends, the gradients'
    when a backward ends: one all-reduce of one small vector each.  All ranks of the group have to run the
    same layers, and as many regions and backwards.  Without gradients (evaluation) nothing is recorded.  A
    forward that ends in an exception updates nothing.  Capturing a step in a CUDA graph, whose replays would
    not see new scales, raises a RuntimeError.

    Args:
        enabled: False switches FP8 off inside.
        calibrating: with enabled=False: record amaxes, for a later FP8 run, while computing without FP8.
        recipe: DelayedScaling() if not given.
        amax_reduction_group: ranks that hold parts of the same tensors, such as all data-parallel ranks;
            default: all ranks, where torch.distributed is initialised; in the forward of a pipeline stage
            (`FlatStage`) those that have this stage.

    Raises:
        TypeError: if `recipe` is no recipe, or stands where `enabled` or `calibrating` does.
        ValueError: in a pipeline stage, if amax_reduction_group has ranks of other stages: around a step at
            once, in a forward after the step, on every rank.
    """
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False (a recipe is passed as recipe=)")
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {recipe!r}; pass a DelayedScaling, a CurrentScaling or a BlockScaling of flatfsdp.fp8"
        )
    outer = _current.get()
    region = Region(recipe, enabled, calibrating and not enabled, _shared_by(amax_reduction_group))
    stage = _stage.get()
    if stage is not None:
        stage.confine(region)
    if outer is not None:
        # One update, at the end of the outermost region.
        region._used = outer._used
    try:
        with entered(region):
            yield
    except BaseException:
        if outer is None:
            region.forget()
        raise
    if outer is None:
        region.end_forward()


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """`autocast` with Transformer Engine's earlier argument names."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group):
        yield
