"""`FlatStage`: a sharded pipeline stage, for the schedules of torch.distributed.pipelining.

In:   a part of a model inside FlatFSDP, and its place in the pipeline.
Out:  a `PipelineStage` for ScheduleGPipe, Schedule1F1B and ScheduleInterleaved1F1B.
Next: `microbatch.py` knows which backward is the last; `engine/step/driven_unit.py` reduces in it.

    the schedule                    when            what happens here
    sets stage_index_to_group_rank  it is made      refuses split backwards
    clear_runtime_states            a step begins   refuses them, too; drops what a failed step left
    forward_one_chunk               M times         marks the first microbatch
    backward_one_chunk              M times         marks the last backward; each unit is reduced inside it,
                                                    or inside every one with grad_sync="every"
    perform_reduce_grad             a step ends     scales the reduced gradients, once

The differences between torch 2.11 and 2.13 are in the inference of shapes: 2.11 runs the module without
gradients; 2.13 runs forward and backward and calls two of the methods at the end of `FlatStage`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _ComputationType,
)
from torch.utils._pytree import tree_map_only

from flatfsdp.comm.agreement import check_same_on_all_ranks
from flatfsdp.comm.checking.identity import Action, Identity, ModelIdentity
from flatfsdp.comm.checking.journal import explained, launch_on_host
from flatfsdp.comm.objects import all_gather_object
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.attribute import Attribute
from flatfsdp.contract.flat_shard import FLAT_SHARD
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.unreduced import reduced_grad
from flatfsdp.engine.whole.units import UnitModule, distinct_units, root_of, units_in
from flatfsdp.fp8.region import StageRanks, inside_stage

SPLIT = {_ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT}

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
Tensors = Tensor | tuple[Tensor, ...]
_Earlier = tuple[nn.Parameter, Attribute[Tensor | None], Tensor]
"""A parameter, where it has its gradient, and that gradient from before a step."""


class FlatStage(PipelineStage):
    """One stage of a pipeline, sharded by FlatFSDP.

        part = auto_wrap(part, by_class(Block), mesh=mesh["dp"], optimize_backward_concat=True)
        stage = FlatStage(part, mesh.get_local_rank("pp"), mesh["pp"].size(), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
        schedule.step(tokens)
        optimizer.step()

    Gradients are reduced inside the last microbatch's backward of the stage, or inside every one with
    `grad_sync="every"`.  Between microbatches, FlatFSDP's `reshard_after_forward` decides whether parameters
    are resharded.  With the schedule's `scale_grads=True`, a step's gradients are divided by its number of
    microbatches after their reduction.  Gradients from before the step are added to, and not divided again.

    Evaluate with `schedule.eval`, before the first step or between steps, inside torch.no_grad(): that saves
    the activations, and leaves delayed FP8 scales unchanged.

    After an exception inside a step and `optimizer.zero_grad()`, the next step is clean on this rank.  Other
    ranks may still wait for data that this rank did not send; then all of them must exit and start again.

    Args:
        submodule: a FlatFSDP module, or a module whose trained parameters are all inside FlatFSDP modules.
            Wrap each stage separately, over the ranks that have the same stage.
        stage_index: index of this stage, from 0.
        num_stages: number of stages on all ranks together.
        device: device on which activations are received; default: that of `submodule`.
        input_args: tensors with the shapes and dtypes of one microbatch's inputs, on any device.  With them
            and `output_args`, the schedule need not run the module once to find out.
        output_args: tensors with the shapes and dtypes of the module's outputs.
        group: ranks of the pipeline; default: all.
        cache_fp8_weights: pass `is_first_microbatch` to `submodule`, so that its layers cast FP8 weights once
            a step and keep them.

    Attributes:
        ends: description of the stage's inputs and outputs, if they were given.

    Raises:
        ValueError: if there is no FlatFSDP in `submodule`, or one that is part of a larger one; for a trained
            parameter outside of FlatFSDP, whose gradient nothing would reduce; for only one of `input_args`
            and `output_args`; for a stage that belongs on another rank of `group`; if ranks of the same stage
            have built different modules.
        RuntimeError: in a step, on all ranks of `group`, if they have different schedules, numbers of
            microbatches or shapes between stages, or a rank skips a step.
        NotImplementedError: for a model with lanes; in the constructor of a zero-bubble schedule, on every
            rank; in the first `step` of one that was changed to split backwards.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | None = None,
        input_args: Tensors | None = None,
        output_args: Tensors | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        cache_fp8_weights: bool = False,
    ) -> None:
        if (input_args is None) != (output_args is None):
            raise ValueError(f"stage {stage_index} got one of input_args and output_args; pass both, or none")
        outermost = _outermost(submodule, stage_index)
        device = outermost[0].fsdp_state.shared.device if device is None else device
        if stage_index > 0:
            input_args = _exchanged(input_args)
        if stage_index < num_stages - 1:
            output_args = _exchanged(output_args)
        self.ends = _described(input_args), _described(output_args)
        super().__init__(submodule, stage_index, num_stages, device, input_args, output_args, group=group)
        self._check_place()
        self._roots = [_root_of_stage(wrapped, stage_index) for wrapped in outermost]
        if any(root.unit.policy.lanes is not None for root in self._roots):
            raise NotImplementedError(
                f"stage {stage_index} has lanes, and pipelines have orders of their own for microbatches; "
                "leave out lanes, or train without a pipeline"
            )
        self._groups = [each for root in self._roots for unit in root.units for each in unit.groups]
        self._pipeline = Ranks.of(dist.group.WORLD if self.group is None else self.group)
        for flat_group in self._groups:
            flat_group.master.stages = self._pipeline
        self._identity = ModelIdentity(timeout=outermost[0].fsdp_state.policy.timeout)
        self._steps = 0
        others = frozenset(dist.get_process_group_ranks(self.group)) - {dist.get_rank()}
        # Made when an FP8 region of the stage needs it.
        make_group = cache(
            partial(outermost[0].fsdp_state.grid.make_group, outermost[0].fsdp_state.shared.device)
        )
        self._stage_ranks = StageRanks(others, make_group)
        self._cache_fp8_weights = cache_fp8_weights
        self._is_under_way = False
        self._earlier: list[_Earlier] | None = None
        self._known_schedule: weakref.ref[Schedule] | None = None

    def _check_place(self) -> None:
        """Checks the stage's place in the pipeline.

        Raises:
            ValueError: if the stage belongs on another rank, whether stages go round and round over the ranks
                or there and back.
        """
        row, rank = divmod(self.stage_index, self.group_size)
        there_and_back = self.group_size - 1 - rank if row % 2 else rank
        if self.stage_index < 0 or self.group_rank not in (rank, there_and_back):
            raise ValueError(
                f"stage {self.stage_index} of {self.num_stages} cannot be on rank {self.group_rank} of the "
                f"pipeline's {self.group_size}; rank r has the stages r, r + {self.group_size}, ..."
            )

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The pipeline rank that has each stage."""
        return self._rank_of_stage

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, rank_of_stage: dict[int, int]) -> None:
        """Refuses split backwards; a schedule with several stages a rank sets this in its constructor.

        Raises:
            NotImplementedError: if the schedule splits backwards.
        """
        schedule = _calling_schedule()
        if schedule is not None:
            _refuse_splits(schedule)
        self._rank_of_stage = rank_of_stage

    # ---- one step ---------------------------------------------------------------------------------------

    def clear_runtime_states(self) -> None:
        """Begins a schedule's step, before anything is sent.

        Raises:
            NotImplementedError: if the schedule splits backwards.
            ValueError: if the step runs in an `fp8.autocast` over several stages, or forwards of the step
                before had such regions.
            All ranks raise alike, as they see the same schedule and region.
        """
        self._stage_ranks.raise_postponed()
        with inside_stage(self._stage_ranks):
            pass
        schedule = _calling_schedule()
        if schedule is not None:
            self._meet(schedule)
            # A rank may have several stages, which begin the step together: the first one compares for all.
            if self.stage_index < self.group_size:
                # So that no rank skips a step, or begins one more.
                with launch_on_host(self._pipeline, self._step, self.device):
                    self._steps += 1
        if self._is_under_way:
            for root in self._roots:
                root.abandon_step()
            self.bwd_cache.clear()
        self._is_under_way, self._earlier = False, None
        super().clear_runtime_states()

    def _meet(self, schedule: Schedule) -> None:
        """Checks a new schedule, and clears the remains of its failed step."""
        if self._known_schedule is None or self._known_schedule() is not schedule:
            _refuse_splits(schedule)
            if self.stage_index < self.group_size:
                self._compare(schedule)
            self._known_schedule = weakref.ref(schedule)
        # Losses of a failed step would be taken for those of the next one.
        for name in ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops"):
            getattr(schedule, name, []).clear()

    def _compare(self, schedule: Schedule) -> None:
        """Compares schedules, and what neighbouring stages exchange.  Collective over the pipeline's ranks.

        Raises:
            RuntimeError: on all of them, if ranks have different schedules or pipelines.
        """
        lines = [
            f"a {type(schedule).__name__}",
            f"{schedule._n_microbatches} microbatches in it",
            f"{self.num_stages} stages in it",
        ]
        check_same_on_all_ranks(lines, [self._pipeline], self.device, self._identity.timeout)
        stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
        own = {stage.stage_index: stage.ends for stage in stages if isinstance(stage, FlatStage)}
        ends: dict[int, tuple[str, str]] = {}
        for theirs in all_gather_object(own, self._pipeline, self.device):
            ends |= theirs
        for index, (_, gives) in sorted(ends.items()):
            takes = ends.get(index + 1, ("", ""))[0]
            if gives and takes and gives != takes:
                raise RuntimeError(
                    f"stage {index} gives {gives}, and stage {index + 1} takes {takes}; build both alike"
                )

    @property
    def _step(self) -> Identity:
        return Identity.counting(Action.SCHEDULE, self._steps, self._identity)

    def explained_step(self) -> AbstractContextManager[None]:
        """Context for a step; with gloo, a failure caused by another rank names that rank."""
        return explained(self._pipeline, self._step, self.device)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of one microbatch."""
        self._is_under_way = self.has_backward
        with self._microbatch(is_first=fwd_chunk_id == 0, is_last=True), inside_stage(self._stage_ranks):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if self._cache_fp8_weights:
            kwargs["is_first_microbatch"] = self._roots[0].microbatch.is_first
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Runs the backward of one microbatch; the last one completes the reduction of gradients.

        Raises:
            NotImplementedError: for a backward with respect to the inputs alone.
        """
        if not self.has_backward:
            return
        if not full_backward:
            raise NotImplementedError(_split_message("this schedule"))
        if last_backward:
            self._earlier = _set_aside(self._groups)
        try:
            with self._microbatch(is_first=bwd_chunk_id == 0, is_last=last_backward):
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        except BaseException:
            self._add_earlier()
            raise
        if last_backward:
            self._is_under_way = False

    @contextmanager
    def _microbatch(self, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """Context of one microbatch of a step; outside, each backward is a step of its own."""
        states = [root.microbatch for root in self._roots]
        for state in states:
            state.is_first, state.is_last = is_first, is_last
        try:
            yield
        finally:
            for state in states:
                state.is_first = state.is_last = True

    # ---- the scale of the gradients ---------------------------------------------------------------------

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Scales the gradients, already reduced, after the schedule has run all backwards of the stage.

        Raises:
            ValueError: if forwards had an `fp8.autocast` over several stages.
        """
        self.scale_grads(grad_scale_factor)
        schedule = self._known_schedule and self._known_schedule()
        if isinstance(schedule, PipelineScheduleSingle):
            # The step is complete: everything is sent.
            self._stage_ranks.raise_postponed()

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divides the reduced gradients of the step that has ended, unless that has been done.

        These are this rank's shards, in the master's gradient, as `main_grad` has been handed over by now.
        """
        if self._earlier is None:
            return
        if grad_scale_factor != 1:
            for grad in (grad for each in self._groups for grad in each.master.grads):
                grad.div_(grad_scale_factor)
        self._add_earlier()

    def _add_earlier(self) -> None:
        """Adds the step's gradients to those from before it."""
        earlier, self._earlier = self._earlier, None
        for parameter, place, grad in earlier or ():
            new = reduced_grad(parameter, place)
            place.leave(parameter, grad if new is None else grad.add_(new))

    # ---- shapes: how torch 2.13 finds out what stages exchange ------------------------------------------

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        """Makes tensors like the module's outputs, with `requires_grad` but without a graph.

        Received inputs are zeros, because buffers that were not filled hold arbitrary values.  As for torch
        2.11, this is a run without gradients, which records no amax for FP8 and waits for no backward.
        """
        has_gradients = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*args, *module.parameters())
        )
        if not self.is_first:
            args = tuple(torch.zeros_like(arg) for arg in args)
        with torch.no_grad(), inside_stage(self._stage_ranks):
            outputs = module(*args, **kwargs)
        return tree_map_only(
            Tensor,
            lambda t: t.detach().requires_grad_(has_gradients and t.is_floating_point()),
            outputs,
        )

    def _compute_input_grads(
        self, outputs: Sequence[Tensor], all_fwd_inputs: Sequence[Tensor], grad_outputs: Any = None
    ) -> tuple[None, ...]:
        """Returns None for each input, which stands for a gradient like the input.

        A real backward would reduce, on all ranks, gradients of a microbatch that does not exist.
        """
        return (None,) * len(all_fwd_inputs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares the first step with a backward.

        In torch 2.11, buffers for received activations get no gradient if an evaluation came first; 2.13
        makes new ones.
        """
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        received = (getattr(info, "buffer", None) for infos in self.args_recv_info.values() for info in infos)
        for buffer in received:
            if buffer is not None and buffer.is_floating_point():
                buffer.requires_grad_()
        return prepared


def _set_aside(groups: Iterable[FlatGroup]) -> list[_Earlier]:
    """Takes away the gradients from before a step, so that its scaling does not reach them."""
    taken: list[_Earlier] = []
    for group in groups:
        # So that this is not taken for a zero_grad() later.
        group.drop_if_zeroed()
        place = group.master.grad_attribute
        for local_shard in group.master.local_shards:
            grad = reduced_grad(local_shard.parameter, place)
            if grad is not None:
                taken.append((local_shard.parameter, place, grad))
                place.leave(local_shard.parameter, None)
        group.watch_unreduced()
    return taken


def _exchanged(like: Tensors | None) -> Tensors | None:
    """Makes floating-point examples require gradients, which torch 2.13 looks for."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), like)


def _described(tensors: Tensors | None) -> str:
    """Describes shapes and dtypes; empty if they are not known."""
    parts = [tensors] if isinstance(tensors, Tensor) else tensors or []
    return ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)


def _outermost(module: nn.Module, stage_index: int) -> list[UnitModule]:
    """Units in `module` that are in no other unit, each once."""
    units = list(distinct_units(module))
    if not units:
        raise ValueError(f"stage {stage_index}, a {type(module).__name__}, has no unit; shard it first")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and FLAT_SHARD.of(parameter) is None:
            raise ValueError(f"parameter {name} of stage {stage_index} is in no unit; shard the whole stage")
    inner = {below for wrapped in units for _, below in units_in(wrapped) if below is not wrapped}
    return [wrapped for wrapped in units if wrapped not in inner]


def _root_of_stage(wrapped: UnitModule, stage_index: int) -> Root:
    """Makes `wrapped` the root of the units inside.  Collective over the ranks that have the same stage."""
    root = root_of(wrapped)
    if root.unit is not wrapped.fsdp_state:
        raise ValueError(f"stage {stage_index} is part of a larger sharded module; shard each by itself")
    return root


def _calling_schedule() -> Schedule | None:
    """Finds the schedule whose step is running, because schedules do not tell their stages."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Schedule):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _refuse_splits(schedule: Schedule) -> None:
    """Checks that a schedule does not split backwards.

    Raises:
        NotImplementedError: if some rank has separate backwards for inputs and for weights in `schedule`.
    """
    orders = (getattr(schedule, name, None) for name in ("pipeline_order", "pipeline_order_with_comms"))
    actions = (
        action for order in orders for of_rank in (order or {}).values() for action in of_rank if action
    )
    parts = (part for action in actions for part in action.sub_actions or (action,))
    if any(part.computation_type in SPLIT for part in parts):
        raise NotImplementedError(_split_message(type(schedule).__name__))


def _split_message(schedule: str) -> str:
    return (
        f"{schedule} splits each backward into one for the inputs and one for the weights (zero bubble), "
        "which FlatFSDP cannot reduce; use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
    )
