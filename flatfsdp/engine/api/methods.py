"""Methods of a sharded module.

In:   a module that is a unit, with its `fsdp_state`.
Next: `classes.py` puts them in front of the module's own class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from flatfsdp.comm.checking.identity import Action
from flatfsdp.contract.claimed import PART_OF
from flatfsdp.contract.flat_shard import Gradients
from flatfsdp.contract.foreign_words import METHODS, answer_methods
from flatfsdp.contract.transparent import unwrapped
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.optimizer_targets import ShardTarget
from flatfsdp.engine.whole.full_params import whole_units
from flatfsdp.engine.whole.memory import MemoryReport, memory_report
from flatfsdp.engine.whole.units import Model, UnitModule, distinct_units, named_groups, root_of
from flatfsdp.optim.clip import clip_grad_norm
from flatfsdp.options import Division, Gathering
from flatfsdp.torch_private import in_backward

M = TypeVar("M", bound="UnitMethods")


class Unsharding:
    """Handle on a unit's parameters that are being gathered."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Waits until `module.weight` is whole, unless it has been used and freed already.

        On a GPU it is whole for what is launched afterwards.
        """
        # Not again once it is freed: a gather is collective, and other ranks need not call this.
        if not self._unit.is_sharded:
            self._unit.show(Action.FORWARD)


class UnitMethods(UnitModule):
    """The methods of a sharded module."""

    # ---- training ---------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backwards accumulate gradients and publish none.

        They reduce nothing; with `grad_sync="every"` they reduce-scatter, and the last backward adds up.
        Until then the `.grad` of a shard without a gradient is a marker.  Reading it raises.  An optimizer
        that zeroes it, or sets it to None, drops what was accumulated.
        """
        return root_of(self).microbatch.not_last()

    def microbatch_numbers(self, total: int) -> list[int]:
        """Numbers of the microbatches that this rank runs in a step, in its order.

        With `lanes`, microbatches are numbered over all ranks.  A rank that takes its data by these numbers
        trains to the same bits on any number of ranks that divides the lanes.

        Args:
            total: number of microbatches of a step over all ranks.

        Raises:
            ValueError: without `lanes`, or if `total` is no positive multiple of their number.
        """
        unit = self.fsdp_state
        if unit.policy.lanes is None:
            raise ValueError("microbatch_numbers() is for models with lanes; pass lanes=... to shard")
        return unit.policy.lanes.microbatches(unit.grid, total)

    def set_is_last_backward(self, is_last: bool) -> None:
        """Sets whether the next backwards are the last of their step and reduce; for pipeline schedules."""
        microbatch = root_of(self).microbatch
        if microbatch.has_lanes and microbatch.place is not None:
            raise RuntimeError("with lanes microbatches() says which backward is the last; leave this out")
        microbatch.is_last = is_last

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether the next backwards reduce gradients; FSDP2's name for `set_is_last_backward`.

        Args:
            requires_gradient_sync: whether the next backwards reduce gradients.
            recurse: must be True if there are units inside: all units of a model step together.

        Raises:
            ValueError: for recurse=False, if there are units inside.
        """
        if not recurse and len(distinct_units(self)) > 1:
            raise ValueError("all units of a model reduce in the same backwards: leave recurse=False out")
        self.set_is_last_backward(requires_gradient_sync)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the reduced gradients of this module so that their norm is at most `max_norm`.

        Call it on the root: the norm is that of the whole model.  Collective.  For several stages of a
        pipeline use `flatfsdp.parallel.clip_grad_norm_`.  With lanes the norm has the same bits on any number
        of ranks.

        Args:
            max_norm: largest norm afterwards, not negative.
            norm_type: order of the norm, positive; `math.inf` for the largest magnitude.
            error_if_nonfinite: raise if the norm is not finite, instead of scaling by it.

        Returns:
            The norm over all ranks before scaling, 0-dim, in FP32 at least.

        Raises:
            RuntimeError: if all gradients are accumulated and not yet reduced; on all ranks, if the norm is
                not finite under `error_if_nonfinite`.
            ValueError: if max_norm is negative or norm_type not positive; if some units are spread over fewer
                ranks than others; if this is a stage of a pipeline.
        """
        if any(group.master.stages.size > 1 for _, group in named_groups(self)):
            raise ValueError(
                "this is a stage of a pipeline; use flatfsdp.parallel.clip_grad_norm_(all stages, max_norm)"
            )
        # A write to what modules show is lost: said here, before the step goes on without it.
        root_of(self).require_no_writes()
        grads, device = gradients_of(self), self.fsdp_state.shared.device
        return clip_grad_norm(grads, device, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients, also `main_grad` of shards and what was accumulated and not yet reduced."""
        super().zero_grad(set_to_none)
        for unit in distinct_units(self):
            unit.fsdp_state.drop_gradients()
            for group in unit.fsdp_state.groups:
                group.master.zero_grad(set_to_none)

    def set_gradient_divide_factors(self, predivide: float, postdivide: float, recurse: bool = True) -> None:
        """Divides gradients by `predivide` before and by `postdivide` after their sum over ranks.

        This replaces the mean.  predivide * postdivide = number of ranks gives the mean again, through sums
        that stay inside the range of a narrow `Precision.reduce`.

        Args:
            predivide: divisor before the sum, positive.
            postdivide: divisor after the sum, positive.
            recurse: also for the units inside.

        Raises:
            ValueError: if a factor is not positive, or the model has lanes, which average nothing.
        """
        if self.fsdp_state.policy.lanes is not None:
            raise ValueError("with lanes gradients are added as they are; divide the loss instead")
        division = Division(predivide, postdivide)
        for unit in distinct_units(self) if recurse else [self]:
            for group in unit.fsdp_state.groups:
                group.division = division

    def memory_report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """Lists every buffer of this model on this rank's device: bytes, owner and lifetime.

            print(model.memory_report(optimizer))

        Call it on the root; collective the first time.

        Args:
            optimizer: list its state for this model, too, which exists after the first step.
        """
        return memory_report(root_of(self), optimizer)

    # ---- whole parameters for a while -------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> Unsharding | None:
        """Gathers this unit's own parameters until its next use or `reshard()`.  Collective.

        `module.weight` is whole until then, in compute precision; writes to it are lost.  Units inside stay
        sharded.

        Args:
            async_op: start the gather and return without waiting.

        Returns:
            With async_op, a handle whose `wait()` waits, as the unit's next forward does; otherwise None.
        """
        root_of(self)
        if async_op:
            self.fsdp_state.unshard(Action.FORWARD)
            return Unsharding(self.fsdp_state)
        self.fsdp_state.show(Action.FORWARD)
        return None

    def reshard(self) -> None:
        """Frees this unit's own parameters, if they are gathered."""
        root_of(self)
        self.fsdp_state.reshard()

    def unsharded(self) -> AbstractContextManager[None]:
        """Context in which all parameters of the model stay gathered, and forwards are not collective.

        Each rank may then generate text of its own length, or the first one alone.  Collective at the
        beginning.  After an optimizer step inside, the next forward gathers again.

        Raises:
            RuntimeError: inside a forward or backward.
        """
        return root_of(self).kept()

    # ---- ordinary parameters for a while ----------------------------------------------------------------

    @contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[None]:
        """Context in which the module has its ordinary parameters: whole, in master precision.

        `parameters()` and `named_parameters()` list them under the names they had before the model was
        sharded, in place of local shards.  Collective, at both ends.  Gradients are not summoned.

        Args:
            recurse: also summon the parameters of the units inside.
            writeback: at the end, write values that were changed, in place or by another parameter object, to
                the shards.  If ranks changed a parameter differently, each rank's shard keeps its own values.
            rank0_only: only the first rank gets them, and it alone writes back.  The others list their local
                shards inside the block, as outside of it.
            offload_to_cpu: put them in CPU memory; the device then holds at most one unit at a time.

        Raises:
            RuntimeError: inside a forward or backward; at the end, if something else (an optimizer, a loader)
                has changed shards, which writing back would undo; on the other ranks, if the first one raises
                under rank0_only; with writeback inside a block without writeback.
            ValueError: at the end, if a parameter has been removed or given another shape; no parameter is
                written back then.
        """
        root = root_of(self)
        if root.in_forward or in_backward():
            raise RuntimeError("summon_full_params() inside a forward or backward; call it before or after")
        units = distinct_units(self) if recurse else [self]
        if writeback and any(u.fsdp_state.is_whole and not u.fsdp_state.writes_back for u in units):
            raise RuntimeError(
                "inside summon_full_params(writeback=False) writes are lost; pass the same writeback to both"
            )
        with whole_units(units, Gathering(rank0_only, offload_to_cpu), writeback=writeback):
            yield

    def apply(self: M, fn: Callable[[nn.Module], None]) -> M:
        """Calls `fn` on every module, as nn.Module does, with ordinary parameters there.  Collective."""
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    # ---- what does not work on a sharded module ---------------------------------------------------------

    def to_empty(self: M, *, device: torch.device | str | int | None, recurse: bool = True) -> NoReturn:
        """Raises TypeError: what was on the meta device has memory and values."""
        raise TypeError(
            "a sharded module has memory and values: shard(..., device=...) has initialised what was on the "
            "meta device. Delete to_empty(), and after it init_weights() or the loop over reset_parameters()"
        )


answer_methods(UnitMethods, METHODS)


def gradients_of(model: Model) -> Gradients:
    """All flat shards of `model` that are trained, each with the reduced gradients that it has now.

    Raises:
        RuntimeError: if there are none, and accumulated ones wait to be reduced.
    """
    groups = [group for _, group in named_groups(model) if group.main_grad is not None]
    unreduced = next((group.name for group in groups if group.master.marks.is_on), None)
    if unreduced is not None and not any(group.master.grads for group in groups):
        raise RuntimeError(
            f"gradients of unit {unreduced} are accumulated and not yet reduced, and a norm would be without "
            "them; take it after the last backward of the step, outside of no_sync()"
        )
    return [(ShardTarget(group, 0, group.master.flat.numel()), group.master.grads_at) for group in groups]


def unit_of(module: nn.Module) -> UnitMethods:
    """Returns the unit of a module: itself if it is one, the one it wraps, or the one it is a part of.

    Raises:
        TypeError: for any other module.
    """
    module = unwrapped(module)
    if isinstance(module, UnitMethods):
        return module
    reference = PART_OF.of(module)
    unit = None if reference is None else reference()
    if not isinstance(unit, UnitMethods):
        raise TypeError(f"this {type(module).__name__} is neither sharded nor a part of a module that is")
    return unit
