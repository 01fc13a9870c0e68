"""Base of the layers with FP8 products: their scaling state, their quantizers, their cached weights.

In:   a layer's forward, with or without an `autocast` around it.
Out:  `Roles` for each of its linear maps: how to cast input, weight and gradient.
Next: `linear.py` casts and multiplies.

A layer's state is in its buffers fp8_forward_scale, fp8_forward_amax_history and the same two for backward.
They appear when it first runs with delayed scaling, or when a checkpoint that has them is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatfsdp.autograd import in_backward
from flatfsdp.fp8 import overlapped
from flatfsdp.fp8.autocast import Region, current_region
from flatfsdp.fp8.linear import FuseWgrad, LinearCall
from flatfsdp.fp8.operand import Operand
from flatfsdp.fp8.products import is_blockwise
from flatfsdp.fp8.quantizers import Blockwise, Current, Delayed, Quantizer, Unquantized, with_columnwise
from flatfsdp.fp8.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, SplitAccumulator
from flatfsdp.fp8.recompute import current_tape, raise_recomputed, records_amax
from flatfsdp.fp8.state import Direction, Scaling, buffer_names
from flatfsdp.kernels.gemm import ALIGNMENT
from flatfsdp.tensor_parallel import UNSPLIT, Declaring, Exchange

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Roles:
    """How the tensors of one linear map are cast in one call.

    Attributes:
        grad: called in backward.
        is_fp8: whether products are in FP8.
        recipe: whose casts these are; None without FP8.
    """

    x: Quantizer
    weight: Quantizer
    grad: Callable[[], Quantizer]
    split: SplitAccumulator
    recipe: Recipe | None

    @property
    def is_fp8(self) -> bool:
        return self.recipe is not None


class WithoutExtraState(nn.Module):
    """Loads Transformer Engine's checkpoints, in which layers and norms pickle FP8 state; it is not read."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        unexpected_keys: list[str] = args[-2]
        if prefix + "_extra_state" in unexpected_keys:
            unexpected_keys.remove(prefix + "_extra_state")


class FP8Module(WithoutExtraState, Declaring):
    """A layer with one or more linear maps.

    Attributes:
        late_buffers: FP32 buffers that appear on first use; they keep their dtype, and loading makes them.
        linear_maps: the names of their weights.
        exchanges: of those that are split over ranks.
        allows_fp8: False: products are never in FP8, whatever autocast says.
    """

    late_buffers: ClassVar[tuple[str, ...]] = (*buffer_names("forward"), *buffer_names("backward"))
    linear_maps: ClassVar[tuple[str, ...]] = ("weight",)
    fuse_wgrad_accumulation: FuseWgrad = False
    allows_fp8 = True

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[str, Exchange] = {}
        self._scalings: dict[Direction, Scaling] = {}
        self._cached_weights: dict[str, tuple[Recipe, Operand]] = {}
        self._last_recipe: Recipe | None = None
        self._ran_in_fp8 = False

    # ---- how to cast ------------------------------------------------------------------------------------

    def roles(self, device: torch.device) -> list[Roles]:
        """One for each linear map.

        Raises:
            RuntimeError: if FP8 is asked for on a device without it.
        """
        region = current_region()
        is_repeated = in_backward() and current_tape() is None
        if region is None or not self.allows_fp8 or not (region.enabled or region.calibrating):
            if is_repeated and region is None and self._ran_in_fp8:
                raise_recomputed()
            self._ran_in_fp8 = False
            return [_HIGH] * len(self.linear_maps)
        if self._ran_in_fp8 is not region.enabled:  # to set what a module has is slow
            self._ran_in_fp8 = region.enabled
        if region.enabled:
            require_fp8(device, isinstance(region.recipe, BlockScaling))
            self._notice_change(region.recipe)
        if isinstance(region.recipe, DelayedScaling):
            return self._delayed(region, region.recipe, device)
        if not region.enabled:
            return [_HIGH] * len(self.linear_maps)
        return [_stateless(region.recipe)] * len(self.linear_maps)

    def _delayed(self, region: Region, recipe: DelayedScaling, device: torch.device) -> list[Roles]:
        records = records_amax()
        self._require_shared_scales(region, recipe)
        forward = self._scaling("forward", recipe, device, renew=records)
        backward = self._scaling("backward", recipe, device, renew=records)
        if records:
            region.use(forward)
            forward.was_loaded = backward.was_loaded = False
        tape = current_tape()
        scales = forward.scales() if tape is None else tape.scales(forward)
        dtype = recipe.fp8_format.forward

        def quantizer(index: int) -> Quantizer:
            amax = forward.amaxes[index] if records else None
            scale, scale_inv = scales[index]
            return Delayed(dtype, scale, scale_inv, amax) if region.enabled else Unquantized(amax)

        def grad(index: int) -> Callable[[], Quantizer]:
            def make() -> Quantizer:
                if not region.enabled:
                    return Unquantized()
                region.use_in_backward(backward)
                scale, scale_inv = backward.scales()[index]
                return Delayed(recipe.fp8_format.backward, scale, scale_inv, backward.amaxes[index])

            return make

        used = recipe if region.enabled else None
        return [
            Roles(quantizer(2 * i), quantizer(2 * i + 1), grad(i), recipe.split_accumulator, used)
            for i in range(len(self.linear_maps))
        ]

    def _require_shared_scales(self, region: Region, recipe: DelayedScaling) -> None:
        """
        Raises:
            ValueError: if ranks that gather FP8 numbers would have different scales.
        """
        for name, exchange in self.exchanges.items():
            gathers = exchange.gathers_input or exchange.gathers_grad
            if gathers and not (recipe.reduce_amax and _covers(region.group, exchange.ranks.group)):
                raise ValueError(
                    f"{type(self).__name__}.{name}: under sequence_parallel the ranks of tp_group gather FP8 "
                    "numbers and need equal scales; use reduce_amax=True and an amax_reduction_group with "
                    "all of them"
                )

    def _scaling(
        self, direction: Direction, recipe: DelayedScaling, device: torch.device, *, renew: bool
    ) -> Scaling:
        """
        Args:
            renew: for another recipe.  A forward that records nothing changes nothing: on one rank alone it
                would change which collectives that rank joins.
        """
        before = self._scalings.get(direction)
        is_same = not renew or (before is not None and _equal(before.recipe, recipe))
        if before is not None and is_same and before.device == device and before.is_current:
            return before
        forward, backward = recipe.fp8_format.forward, recipe.fp8_format.backward
        dtypes = [forward] * 2 if direction == "forward" else [backward]
        scaling = Scaling(self, direction, dtypes * len(self.linear_maps), recipe, device)
        is_other = before is not None and before.scale_means != scaling.scale_means
        if before is not None and is_other and not before.was_loaded:
            scaling.arena.rescale(recipe)
        self._scalings[direction] = scaling
        return scaling

    def _notice_change(self, recipe: Recipe) -> None:
        if self._last_recipe is None or not _equal(self._last_recipe, recipe):
            if self._last_recipe is not None:
                _warn_of_change(self._last_recipe, recipe)
            self._last_recipe = recipe

    def prepare_map(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        roles: Roles,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        sources: Iterable[Tensor | None],
    ) -> tuple[Operand, LinearCall]:
        """What the linear primitive takes for one call of the map with this weight.

        Args:
            sources: what the map's input is computed from; None for what is not there.

        Raises:
            RuntimeError: see `weight_operand`.
            TypeError: if is_first_microbatch is something else than None, True and False.
        """
        require_bool_or_none(type(self).__name__, is_first_microbatch)
        trains = torch.is_grad_enabled()
        needs_input_grad = trains and any(t is not None and t.requires_grad for t in sources)
        operand = self.weight_operand(
            name, weight, roles, is_first_microbatch, dtype, columnwise=needs_input_grad
        )
        exchange = self.exchanges.get(name, UNSPLIT)
        call = LinearCall(
            name=f"{type(self).__name__}.{name}",
            weight=weight if self.fuse_wgrad_accumulation else None,
            weight_dtype=weight.dtype,
            dtype=dtype,
            split=roles.split,
            exchange=exchange,
            quantizer=roles.x,
            grad_quantizer=roles.grad,
            fuse_wgrad=self.fuse_wgrad_accumulation,
            is_first_microbatch=is_first_microbatch,
            stored_weight=getattr(weight, "fp8_operand", None),
            needs_input_grad=needs_input_grad,
            needs_weight_grad=trains and weight.requires_grad,
            bias_grad=bias.dtype if trains and bias is not None and bias.requires_grad else None,
            overlaps=exchange.overlap and _can_overlap(weight.device, roles.recipe),
        )
        return operand, call

    def require_fp8_shape(self, name: str, tokens: int, in_features: int, out_features: int) -> None:
        """
        Raises:
            ValueError: if a product of these sizes cannot be in FP8.
        """
        sizes = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
        for what, size in sizes.items():
            if size % ALIGNMENT:
                raise ValueError(
                    f"{type(self).__name__}.{name}: {what} is {size}; FP8 products need multiples of "
                    f"{ALIGNMENT}: pad it, or run this layer under autocast(enabled=False)"
                )

    # ---- weights ----------------------------------------------------------------------------------------

    def fp8_weights(self) -> tuple[str, ...]:
        """Names of parameters that are used for FP8 products only, so that they may be kept in FP8."""
        weights = {name: getattr(self, name, None) for name in self.linear_maps}
        return tuple(
            name
            for name, weight in weights.items()
            if self.allows_fp8
            and weight is not None
            and all(size > 0 and size % ALIGNMENT == 0 for size in weight.shape)
        )

    def weight_operand(
        self,
        name: str,
        weight: Tensor,
        roles: Roles,
        is_first_microbatch: bool | None,
        dtype: torch.dtype,
        *,
        columnwise: bool,
    ) -> Operand:
        """The weight for products: in FP8 as FlatFSDP keeps it, or cast now or in the first microbatch.

        Args:
            is_first_microbatch: None: cast now, keep nothing; True: cast and keep; False: what is kept.
            dtype: of the products without FP8.
            columnwise: whether dgrad will need it.

        Raises:
            RuntimeError: if nothing is kept, or it was cast with another recipe; if the weight is kept in FP8
                and products are not in FP8, or with a scale for each block.
        """
        kept_in_fp8 = getattr(weight, "fp8_operand", None)
        if kept_in_fp8 is not None:
            self._require_tensor_scaling(name, roles.recipe)
            return kept_in_fp8()
        if roles.recipe is None:
            return roles.weight.cast(weight.detach().to(dtype), rowwise=True, columnwise=columnwise).operand
        tape = current_tape()
        is_kept = is_first_microbatch is False or (
            is_first_microbatch is True and tape is not None and tape.is_replay
        )
        if not is_kept:
            source = weight.detach().contiguous()
            operand = roles.weight.cast(source, rowwise=True, columnwise=columnwise).operand
        else:
            operand = self._kept(name, roles.recipe)
            if columnwise and operand.columnwise is None:
                # Kept by a forward without gradients.
                operand = _with_columnwise(operand, weight, roles.weight)
        if is_first_microbatch is not None:
            self._cached_weights[name] = (roles.recipe, operand)
        return operand

    def _require_tensor_scaling(self, name: str, recipe: Recipe | None) -> None:
        if recipe is None or isinstance(recipe, BlockScaling):
            found = "outside of fp8.autocast" if recipe is None else f"with {recipe}"
            raise RuntimeError(
                f"{type(self).__name__}.{name} is kept in FP8 with one scale (Precision(fp8_weights=...)) "
                f"and was used {found}; use CurrentScaling or DelayedScaling, or keep the weights in 16 "
                "bits (fp8_weights=None)"
            )

    def _kept(self, name: str, recipe: Recipe) -> Operand:
        kept_recipe, operand = self._cached_weights.get(name, (None, None))
        if operand is None:
            raise RuntimeError(
                f"{type(self).__name__}: is_first_microbatch=False, but {name} was not cast yet; call the "
                "layer with is_first_microbatch=True in the first microbatch of each step"
            )
        if kept_recipe != recipe:
            raise RuntimeError(
                f"{type(self).__name__}: {name} was cast with another recipe, {kept_recipe}; after a change "
                "of recipe begin with is_first_microbatch=True"
            )
        return operand

    # ---- module protocol --------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Module:
        """Moves the state along; scales stay in FP32 when the module is cast."""
        state = {key: self._buffers.pop(key) for key in self.late_buffers if key in self._buffers}
        super()._apply(fn, recurse)
        for key, tensor in state.items():
            assert tensor is not None
            moved = fn(tensor)
            self.register_buffer(key, moved if moved.dtype == tensor.dtype else tensor.to(moved.device))
        self._cached_weights.clear()
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = {key: state_dict[prefix + key] for key in self.late_buffers if prefix + key in state_dict}
        device = next(
            (tensor.device for tensor in (*self._buffers.values(), *saved.values()) if tensor is not None),
            None,
        )
        self.prepare_load({key: tensor.shape for key, tensor in saved.items()}, device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # A checkpoint may be from before FP8.
        for key in self.late_buffers:
            if prefix + key in missing_keys:
                missing_keys.remove(prefix + key)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # What is saved should not drag along the arena of the whole model.
        for key in self.late_buffers:
            if self._buffers.get(key) is not None:
                destination[prefix + key] = destination[prefix + key].contiguous().clone()

    def prepare_load(self, shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
        """Makes room for state that a checkpoint has, and forgets what belongs to the parameters before it.

        Args:
            shapes: of the late buffers in the checkpoint, by their names; this layer may not have run yet, or
                with a history of another length.
        """
        self._cached_weights.clear()
        for scaling in self._scalings.values():
            scaling.was_loaded = True
        for key, shape in shapes.items():
            own = self._buffers.get(key)
            if own is None or own.shape != shape:
                self.register_buffer(key, torch.zeros(shape, dtype=torch.float32, device=device))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have the buffers, and find their own place in an arena."""
        return {**super().__getstate__(), "_scalings": {}, "_cached_weights": {}}


def _equal(one: Recipe, other: Recipe) -> bool:
    """Usually they are one object, and to compare all fields takes longer."""
    return one is other or one == other


_HIGH = Roles(Unquantized(), Unquantized(), Unquantized, SplitAccumulator(), None)


@cache
def _stateless(recipe: Recipe) -> Roles:
    if isinstance(recipe, CurrentScaling):
        forward, backward = (
            Current(dtype, recipe.amax_epsilon, recipe.power_of_two_scales)
            for dtype in (recipe.fp8_format.forward, recipe.fp8_format.backward)
        )
        return Roles(forward, forward, lambda: backward, recipe.split_accumulator, recipe)
    assert isinstance(recipe, BlockScaling)
    vectors = Blockwise("1x128", recipe.power_of_two_scales)
    squares = Blockwise("128x128", recipe.power_of_two_scales)
    return Roles(vectors, squares, lambda: vectors, recipe.split_accumulator, recipe)


def _with_columnwise(operand: Operand, weight: Tensor, quantizer: Quantizer) -> Operand:
    """What the same cast would have made for dgrad."""
    if is_blockwise(operand.rowwise_inv):
        both = quantizer.cast(weight.detach().contiguous(), rowwise=False, columnwise=True).operand
        return operand._replace(columnwise=both.columnwise, columnwise_inv=both.columnwise_inv)
    return with_columnwise(operand)


def _can_overlap(device: torch.device, recipe: Recipe | None) -> bool:
    # Block scaling casts after a gather.
    return overlapped.is_available(device) and not isinstance(recipe, BlockScaling)


def _covers(group: dist.ProcessGroup | None, others: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of `others` are in `group`."""
    if others is None or group is others:
        return True
    if group is None:
        return False
    covered = _covered.setdefault(group, WeakSet())
    if others not in covered:
        if not set(dist.get_process_group_ranks(others)) <= set(dist.get_process_group_ranks(group)):
            return False
        covered.add(others)
    return True


_covered: WeakKeyDictionary[dist.ProcessGroup, WeakSet[dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups whose ranks are known to be in another group; found out once, and not in every forward."""


@cache
def _warn_of_change(before: Recipe, after: Recipe) -> None:
    """Once for all layers."""
    logger.warning(
        "the FP8 recipe changed from %s to %s; delayed scaling goes on with the scales and histories it has",
        before,
        after,
    )


@cache
def require_fp8(device: torch.device, by_block: bool) -> None:
    """
    Args:
        by_block: whether each block has a scale of its own.

    Raises:
        RuntimeError: if a GPU cannot multiply such FP8 numbers; CPUs do it in FP32.
    """
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        raise RuntimeError(
            f"FP8 was asked for on {found}; it needs 8.9 or more, so use autocast(enabled=False)"
        )
    if by_block and major != 9:
        raise RuntimeError(
            f"BlockScaling was asked for on {found}; PyTorch multiplies with a scale for each block on 9.0 "
            "(Hopper) only, so use CurrentScaling or DelayedScaling"
        )


def require_bool_or_none(layer: str, is_first_microbatch: object) -> None:
    """
    Raises:
        TypeError: for other truth values, such as NumPy's, which would count as neither.
    """
    if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
        raise TypeError(
            f"{layer}: is_first_microbatch is {is_first_microbatch!r}; it must be None, True or False"
        )


def activation_dtype(x: Tensor, layer: nn.Module, weight: Tensor) -> torch.dtype:
    """The dtype of a layer's input after torch.autocast, if that is on.

    Raises:
        TypeError: if it is no floating-point dtype for products, or not the weight's without torch.autocast.
    """
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"{type(layer).__name__}: the input is {x.dtype}, the weight {weight.dtype}; outside of "
            "torch.autocast both have to be FP32, fp16 or bf16 alike (params_dtype, or layer.to(dtype))"
        )
    return x.dtype
