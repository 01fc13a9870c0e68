"""Drives one unit through forward and backward: when its parameters come and go, and when it is done.

In:   calls of the module (`before_forward`, `after_forward`), gradients (`landed`), autograd's hooks.
Out:  `unshard`, `wait` and `reshard` on its groups, `Reducer.ready` when it is done.
Next: `engine/step/root.py` ends the backward for all units together.

    event             parameters                         gradients
    before_forward    unshard, prefetch, wait            -
    after_forward     reshard, unless kept (see below)   -
    _before_backward  unshard, prefetch, wait            -
    landed            -                                  one more slot is in
    all done          reshard, unless kept               ready to reduce
    end_of_backward   reshard, unless kept               slots that got nothing are settled by the root

Kept: with `reshard_after_forward=False` until the last backward of a step; the root module (unless
`keep_as_root=False`) from its forward to its backward, because its head runs last in one and first in the
other.  Nothing is kept where no backward follows.

All gradients having landed is not enough to free parameters in backward: the gradient of the unit's inputs
may still need a frozen parameter, or a use of `weight.detach()`.  So each call of the module is an *open use*
from the first gradient of its outputs to the last gradient of its inputs, and the unit is done when
everything has landed and no use is open.  Inner units' outputs may also need the parameters of the unit
around them for their gradients, so those parameters stay until the backward is over.

FP32 inputs are cast to the compute dtype.  The outermost forward is given labels, times and weights of a
loss beside activations, and nothing tells which is which.  So it gets what its caller has, and tensors are
cast in front of the modules that own parameters.  Units inside are given activations first: these are cast at
the door, with less work for the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatfsdp.comm.checking.identity import Action
from flatfsdp.comm.grid import Grid
from flatfsdp.engine.step.left_behind import LeftBehind
from flatfsdp.engine.step.passes import Forward
from flatfsdp.engine.step.reduce import SETTLED_BEFORE
from flatfsdp.engine.step.requires_grad import follow_requires_grad
from flatfsdp.engine.step.root import Root
from flatfsdp.engine.step.unit import Unit
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.engine.storage.state import ShardState, Shared, Version
from flatfsdp.flat.nested import cast_fp32, holds_fp32, map_tensors, tensors_in
from flatfsdp.options import Policy
from flatfsdp.torch_private import in_backward, never_traced, next_operation, running_backward

Begun = tuple[int, dict[int, int], int]
"""One call of a unit, from its beginning: the unit's position in this forward, -1 in a recomputation; the
version of each input that required a gradient, by its id, none under no_grad; number of its first
differentiable operation."""


class DrivenUnit(Unit):
    """A unit that follows its module through forward and backward.

    Args:
        modules: the module and those in it, without those of inner units.
        contains_units: whether there are inner units.

    Attributes:
        root: the model that the unit is in; missing before the model is used.
    """

    def __init__(
        self, policy: Policy, grid: Grid, shared: Shared, modules: list[nn.Module], *, contains_units: bool
    ) -> None:
        super().__init__(policy, grid, shared)
        self.root: Root
        self._contains_units = contains_units
        self._left_behind = LeftBehind(modules)
        # Hooks that cast inputs of modules, while it is the outermost unit.
        self._casts: list[RemovableHandle] = []
        # Otherwise, the dtype to which a first argument in FP32 is cast; None casts nothing.
        self._casts_to: torch.dtype | None = None

    def join(self, root: Root) -> None:
        """Becomes a unit of this model, when that is first used."""
        self.root = root
        for cast in self._casts:  # a layer that was a model of its own before
            cast.remove()
        compute, is_outermost = self.policy.precision.compute, self is root.unit
        casts = self.policy.cast_inputs and compute is not torch.float32
        self._casts = _cast_in_front_of_modules(self, compute) if casts and is_outermost else []
        self._casts_to = compute if casts and not is_outermost else None

    # ---- forward ----------------------------------------------------------------------------------------

    @never_traced
    def before_forward(self, args: Any, kwargs: dict[str, Any]) -> tuple[Begun, Any, dict[str, Any]]:
        """Gathers the parameters, for a call with these arguments; returns what to call it with."""
        for group in self.groups:
            follow_requires_grad(group)
            if (name := group.binding.displaced(group.params.shown_now)) is not None:
                raise RuntimeError(
                    f"parameter {self.prefix}{name} was replaced after sharding, and nothing would update "
                    "what took its place; write to it inside summon_full_params(), or replace it before "
                    "sharding. torch.func.functional_call is not supported: call it with a plain copy"
                )
        if in_backward():
            # A recomputation: its order says nothing about the next forward.  A unit gathered ahead of it may
            # have finished its backward already, so that nothing would free it.
            position = -1
            self.show(Action.BACKWARD)
        else:
            position = self.root.order.current.record(self)
            # Before more activations: this frees gradients that the last backward has left.
            if position == min(SETTLED_BEFORE, len(self.root.units) - 1):
                self.root.reducer.settle()
            self.show(self.root.forward_action, self.root.order.after(position))
        if self._casts_to is not None:
            # Others may be tables of a rotary embedding, masks, or a residual, in FP32 on purpose.
            if args:
                args = (cast_fp32(args[0], self._casts_to), *args[1:])
            elif kwargs:
                name, first = next(iter(kwargs.items()))
                kwargs = {**kwargs, name: cast_fp32(first, self._casts_to)}
        inputs = tensors_in((args, kwargs)) if torch.is_grad_enabled() else ()
        versions = {id(t): t._version for t in inputs if t.requires_grad and not t.is_inference()}
        return (position, versions, next_operation()), args, kwargs

    @never_traced
    def after_forward(self, begun: Begun, arguments: object, outputs: Any) -> Any:
        """Frees the parameters, or arranges for the backward to find them; returns the outputs.

        Args:
            begun: what `before_forward` returned.
            arguments: those that it returned; not kept in between, as a forward may replace what is in them.
            outputs: result of the forward.

        Raises:
            RuntimeError: if the forward has written to a parameter, or returned one.
        """
        # While the parameters are there: a freed one has the version of its placeholder.
        self.writes.end()
        position, given, first = begun
        tensors, uses_nothing = tensors_in(outputs), False
        differentiable = [t for t in tensors if t.requires_grad] if torch.is_grad_enabled() else []
        if returned := [t for t in differentiable if _is_input(t, given)]:
            # Two units that return their input would both hook one tensor, and the backward would run the
            # hooks in the order of registration: the first unit's before the second one's.
            outputs = map_tensors(lambda t: t.view_as(t) if _is_input(t, given) else t, outputs)
            # As in stochastic depth, on this rank: there is no gradient to wait for.  The unit has to be
            # reduced as early as on the other ranks, or they would wait.
            uses_nothing = len(returned) == len(differentiable)
            tensors = tensors_in(outputs)
            differentiable = [t for t in tensors if t.requires_grad]
        # Before hooks are registered on the outputs, which are there, too.
        is_recomputed = in_backward()
        left = self._left_behind.since(first) if torch.is_grad_enabled() and not is_recomputed else []
        left = [each for each in left if not any(each[0] is tensor for tensor in differentiable)]
        if differentiable or left:
            use = self._follow_inputs(tensors_in(arguments))
            # The backward gathers again, and has to get what this forward had.
            versions = [group.compute_shard.version for group in self.groups]
            # A recomputation may belong to an earlier forward.
            forward = None if is_recomputed else self.root.order.current
            # Another call in this forward may have gradients to wait for.
            is_empty = uses_nothing and not left and forward is not None and forward.units.count(self) == 1
            hook = partial(self._before_backward, use, is_empty, versions, forward, position)
            for tensor in differentiable:
                tensor.register_hook(hook)
            for tensor, number in left:
                # The hook of the inner unit that made it, such as one in this unit's list of losses.
                makers = (maker for operations, maker in self.root.calls if number in operations)
                tensor.register_hook(next(makers, hook))
            if not is_recomputed:
                self.root.calls.append((range(first, next_operation()), hook))
        if is_recomputed:
            return outputs
        # A backward that starts from an output without visible tensors could not gather them again.
        is_opaque = torch.is_grad_enabled() and not tensors
        keeps = (self is self.root.unit and self.keep_as_root) or not self.policy.reshard_after_forward
        if not is_opaque and not ((differentiable or left) and keeps):
            for group in self.groups:
                # Reading it after the free would crash.
                if group.buffer is not None and any(map(group.holds, tensors)):
                    raise RuntimeError(
                        f"unit {self.name} returned a parameter of its own, or a view, freed now: .clone() it"
                    )
            self.reshard()
        return outputs

    def _follow_inputs(self, inputs: list[Tensor]) -> object | None:
        """Opens a use that ends when the inputs have their gradients; None if none will have one."""
        awaited = {id(t): t for t in inputs if t.requires_grad}
        if not awaited:
            return None
        use = object()

        def arrived(key: int, _grad: Tensor) -> None:
            # A leaf input would keep its hook for good.
            handles.pop(key).remove()
            if not handles:
                self._open_uses.discard(use)
                self._reduce_and_free_if_done()

        handles = {key: tensor.register_hook(partial(arrived, key)) for key, tensor in awaited.items()}
        return use

    # ---- backward ---------------------------------------------------------------------------------------

    def _before_backward(
        self, use: object, empty: bool, versions: list[Version], forward: Forward | None, at: int, _: Tensor
    ) -> None:
        for group, version in zip(self.groups, versions, strict=True):
            group.require_version(version)
        # autograd notices most such writes, but not those to parts of a pack: it has saved the pack.
        self.writes.require_none()
        # Before the gather, which it may find to be stale: other weights may have been in place meanwhile.
        backward = self.root.begin_backward(forward)
        self._reached_in.add(backward)
        if empty:
            self._empty_in.add(backward)
        if use is not None:
            self._open_uses.add(use)
            # Without an input that gets a gradient, nothing tells that the module's own backward is over.
            self._was_followed = True
        # Modules see them, too: a recomputation inside reads the parameters again.
        self.show(Action.BACKWARD, () if forward is None else self.root.order.before(forward, at))
        # Its sources are the parameters, which are there now.
        if self.derived is not None:
            self.derived.restore()

    def landed(self, group: FlatGroup, index: int | None) -> None:
        """Notes that slot `index` of a trained group, or every slot for None, has its gradient.

        Raises:
            RuntimeError: if the parameters were not there when it was computed.
        """
        if group.state.shard is ShardState.SHARDED:
            # It is in `main_grad` by now, and would be added to the next step's.
            group.drop_unreduced()
            raise RuntimeError(
                f"a gradient of unit {self.name} was computed while its parameters were sharded, from NaN: "
                "its forward has handed out a tensor beside its outputs (through a closure), or a loss uses "
                "module.weight outside; return the tensor, or set it as an attribute of a module in the unit"
            )
        landed = self._landed[running_backward(), group]
        # Once a group, not once a parameter.
        if not landed:
            self.root.begin_backward()
            group.join_step()
            self.shared.microbatch.awaits_gradients = False
        if index is None:
            landed.update(range(group.num_trained))
        else:
            landed.add(index)
        if len(landed) >= group.num_trained:
            self._reduce_and_free_if_done()

    def _reduce_and_free_if_done(self) -> None:
        # Inner units' backwards may read this unit's parameters, and a use may: both until they are over.
        if self._contains_units or self._open_uses:
            return
        # A recomputation inside this unit runs a nested backward, and the outer one goes on here afterwards.
        if not all(self._all_landed_in(backward) for backward in {running_backward(), *self._reached_in}):
            return
        # A parameter used in several reentrant checkpoints gets a gradient in each nested backward, and only
        # the end of the outer one, when the unit is reduced otherwise, tells that no more will come.
        is_complete = self._was_followed and running_backward() == self.root.backward.number
        if is_complete and self.root.reduces and any(group.state.takes_part for group in self.groups):
            self.root.reducer.ready(self.groups)
        self._free_after_backward()


def _is_input(tensor: Tensor, versions: dict[int, int]) -> bool:
    """Whether an output is an input that the forward has not written to, rather than a result."""
    return tensor.requires_grad and versions.get(id(tensor)) == tensor._version


def _cast_in_front_of_modules(unit: Unit, dtype: torch.dtype) -> list[RemovableHandle]:
    """Lets the modules that own parameters of the outermost unit cast their FP32 inputs.

    The unit's own module is left out, unless no module is inside: then it is a layer itself.
    """
    sites = (site for group in unit.groups for sites in group.binding.sites for site in sites)
    inside = (site.module for site in sites if site.name != site.attribute or not site.module._modules)
    cast = partial(_cast_arguments, dtype)
    return [owner.register_forward_pre_hook(cast, with_kwargs=True) for owner in dict.fromkeys(inside)]


def _cast_arguments(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    # FP32 beside 16-bit activations, such as a router's weights of experts, is so on purpose.
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not holds_fp32(first):
        return None
    return cast_fp32(args, dtype), {name: cast_fp32(each, dtype) for name, each in kwargs.items()}


def is_cast(hook: Any) -> bool:
    """Whether `hook` casts inputs; what it launches is recorded with the forward."""
    return isinstance(hook, partial) and hook.func is _cast_arguments
