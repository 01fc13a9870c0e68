"""`FlatFSDP`: the wrapper a user sees.

In:   a module, ranks, a policy.
Out:  a module whose `parameters()` are flat shards that any optimizer can update.
Next: its `forward` drives `unit.py`; to follow one parameter, start at `layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp.binding import Binding, parameter_sites
from flatfsdp.comm import Grid, broadcast, check_same_on_all_ranks
from flatfsdp.layout import ParamSlot
from flatfsdp.microbatch import Microbatch
from flatfsdp.observe import ByteLedger
from flatfsdp.optim import clip_grad_norm
from flatfsdp.policy import GradSync, Policy, Precision, Prefetch
from flatfsdp.root import Root
from flatfsdp.tensors import cast_floats, tensors_in
from flatfsdp.unit import Unit, in_backward
from flatfsdp.unshard import FlatGroup
from flatfsdp.wrapper import ModuleWrapper


class FlatFSDP(ModuleWrapper):
    """Shards a module's parameters over ranks in one flat buffer, and gathers them where they are used.

    Takes every parameter below `module` that no inner FlatFSDP has taken, so wrap inner modules first
    (`flatfsdp.auto_wrap` does).  Each FlatFSDP is a unit: gathered, freed and reduced as a whole; one
    transformer layer is a good size.  The first one that is called becomes the root of those inside it.

    `parameters()` lists the flat FP32 shards; give them to any torch.optim optimizer after wrapping.  A
    parameter without a gradient in a reducing backward counts as one with a zero gradient.

    Args:
        module: on any device but meta, and the same on all ranks.
        process_group: ranks to shard over; default: all, or this process alone without torch.distributed.
        mesh: instead of process_group: 1-D (shard), or 2-D (replicate, shard).
        device: where shards, buffers and compute live; default: where the module is.
        precision: dtypes of the stations of a parameter.
        shard: False keeps parameters on every rank and all-reduces gradients (plain data parallel).
        reshard_after_forward: True frees unsharded parameters after each forward and backward (ZeRO-3);
            False keeps them until the last microbatch's backward (ZeRO-2).
        optimize_backward_concat: True lets each gradient land in the flat buffer that is reduced.  False
            is the baseline: autograd concatenates all gradients of a unit in every microbatch.  Both give
            the same bits.
        grad_sync: reduce gradients in the "last" microbatch's backward, or in "every" one's, which needs
            no full-size gradient buffer between microbatches and moves M times the bytes.
        prefetch: units to gather ahead.
        poison_on_free: debug mode: freed buffers read as NaN.  Costs the memory that freeing would save.

    Attributes:
        module: the wrapped module.  Attributes not found here are looked up there.
        microbatch: which microbatch this is; shared with the inner units of a root.
        ledger: bytes moved; shared likewise.

    Raises:
        ValueError: for parameters that cannot be sharded, naming them: on the meta device, not floating
            point, tied to one in another unit, on a device that the backend cannot reach.
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
        poison_on_free: bool = False,
    ) -> None:
        policy = Policy(
            precision or Precision(),
            reshard_after_forward,
            optimize_backward_concat,
            grad_sync,
            prefetch or Prefetch(),
            poison_on_free,
        )
        grid = Grid.of(process_group, mesh, shard)
        parameters = _parameters_to_take(module)
        device = _resolve_device(device, module, parameters, grid)
        super().__init__(module)
        self.policy = policy
        self.grid = grid
        self.device = device
        self.microbatch = Microbatch()
        self.ledger = ByteLedger()
        self._root: Root | None = None
        self._unit = Unit(reshard_after_forward)
        _prepare_buffers(module, device, policy.precision.buffer)
        chosen = {
            "flat_param": [p for p in parameters.values() if p.requires_grad],
            "frozen_flat_param": [p for p in parameters.values() if not p.requires_grad],
        }
        bindings = {name: Binding.of(module, members) for name, members in chosen.items() if members}
        for name, binding in bindings.items():
            group = FlatGroup(binding, grid, device, policy, self.microbatch, self.ledger, self._unit.landed)
            self._unit.add(group)
            self._register_flat(name, group.master)
        for name, parameter in parameters.items():
            parameter._flatfsdp_name = name  # type: ignore[attr-defined]

    # ---- training ---------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        root = self._init_root()
        unit = self._unit
        is_root_forward = unit is root.unit and not in_backward()
        if is_root_forward:
            root.begin_forward()
            precision = self.policy.precision
            if precision.compute != precision.param:
                args, kwargs = cast_floats((args, kwargs), precision.compute)
        try:
            position = unit.before_forward()
            outputs = self.module(*args, **kwargs)
            unit.after_forward(position, (args, kwargs), outputs)
        except Exception:
            if is_root_forward:
                root.abandon_step()
            raise
        if is_root_forward:
            root.end_forward(
                backward_follows=torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(outputs))
            )
        return outputs

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards that run inside accumulate gradients and do not reduce them."""
        return self._init_root().microbatch.not_last()

    def set_is_last_backward(self, is_last: bool) -> None:
        """Says whether the next backwards are the last of their step and reduce; for pipeline schedules."""
        self._init_root().microbatch.is_last = is_last

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scales the reduced gradients of the whole model so that their norm is at most `max_norm`.

        Collective.  `torch.nn.utils.clip_grad_norm_` would see this rank's shards only.

        Returns:
            The norm over all ranks before scaling, 0-dim, in the master's dtype.

        Raises:
            RuntimeError: if the norm is not finite and `error_if_nonfinite`, on all ranks.
        """
        self._init_root()
        return clip_grad_norm(
            list(self.parameters()),
            self.grid.shard,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also drops what was accumulated and not reduced, which `optimizer.zero_grad()` cannot see."""
        super().zero_grad(set_to_none)
        for unit in self._init_root().units:
            unit.drop_gradients()

    # ---- the root ---------------------------------------------------------------------------------------

    def _init_root(self) -> Root:
        """This module's root; on the first call, this module becomes the root of all units inside it.

        Collective the first time: checks that all ranks built the same model, and makes replicas equal.
        """
        if self._root is not None:
            return self._root
        inside: dict[FlatFSDP, str] = {}
        for name, wrapped in _units_in(self):
            # A module with two paths is one unit, under its first name.
            inside.setdefault(wrapped, name)
        for wrapped, name in inside.items():
            for group in wrapped._unit.groups:
                group.name = name
        groups = [group for wrapped in inside for group in wrapped._unit.groups]
        lines = [line for group in groups for line in group.describe()]
        for ranks in (self.grid.shard, self.grid.replicate):
            check_same_on_all_ranks(lines, ranks, self.device)
        for wrapped in inside:
            if wrapped.grid != self.grid:
                raise ValueError("all FlatFSDP modules of one model must use the same process group or mesh")
        reduce_grid = Grid(self.grid.shard.own_communicator(), self.grid.replicate.own_communicator())
        root = Root(
            [wrapped._unit for wrapped in inside],
            reduce_grid,
            self.device,
            self.policy.prefetch,
            self.policy.grad_sync == "every",
            self.microbatch,
            self.ledger,
        )
        for wrapped in inside:
            wrapped._root = wrapped._unit.root = root
            wrapped.microbatch, wrapped.ledger = self.microbatch, self.ledger
        for group in groups:
            group.attach(self.microbatch, self.ledger)
            self.ledger.parameters += sum(slot.numel for slot in group.layout.slots)
            if self.grid.replicate.size > 1:
                broadcast(group.master.data, self.grid.replicate)
        return root

    # ---- checkpoints: the parts of ModuleWrapper's state_dict -------------------------------------------

    @property
    def bindings(self) -> list[Binding]:
        return [group.binding for group in self._unit.groups]

    @contextmanager
    def _registered_parameters(self) -> Iterator[None]:
        self._init_root()
        for group in self._unit.groups:
            group.binding.register(group.full_master())
        try:
            yield
        finally:
            for group in self._unit.groups:
                group.params.rebind()

    def _load_slot(self, binding: Binding, slot: ParamSlot, value: Tensor) -> None:
        next(group for group in self._unit.groups if group.binding is binding).load(slot, value)

    # ---- what does not work on a sharded module ---------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlatFSDP:
        for group in self._unit.groups:
            probe = fn(group.master.detach()[:1])
            if (probe.dtype, probe.device) != (group.master.dtype, group.master.device):
                raise TypeError(
                    f"a FlatFSDP module cannot be moved or converted ({group.master.dtype} on "
                    f"{group.master.device} to {probe.dtype} on {probe.device}); pass device= and precision= "
                    "to the constructor instead"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a FlatFSDP module cannot be copied: its ranks, hooks and buffers are tied to this process; "
            "copy the plain module before wrapping, or load a state_dict into a new one"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a FlatFSDP module cannot be pickled; save its state_dict() instead")


def _parameters_to_take(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters below `module` that no FlatFSDP owns, by name; validated before anything changes."""
    found: dict[nn.Parameter, str] = {}
    for site, parameter in parameter_sites(module):
        if isinstance(site.module, FlatFSDP):
            continue
        if isinstance(site.module, ModuleWrapper):
            raise ValueError(
                f"{site.name} is a flat parameter of an inner {type(site.module).__name__}; FlatFSDP makes "
                "its own, so wrap the plain module"
            )
        found.setdefault(parameter, site.name)
    for parameter, name in found.items():
        owner_name = getattr(parameter, "_flatfsdp_name", None)
        if owner_name is not None:
            raise ValueError(
                f"parameter {name} is tied to {owner_name}, which another FlatFSDP unit has taken; wrap a "
                "module that contains both, so that they live in one unit"
            )
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device; materialise the module before wrapping it"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name} is {parameter.dtype}; only floating-point parameters can be sharded"
            )
    return {name: parameter for parameter, name in found.items()}


def _resolve_device(
    device: torch.device | str | None, module: nn.Module, parameters: dict[str, nn.Parameter], grid: Grid
) -> torch.device:
    if device is None:
        found = {m.device: f"unit {name}" for name, m in _units_in(module)}
        found |= {p.device: f"parameter {name}" for name, p in parameters.items()}
        if len(found) > 1:
            places = ", ".join(f"{what} is on {where}" for where, what in found.items())
            raise ValueError(f"{places}; pass device= to say where the whole module shall be")
        device = next(iter(found), torch.device("cpu"))
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for ranks in (grid.shard, grid.replicate):
        if ranks.group is not None and device.type == "cpu" and str(dist.get_backend(ranks.group)) == "nccl":
            raise ValueError(
                "the process group is NCCL's and the parameters are on the CPU; pass device='cuda'"
            )
    return device


def _prepare_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Moves and casts buffers, except those of inner units, which have been."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
    for child in module.children():
        if not isinstance(child, FlatFSDP):
            _prepare_buffers(child, device, dtype)


def _units_in(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, FlatFSDP]]:
    """Every FlatFSDP in `module`, itself included, in registration order, with its path without wrappers."""
    if isinstance(module, FlatFSDP):
        yield prefix.rstrip(".") or "root", module
    for name, child in module._modules.items():
        if child is not None:
            level = "" if isinstance(module, ModuleWrapper) else f"{name}."
            yield from _units_in(child, prefix + level)
