"""`FlatFSDP`: the wrapper a user sees.

In:   a module, ranks, a policy.
Out:  a module whose `parameters()` are flat shards that any optimizer can update.
Next: its `forward` drives `engine/step/unit.py`; to follow one parameter, start at `claim.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.comm.grid import Grid
from flatfsdp.contract.placement import check_marks, check_placement
from flatfsdp.engine.claim import (
    bindings_of,
    device_of,
    mark_taken,
    own_modules,
    parameters_to_take,
    prepare_buffers,
    require_default_precision,
)
from flatfsdp.engine.full_params import state_dict_gathering, whole_parameters
from flatfsdp.engine.memory import MemoryReport, memory_report
from flatfsdp.engine.param_groups import attach_targets, gradients_of
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.step.unit import versions_of
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.units import UnitModule, named_groups, root_of, units_in
from flatfsdp.flat.binding import Binding
from flatfsdp.flat.layout import ParamSlot
from flatfsdp.flat.meta_device import ParamInit, is_on_meta, materialize
from flatfsdp.flat.nested import cast_floats, tensors_in
from flatfsdp.flat.sites import parameter_sites
from flatfsdp.optim.clip import clip_grad_norm
from flatfsdp.policy import Division, Gathering, GradSync, Policy, Precision, Prefetch
from flatfsdp.torch_private import in_backward, never_traced, traced_inside


class FlatFSDP(UnitModule):
    """Shards a module's parameters over ranks in one flat buffer, and gathers them where they are used.

    Takes every parameter below `module` that no inner FlatFSDP has taken, so wrap inner modules first
    (`flatfsdp.auto_wrap` does).  Each FlatFSDP is a unit: gathered, freed and reduced as a whole; one
    transformer layer is a good size.  The first one that is called becomes the root of those inside it.

    `parameters()` lists the flat FP32 shards; give them to any torch.optim optimizer after wrapping.  A
    parameter without a gradient in a reducing backward counts as one with a zero gradient.  Freeze and train
    units by `requires_grad_()`, at any time, on all ranks alike.

    Args:
        module: the same on all ranks.
        process_group: ranks to shard over; default: all, or this process alone without torch.distributed.
        mesh: instead of process_group: 1-D (shard), or 2-D (replicate, shard).
        device: where shards, buffers and compute live; default: where the module is.  Needed for a module on
            the meta device, whose parameters are made and initialised unit by unit.
        precision: dtypes of the stations of a parameter; default: FP32 everywhere.
        shard: False keeps parameters on every rank and all-reduces gradients (plain data parallel).
        reshard_after_forward: True frees unsharded parameters after each forward and backward (ZeRO-3);
            False keeps them until the last microbatch's backward (ZeRO-2).
        optimize_backward_concat: True lets each gradient land in the flat buffer that is reduced.  False
            is the baseline: autograd concatenates all gradients of a unit in every microbatch.  Both give
            the same bits.
        grad_sync: reduce-scatter gradients in the "last" microbatch's backward, or in "every" one's, which
            needs no full-size gradient buffer between microbatches and moves M times the bytes.  Across the
            replicas of a 2-D mesh they are reduced in the last one either way.
        prefetch: units to gather ahead.
        cpu_offload: master shards, their gradients and so the optimizer stay in host memory.
        tp_group: ranks over which the layers inside are split (tensor parallelism); pass the data-parallel
            ranks, which have the same parts, as mesh or process_group.  What no layer has declared to be
            split is taken to have the same value and the same gradient on all of tp_group.  `state_dict()`
            and `summon_full_params()` have this rank's parts; `checkpoint.full_state_dict` has the whole.
        param_init_fn: initialises the tensors that a module on the meta device owns directly; default: its
            `reset_parameters()`.  Seed all ranks alike.
        check_collectives: every gather and reduction carries which unit it is for and why; ranks that do
            different things raise, all of them, instead of computing with a mix of units.
        poison_on_free: debug mode: freed buffers read as NaN.  Costs the memory that freeing would save.

    Attributes:
        module: the wrapped module.  Attributes not found here are looked up there.
        microbatch: which microbatch this is; shared with the inner units of a root.
        ledger: bytes moved; shared likewise.

    Raises:
        ValueError: for parameters that cannot be sharded, naming them: not floating point, tied to one in
            another unit, on a device that the backend cannot reach, on the meta device and not initialised,
            split over other ranks than tp_group, float64 without `precision`.  If ranks of tp_group are
            data-parallel, too.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        precision: Precision | None = None,
        shard: bool = True,
        reshard_after_forward: bool = True,
        optimize_backward_concat: bool = False,
        grad_sync: GradSync = "last",
        prefetch: Prefetch | None = None,
        cpu_offload: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        param_init_fn: ParamInit | None = None,
        check_collectives: bool = True,
        poison_on_free: bool = False,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"FlatFSDP wraps an nn.Module, not {module!r}")
        policy = Policy(
            Precision() if precision is None else precision,
            reshard_after_forward,
            optimize_backward_concat,
            grad_sync,
            Prefetch() if prefetch is None else prefetch,
            cpu_offload,
            check_collectives,
            poison_on_free,
        )
        grid = Grid.of(process_group, mesh, shard, tp_group)
        parameters = parameters_to_take(module)
        if precision is None:
            require_default_precision(parameters)
        for name, parameter in parameters.items():
            check_placement(name, parameter, grid.tensor)
        for path, owner in own_modules(module):
            check_marks(path, owner)
        device = device_of(device, module, parameters, grid)
        taken = list(parameters.items())
        if any(is_on_meta(owner) for _, owner in own_modules(module)):
            materialize(own_modules(module), device, param_init_fn)
            parameters = parameters_to_take(module)
            taken += parameters.items()
        super().__init__(module, policy, grid, device)
        prepare_buffers(module, device, policy.precision.buffer)
        in_fp8 = policy.precision.fp8_weights is not None
        bindings = bindings_of(module, parameters.values(), grid.tensor, fp8=in_fp8)
        unit = self.fsdp_state.unit
        for binding in bindings:
            group = FlatGroup(binding, grid, device, policy, self.microbatch, self.ledger, unit.landed)
            unit.add(group)
            attach_targets(group)
            self._register_flat(group.flat_name, group.master.flat)
        mark_taken(bindings, taken)
        module.register_forward_pre_hook(self._check_gathered)

    # ---- training ---------------------------------------------------------------------------------------

    @traced_inside
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self._begin()
        if root is None:
            return self._forward(args, kwargs)
        try:
            args, kwargs = self._cast_inputs(args, kwargs)
            outputs = self._forward(args, kwargs)
        except BaseException:
            root.fail_forward()
            raise
        self._end(root, outputs)
        return outputs

    @never_traced
    def _begin(self) -> Root | None:
        """The root, if this is the outermost forward; None inside one, or in a recomputation."""
        root = root_of(self)
        if self.fsdp_state.is_whole:
            raise RuntimeError("a FlatFSDP module cannot compute inside summon_full_params; leave it first")
        if root.in_forward or in_backward():
            return None
        root.begin_forward()
        return root

    @never_traced
    def _end(self, root: Root, outputs: Any) -> None:
        tensors = list(tensors_in(outputs))
        # In an output that hides its tensors there may be one to start a backward from.
        can_start_backward = not tensors or any(t.requires_grad for t in tensors)
        root.end_forward(backward_follows=torch.is_grad_enabled() and can_start_backward)

    @never_traced
    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a root's forward computes with, in place of what it was given."""
        return cast_floats((args, kwargs), self.fsdp_state.policy.precision.compute)

    @traced_inside
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.fsdp_state.unit
        position, versions = unit.before_forward(), versions_of((args, kwargs))
        try:
            outputs = self.module(*args, **kwargs)
        finally:
            # Also if it failed: PyTorch may have refused a view, for a reason that only this explains.
            unit.writes.end()
        return unit.after_forward(position, (args, kwargs), versions, outputs)

    def _check_gathered(self, module: nn.Module, _inputs: Any) -> None:
        if self.fsdp_state.unit.is_sharded:
            raise RuntimeError(
                f"the forward of {type(module).__name__} was called past its FlatFSDP, so its parameters are "
                "not gathered; call the FlatFSDP module, not its .module or a method that calls it"
            )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards that run inside accumulate gradients and publish none.

        They reduce nothing; with `grad_sync="every"` they reduce-scatter, and the last one adds up.  Until
        then a flat parameter without a gradient has a marker in `.grad`.  Reading it raises, and an optimizer
        that zeroes it, or sets it to None, drops what was accumulated.
        """
        return root_of(self).microbatch.not_last()

    def set_is_last_backward(self, is_last: bool) -> None:
        """Says whether the next backwards are the last of their step and reduce; for pipeline schedules."""
        root_of(self).microbatch.is_last = is_last

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the reduced gradients of this module so that their norm is at most `max_norm`.

        Call it on the root, for the norm of the whole model.  Collective.
        `torch.nn.utils.clip_grad_norm_` would see this rank's shards only.  For the norm of several stages of
        a pipeline: `flatfsdp.parallel.clip_grad_norm_`.

        Returns:
            The norm over all ranks before scaling, 0-dim, in FP32 at least.

        Raises:
            RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
            ValueError: if max_norm is negative or norm_type not positive; if some units are spread over fewer
                ranks than others; if this is a stage of a pipeline.
        """
        if any(group.master.stages.size > 1 for _, group in named_groups(self)):
            raise ValueError(
                "this module is a stage of a pipeline, and its norm is not the model's; use "
                "flatfsdp.parallel.clip_grad_norm_(all stages of this rank, max_norm)"
            )
        return clip_grad_norm(
            gradients_of(self),
            self.fsdp_state.device,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what was accumulated and not reduced, and clears `main_grad` of flat parameters."""
        super().zero_grad(set_to_none)
        for _, wrapped in units_in(self):
            wrapped.fsdp_state.unit.drop_gradients()
            for group in wrapped.fsdp_state.unit.groups:
                group.master.zero_grad(set_to_none)

    def set_gradient_divide_factors(self, predivide: float, postdivide: float, recurse: bool = True) -> None:
        """Divides gradients by `predivide` before and by `postdivide` after their sum over ranks.

        In place of the mean.  predivide * postdivide = number of ranks gives the mean again, with a sum that
        stays inside the range of a narrow `Precision.reduce`.

        Args:
            recurse: for the units inside as well.

        Raises:
            ValueError: if a factor is not positive.
        """
        division = Division(predivide, postdivide)
        for _, wrapped in units_in(self) if recurse else [("", self)]:
            for group in wrapped.fsdp_state.unit.groups:
                group.division = division

    def memory_report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """Every buffer that this model has on this rank's device: bytes, owner, when it lives.

            print(model.memory_report(optimizer))

        Call it on the root; collective the first time.

        Args:
            optimizer: its state for this model is listed, too; it has some after the first step.
        """
        return memory_report(root_of(self).units, self.fsdp_state.policy.prefetch, optimizer)

    # ---- checkpoints: the parts of ModuleWrapper's state_dict -------------------------------------------

    @property
    def bindings(self) -> list[Binding]:
        state = self.fsdp_state
        return [] if state.is_whole else [group.binding for group in state.unit.groups]

    def _registered_parameters(self) -> AbstractContextManager[None]:
        root_of(self)
        return whole_units([self], state_dict_gathering(), writeback=False)

    def _load_slot(self, binding: Binding, slot: ParamSlot, value: Tensor) -> None:
        groups = self.fsdp_state.unit.groups
        next(group for group in groups if group.binding is binding).master.load(slot, value)

    # ---- ordinary parameters for a while ----------------------------------------------------------------

    @contextmanager
    def summon_full_params(
        self,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
    ) -> Iterator[None]:
        """Inside, the wrapped module has its ordinary parameters: whole, in master precision, by their names.

        `parameters()` and `named_parameters()` list them, under the names they had before wrapping, and no
        flat ones.  Collective, at both ends.  Gradients are not summoned.

        Args:
            recurse: also those of the units inside.
            writeback: at the end, changed values, in place or by another parameter object, go to the shards;
                a parameter changed differently on several ranks ends up in parts of each.
            rank0_only: only the first rank gets them, and it alone writes back.
            offload_to_cpu: in host memory; the device then holds no more than one unit at a time.

        Raises:
            RuntimeError: inside a forward or backward; at the end, if shards were changed inside the block by
                something else (an optimizer, a loader), which writing back would undo; on the other ranks, if
                the first one raises inside the block under rank0_only; in a block without writeback, for one
                with it.
            ValueError: at the end, if a parameter has been removed or given another shape; no parameter is
                written back then.
        """
        root = root_of(self)
        if root.in_forward or in_backward():
            raise RuntimeError(
                "full parameters cannot be summoned inside a forward or backward, which gathers and frees "
                "them; call summon_full_params before or after"
            )
        gathering = Gathering(rank0_only, offload_to_cpu)
        wrapped = list(dict.fromkeys(m for _, m in units_in(self))) if recurse else [self]
        states = [each.fsdp_state for each in wrapped]
        if writeback and any(state.is_whole and not state.writes_back for state in states):
            raise RuntimeError(
                "summon_full_params with writeback inside one without would lose what is written; pass "
                "writeback=False here or writeback=True outside"
            )
        with whole_units(wrapped, gathering, writeback=writeback):
            yield

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if not (self.fsdp_state.is_whole and recurse):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        seen: set[nn.Parameter] = set()
        for site, parameter in parameter_sites(self.module, f"{prefix}." if prefix else ""):
            if not remove_duplicate or parameter not in seen:
                seen.add(parameter)
                yield site.name, parameter

    def apply(self, fn: Callable[[nn.Module], None]) -> FlatFSDP:
        """Calls `fn` on every module, as nn.Module does, with ordinary parameters there.  Collective."""
        with self.summon_full_params(recurse=False):
            return super().apply(fn)

    # ---- what does not work on a sharded module ---------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlatFSDP:
        for group in (group for _, wrapped in units_in(self) for group in wrapped.fsdp_state.unit.groups):
            flat = group.master.flat
            probe = fn(flat.detach()[:1])
            if (probe.dtype, probe.device) != (flat.dtype, flat.device):
                raise TypeError(
                    f"a FlatFSDP module cannot be moved or converted ({flat.dtype} on {flat.device} to "
                    f"{probe.dtype} on {probe.device}); pass device= and precision= to the constructor "
                    "instead"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a FlatFSDP module cannot be copied: its ranks, hooks and buffers are tied to this process; "
            "copy the plain module before wrapping, or load a state_dict into a new one"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a FlatFSDP module cannot be pickled; save its state_dict() instead")


@contextmanager
def whole_units(units: Sequence[UnitModule], gathering: Gathering, *, writeback: bool) -> Iterator[None]:
    """Ordinary parameters in these units, but for those that have them already."""
    flats = {wrapped: dict(wrapped._parameters) for wrapped in units if not wrapped.fsdp_state.is_whole}
    groups = [group for wrapped in flats for group in wrapped.fsdp_state.unit.groups]
    with whole_parameters(groups, gathering, writeback=writeback):
        for wrapped, of_unit in flats.items():
            # The flat parameters stay attributes, but are not registered.
            wrapped._parameters.clear()
            wrapped.__dict__.update(of_unit)
            state = wrapped.fsdp_state
            state.is_whole, state.writes_back = True, writeback
        try:
            yield
        finally:
            for wrapped, of_unit in flats.items():
                state = wrapped.fsdp_state
                state.is_whole = state.writes_back = False
                for name, flat in of_unit.items():
                    del wrapped.__dict__[name]
                    wrapped._parameters[name] = flat
