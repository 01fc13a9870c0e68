"""`FullyShardedDataParallel`: fairscale's interface of a FlatFSDP module.

In:   fairscale's constructor arguments and calls.
Out:  the engine's; nothing is sharded, gathered or reduced here.
Next: `fairscale_options.py` translates the arguments, `flatfsdp/engine/api/wrapper.py` runs the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from flatfsdp import checkpoint
from flatfsdp.comm.ranks import Ranks, default_group
from flatfsdp.compat.fairscale import fairscale_options, saved_states
from flatfsdp.compat.fairscale.fairscale_options import ProcessGroupName
from flatfsdp.engine.api.shard import make_unit, make_units
from flatfsdp.engine.api.wrapper import FlatFSDP
from flatfsdp.engine.build.build_unit import parameters_to_take
from flatfsdp.engine.storage.unreduced import reduced_grad
from flatfsdp.engine.whole.full_params import state_dict_gathering, state_dicts_gathered
from flatfsdp.engine.whole.units import distinct_units, root_of
from flatfsdp.flat.module_wrapper import ModuleWrapper
from flatfsdp.flat.nested import map_tensors
from flatfsdp.options import Gathering, Options
from flatfsdp.torch_private import in_backward, never_traced, traced_inside


class TrainingState(Enum):
    """The phase of a `FullyShardedDataParallel` within a step (its `training_state`)."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    """A backward is running, and gradients of this instance are still missing."""
    BACKWARD_POST = auto()
    """A backward is running, and all gradients of this instance have landed."""
    SUMMON_FULL_PARAMS = auto()


class FullyShardedDataParallel(FlatFSDP):
    """A FlatFSDP module with fairscale's constructor and methods.

    Args:
        module: its parameters that no inner instance has taken are sharded; on one device, of one dtype.
        process_group: rank group to shard over; inner instances may have others.  Default: all ranks, or this
            process alone without torch.distributed.
        process_group_reduce_scatter: checked only; the engine always reduces over its own communicator with
            the ranks of process_group.
        reshard_after_forward: free unsharded parameters after each forward.
        disable_reshard_on_root: keep those of the root module, which its backward needs first.
        mixed_precision: FP32 shards, computation in compute_dtype; FP32 inputs of the root are cast.
        fp32_reduce_scatter: accumulate and reduce gradients in FP32, not in compute_dtype.  For bf16 or FP16
            parameters without mixed_precision, the reduced gradient is in `main_grad` of the flat parameters,
            and `grad` stays None.
        flatten_parameters: only True.
        move_params_to_cpu: keep shards, gradients and optimizer in CPU memory.
        compute_dtype: default: FP16 in mixed precision, else the parameters' dtype.
        buffer_dtype: dtype of floating-point buffers; default: compute_dtype.
        move_grads_to_cpu: the value of move_params_to_cpu, or None.
        bucket_cap_mb: accepted, without effect.
        compute_device: default: the parameters' device, or "cuda" if they are on the CPU and the group is
            NCCL's.
        no_broadcast_optim_state: list this instance's optimizer state as not collected.  Set at the first use
            of the model for an inner instance in a group of one rank, such as an expert.
        state_dict_device: where `state_dict` puts tensors; only its type matters.  Default: compute_device,
            or the CPU with move_params_to_cpu.
        clear_autocast_cache: clear autocast's cache of cast weights after each forward.
        force_input_to_fp32: cast FP16 inputs of this instance to FP32, without mixed_precision.
        verbose: show more in `repr`.
        cpu_offload: another name for move_params_to_cpu.
        state_dict_on_rank_0_only: `state_dict` is empty on other ranks.
        gradient_predivide_factor: divisor of gradients before their sum over ranks; after the sum they are
            divided by the rest of the number of ranks.  Default: about its square root.
        allow_reset_parameters: let `reset_parameters` reach the module.
        cast_input: False leaves inputs unchanged in mixed precision.
        optimize_backward_concat: write gradients into the flat buffer without a concatenation.
        shard: False keeps the parameters whole on each rank of process_group and averages gradients.
        limit_all_gather_events: accepted, without effect.
        limit_reduce_scatter_events: accepted, without effect.
        should_validate_process_group: accepted, without effect.
        offload_config: refused.
        fp8_all_gather: refused.

    Attributes:
        rank, world_size: this process's place in process_group.
        gradient_predivide_factor, gradient_postdivide_factor: by default their product is world_size.

    Raises:
        ValueError, NotImplementedError, TypeError: for unsupported or contradicting arguments; the message
            names the alternative.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | str | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | str | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        *,
        cast_input: bool = True,
        optimize_backward_concat: bool = False,
        shard: bool = True,
        limit_all_gather_events: bool = False,
        limit_reduce_scatter_events: bool = False,
        should_validate_process_group: bool = True,
        offload_config: Any = None,
        fp8_all_gather: bool = False,
    ) -> None:
        fairscale_options.check_reduce_scatter_group(process_group_reduce_scatter)
        fairscale_options.check_supported(flatten_parameters, offload_config, fp8_all_gather)
        offload = fairscale_options.choose_cpu_offload(move_params_to_cpu, cpu_offload, move_grads_to_cpu)
        if process_group is None:
            process_group = default_group()
        ranks = Ranks.of(process_group)
        parameters = parameters_to_take(module)
        precision = fairscale_options.choose_precision(
            parameters, mixed_precision, compute_dtype, buffer_dtype, fp32_reduce_scatter
        )
        # Not FlatFSDP's own, which lists local shards.
        ModuleWrapper.__init__(self, module)
        chosen = Options(
            mesh=fairscale_options.mesh_of(process_group, shard=shard),
            device=fairscale_options.choose_device(compute_device, parameters, process_group),
            precision=precision,
            cast_inputs=False,
            reshard_after_forward=reshard_after_forward,
            optimize_backward_concat=optimize_backward_concat,
            cpu_offload=offload,
        )
        make_units(module, None, partial(make_unit, lists_flat=True), chosen)
        self.fsdp_state.keep_as_root = disable_reshard_on_root
        self.fsdp_state.lister = weakref.ref(self)
        for group in self.fsdp_state.groups:
            self._register_flat(group.flat_name, group.master.flat)
        self._ranks = ranks
        is_group = isinstance(process_group_reduce_scatter, dist.ProcessGroup)
        self._reduce_ranks = Ranks.of(process_group_reduce_scatter) if is_group else ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        self.reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.mixed_precision = mixed_precision
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.flatten_parameters = flatten_parameters
        self.cpu_offload = self.move_params_to_cpu = self.move_grads_to_cpu = offload
        self.compute_dtype, self.buffer_dtype = precision.compute, precision.buffer
        self.compute_device = self.fsdp_state.shared.device
        self._no_broadcast_optim_state = bool(no_broadcast_optim_state)
        self.state_dict_device = torch.device("cpu" if offload else state_dict_device or self.compute_device)
        self.clear_autocast_cache = clear_autocast_cache
        self.force_input_to_fp32 = force_input_to_fp32
        self.verbose = verbose
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        self.allow_reset_parameters = allow_reset_parameters
        self._casts_input = mixed_precision and cast_input
        default = fairscale_options.default_predivide_factor
        self.gradient_predivide_factor = gradient_predivide_factor or default(ranks.size)
        self.gradient_postdivide_factor = ranks.size / self.gradient_predivide_factor
        if gradient_predivide_factor or not fairscale_options.mean_is_the_same(ranks.size, precision):
            self._unit.set_gradient_divide_factors(
                self.gradient_predivide_factor, self.gradient_postdivide_factor, recurse=False
            )

    # ---- what there is ----------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group passed to the constructor, or the default one.

        Raises:
            RuntimeError: once it is destroyed.
        """
        return self._ranks.group

    @property
    def process_group_reduce_scatter(self) -> dist.ProcessGroup | None:
        """The group passed to the constructor; process_group if a name or a stand-in was passed."""
        return self._reduce_ranks.group

    @property
    def params(self) -> list[nn.Parameter]:
        """This instance's own flat parameters."""
        return [group.master.flat for group in self.fsdp_state.groups]

    def non_shared_params(self) -> list[nn.Parameter]:
        """The list `params`: a parameter belongs to one instance."""
        return self.params

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates, here and in inner instances, if they have a gradient."""
        masters = [group.master for m in get_fsdp_instances(self) for group in m.fsdp_state.groups]
        return [
            local_shard.parameter
            for master in masters
            for local_shard in master.local_shards
            if reduced_grad(local_shard.parameter, master.grad_attribute) is not None
        ]

    @property
    def _is_root(self) -> bool | None:
        """Whether no other instance contains this one; None before the first use of the model."""
        unit = self.fsdp_state
        return unit.root.unit is unit if unit.is_used else None

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        shown = ["world_size", "flatten_parameters", "mixed_precision"]
        if self.verbose:
            shown = ["_is_root", "rank", *shown, "reshard_after_forward", "compute_dtype", "buffer_dtype"]
            shown += ["fp32_reduce_scatter", "compute_device", "move_params_to_cpu", "clear_autocast_cache"]
            shown += ["force_input_to_fp32"]
        return ", ".join(f"{name.lstrip('_')}={getattr(self, name)}" for name in shown)

    # ---- states -----------------------------------------------------------------------------------------

    @property
    def training_state(self) -> TrainingState:
        """The current phase of this instance; FORWARD as long as the forward of its root runs."""
        state = self.fsdp_state
        if state.is_whole:
            return TrainingState.SUMMON_FULL_PARAMS
        if not state.is_used:
            return TrainingState.IDLE
        if in_backward():
            is_done = state.backward_done
            return TrainingState.BACKWARD_POST if is_done else TrainingState.BACKWARD_PRE
        return TrainingState.FORWARD if state.root.in_forward else TrainingState.IDLE

    def assert_state(self, state: TrainingState | Iterable[TrainingState]) -> None:
        """Raises ValueError unless this instance is in (one of) the given states."""
        allowed = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in allowed:
            names = " or ".join(one.name for one in allowed)
            raise ValueError(f"this call needs state {names}, but the state is {self.training_state.name}")

    @property
    def no_broadcast_optim_state(self) -> bool:
        """Whether its optimizer state is not collected: on request, or because other ranks have others."""
        unit = self.fsdp_state
        is_alone = unit.is_used and self.world_size == 1 < unit.root.unit.grid.num_ranks
        return self._no_broadcast_optim_state or is_alone

    # ---- training ---------------------------------------------------------------------------------------

    @traced_inside
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module, with the input casts and cache clearing that were requested."""
        if self.force_input_to_fp32 and not self.mixed_precision:
            args, kwargs = _cast((args, kwargs), torch.float16, torch.float32)
        self._require_own_flats()
        args, kwargs = self._cast_inputs(args, kwargs)
        outputs = super().forward(*args, **kwargs)
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    @never_traced
    def _require_own_flats(self) -> None:
        """Raises if a flat parameter was replaced by another tensor, which nothing would read."""
        state = self.fsdp_state
        for group in state.groups:
            if self._parameters.get(group.flat_name) is not group.master.flat and not state.is_whole:
                raise RuntimeError(
                    f"the flat parameter of unit {group.name} was replaced, by another engine or by "
                    "functional_call, and nothing would read it; write to it in place, or call a plain copy"
                )

    @never_traced
    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Casts FP32 inputs of the root, labels too, as fairscale does."""
        is_cast = self._casts_input and root_of(self._unit).unit is self.fsdp_state
        return _cast((args, kwargs), torch.float32, self.compute_dtype) if is_cast else (args, kwargs)

    def list_flats(self, are_listed: bool) -> None:
        """Registers the flat parameters, or keeps them as plain attributes while modules list others."""
        places: list[dict[str, Any]] = [self._parameters, vars(self)]
        to, source = places if are_listed else places[::-1]
        for group in self.fsdp_state.groups:
            to[group.flat_name] = source.pop(group.flat_name)

    def _require_idle_root(self, called: str) -> None:
        root_of(self._unit)
        assert self._is_root, f"{called} is for the root instance; call it on the outermost one"
        self.assert_state(TrainingState.IDLE)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backwards accumulate gradients without reducing them.

        Raises:
            AssertionError: if this is not the root.
            ValueError: unless it is idle.
        """
        self._require_idle_root("no_sync")
        with self._unit.no_sync():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips gradients (`grad` or `main_grad`) by their norm over all ranks, and returns it.  Collective.

        Args:
            max_norm: largest norm after clipping.
            norm_type: the p of the p-norm; may be inf.
            error_if_nonfinite: raise if the norm is NaN or inf.

        Raises:
            AssertionError: if this is not the root.
            ValueError: unless it is idle, or if an instance is spread over other ranks than the root.
        """
        self._require_idle_root("clip_grad_norm_")
        return self._unit.clip_grad_norm_(float(max_norm), float(norm_type), error_if_nonfinite)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divides gradients by `pre` before and by `post` after their sum over ranks.

        Args:
            pre: divisor before the sum.
            post: divisor after the sum.
            recursive: apply to inner instances as well.
        """
        self.assert_state(TrainingState.IDLE)
        self._unit.set_gradient_divide_factors(pre, post, recursive)
        for instance in get_fsdp_instances(self) if recursive else [self]:
            instance.gradient_predivide_factor, instance.gradient_postdivide_factor = pre, post

    # ---- ordinary parameters for a while ----------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Context in which the module has its ordinary parameters: whole, in shard precision, by their names.

        Args:
            recurse: include inner instances.
            volatile: discard changes instead of writing them back.

        Raises:
            ValueError: unless this instance is idle.
        """
        self.assert_state(TrainingState.IDLE)
        with self._unit.summon_full_params(recurse, writeback=not volatile):
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Calls `fn` on every module, with ordinary parameters there.  Collective.

        Raises:
            ValueError: unless this instance is idle.
        """
        self.assert_state(TrainingState.IDLE)
        return super().apply(fn)

    def reset_parameters(self) -> None:
        """Calls the module's `reset_parameters` on ordinary parameters, gathered for the call if necessary.

        Inside a volatile summon_full_params, the new values are lost at its end.  Collective.

        Raises:
            RuntimeError: without allow_reset_parameters=True.
            ValueError: inside a forward or backward.
        """
        if not self.allow_reset_parameters:
            raise RuntimeError("reset_parameters after wrapping needs allow_reset_parameters=True")
        self.assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        # Also inside summon_full_params, for units below that are not summoned yet.
        with self._unit.summon_full_params(
            writeback=self.fsdp_state.writes_back or not self.fsdp_state.is_whole
        ):
            self.module.reset_parameters()  # type: ignore[operator]

    def append_shared_param(self, p: nn.Parameter) -> NoReturn:
        """Not supported: a parameter belongs to one unit.

        Raises:
            NotImplementedError: always.
        """
        way_out = "wrap a module that contains all modules that share it"
        raise NotImplementedError(f"append_shared_param: a parameter belongs to one unit; {way_out}")

    # ---- full checkpoints -------------------------------------------------------------------------------

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Copies of whole parameters, in shard precision, and of buffers, under the plain module's names.

        In mixed precision buffers are cast to FP32.  Collective.
        """
        asked = state_dict_gathering.get()
        gathering = Gathering(
            asked.rank0_only or self.state_dict_on_rank_0_only,
            asked.offload_to_cpu or self.state_dict_device.type == "cpu",
        )
        with state_dicts_gathered(gathering):
            saved = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        keys = [key for key in saved if key.startswith(prefix)]
        if self.state_dict_on_rank_0_only and dist.is_initialized() and dist.get_rank() != 0:
            for key in keys:
                del saved[key]
            return saved
        in_use = {tensor.data_ptr() for tensor in (*self.parameters(), *self.buffers())}
        for key in keys:
            if isinstance(saved[key], Tensor):
                saved[key] = self._for_state_dict(saved[key], in_use)
        return saved

    def _for_state_dict(self, value: Tensor, in_use: set[int]) -> Tensor:
        dtype = torch.float32 if self.mixed_precision and value.is_floating_point() else value.dtype
        if value.device.type != self.state_dict_device.type:
            return value.to(self.state_dict_device, dtype)
        return value.to(dtype, copy=value.data_ptr() in in_use)

    # ---- sharded checkpoints ----------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's flat shards and all buffers; loads only on equally many ranks with equal wrapping."""
        self.assert_state([state for state in TrainingState if state is not TrainingState.SUMMON_FULL_PARAMS])
        state = checkpoint.local_state_dict(self)
        return {key: value.to(self.state_dict_device.type) for key, value in state.items()}

    def load_local_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Loads what `local_state_dict` returned on the same rank."""
        self.assert_state([state for state in TrainingState if state is not TrainingState.SUMMON_FULL_PARAMS])
        checkpoint.load_local_state_dict(self, dict(state_dict), strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Metadata of this rank for `consolidate_shard_weights`, as plain JSON values."""
        metadata = checkpoint.local_metadata(self)
        # Once each: a unit with two paths is listed under the first one.
        for unit, prefix in distinct_units(self).items():
            for group in unit.fsdp_state.groups:
                about = metadata["shards"][f"{prefix}{group.flat_name}"]
                about["no_broadcast_optim_state"] = saved_states.is_uncollected(unit, self._unit)
        return metadata

    consolidate_shard_weights = staticmethod(saved_states.consolidate_shard_weights)

    # ---- optimizer state --------------------------------------------------------------------------------

    def gather_full_optim_state_dict(self, optim: Optimizer, **_ignored: Any) -> dict[str, Any] | None:
        """The optimizer's state with whole tensors, on the CPU, by the numbers of the plain parameters.

        `saved_states.py` describes the format.  Collective; call it on the root.

        Returns:
            None on all ranks but the first.
        """
        return saved_states.gather_full(self._unit, optim)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of what `gather_full_optim_state_dict` returned, for `load_state_dict`.

        Works for any number of ranks, and for states that fairscale saved.  Every rank needs the whole dict,
        which is not changed.  Collective only at the first use of the model.
        """
        return saved_states.shard_of(self._unit, full_optim_state_dict)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """All instances in `mod`, outer ones first; `skip_empty` drops those without parameters."""
    found = [module for module in mod.modules() if isinstance(module, FullyShardedDataParallel)]
    return [instance for instance in found if instance.params or not skip_empty]


def no_pre_load_state_dict_hook() -> AbstractContextManager[None]:
    """Does nothing: loading needs no such hook here; for programs that call it."""
    return nullcontext()


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Casts tensors of dtype `source` in a structure to `target`; differentiable."""
    return map_tensors(lambda t: t.to(target) if t.dtype == source else t, value)
