"""`MatmulLayer`, the base of layers with linear maps: it prepares the operands of each GEMM in a call.

In:   a layer's forward, with or without an `autocast` around it.
Out:  for each linear map the quantizers (`fp8/casts.py`), the weight (`weight_cache.py`) and a `LinearCall`.
Next: `calls.py` calls `nodes/` with these; `matmul/linear_map.py` casts and multiplies.

A layer's state is in its buffers fp8_forward_scale, fp8_forward_amax_history and the same two for backward.
They appear when it first runs with delayed scaling, or when a checkpoint that has them is loaded
(`fp8/state_dict.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.main_grad import CLAIM_MAIN_GRAD
from flatfsdp.contract.operand import FP8_OPERAND, Operand
from flatfsdp.contract.recipe import BlockScaling, DelayedScaling, Recipe
from flatfsdp.fp8.casts import WITHOUT_FP8, Casts, delayed_casts, stateless_casts
from flatfsdp.fp8.delayed_scaling import Direction, Scaling, buffer_names
from flatfsdp.fp8.overflows import Countable, counted
from flatfsdp.fp8.quantizers import dequantized
from flatfsdp.fp8.recompute import Use, current_tape, raise_recomputed, records_amax
from flatfsdp.fp8.region import Region, current_region
from flatfsdp.fp8.state_dict import LateBuffers
from flatfsdp.fp8.step_scales import note
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.checks import require_bool_or_none, require_fp8, require_shared_scales, require_turnable
from flatfsdp.layers.layer_options import MatmulOptions, parallel_of
from flatfsdp.layers.shared import Declaring
from flatfsdp.layers.weight_cache import WeightCache, turned
from flatfsdp.matmul import overlapped
from flatfsdp.matmul.exchange import UNSPLIT, Exchange
from flatfsdp.matmul.linear_map import DelayedWgrads, LinearCall, checked_fuse_wgrad
from flatfsdp.torch_private import in_backward

logger = logging.getLogger(__name__)


class MapOf(NamedTuple):
    """One linear map in a call.

    Attributes:
        name: its entry in the owner's `linear_maps`.
        weight: [out_features, in_features], or [in_features, out_features] if `transposed`.
        bias: [out_features], if the GEMM adds one.
        transposed: whether the weight is stored as in GPT-2's Conv1D.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    transposed: bool = False


class MatmulLayer(LateBuffers, Countable, Declaring):
    """A layer with one or more linear maps.

    Args:
        options: options of every layer with linear maps, listed in `MatmulOptions`.

    Attributes:
        linear_maps: names of the layer's weights, in forward order.
        exchanges: the tensor-parallel communication of each linear map, by the weight's name.
        allows_fp8: False keeps all GEMMs out of FP8, whatever autocast says.
    """

    late_buffers: ClassVar[tuple[str, ...]] = (*buffer_names("forward"), *buffer_names("backward"))
    linear_maps: ClassVar[tuple[str, ...]] = ("weight",)
    allows_fp8 = True

    def __init__(self, **options: Unpack[MatmulOptions]) -> None:
        super().__init__()
        self._become(**options)

    def _become(self, **options: Unpack[MatmulOptions]) -> None:
        """Initialises everything that a `MatmulLayer` has besides its parameters.

        Also called on its own, for a module of another class that was converted in place.
        """
        name = type(self).__name__
        self._parallel = parallel_of(name, MatmulOptions, options)
        self.fuse_wgrad_accumulation = checked_fuse_wgrad(options.get("fuse_wgrad_accumulation", False), name)
        self._params_dtype, self._params_device = options.get("params_dtype"), options.get("device")
        self.exchanges: dict[str, Exchange] = {}
        self._scalings: dict[Direction, Scaling] = {}
        self._weight_cache = WeightCache(name)
        self._delayed_wgrads = DelayedWgrads() if options.get("delay_wgrad_compute") else None
        self._last_recipe: Recipe | None = None
        self._ran_in_fp8 = False

    def _resign(self) -> None:
        """Removes what `_become` and later calls have added, including scales and their histories."""
        added = vars(MatmulLayer()).keys() - vars(nn.Module()).keys()
        for name in (*added, "allows_fp8", "overflow_counters"):
            vars(self).pop(name, None)
        for name in self.late_buffers:
            self._buffers.pop(name, None)

    # ---- how to cast ------------------------------------------------------------------------------------

    def casts(self, device: torch.device) -> list[Casts]:
        """The casts of this call, one entry for each linear map.

        Raises:
            RuntimeError: if FP8 is requested on a device without it.
        """
        if not self.allows_fp8:
            return [WITHOUT_FP8] * len(self.linear_maps)
        # An evaluation has no backward, and looking for checkpoints costs host time.
        is_evaluation = not (self.training or torch.is_grad_enabled())
        # Before it is known whether FP8 is on: a recomputation finds its use by position, so each forward
        # counts.
        tape = None if is_evaluation else current_tape()
        use = None if tape is None else tape.next_use(self)
        region = current_region()
        if region is not None:
            # Otherwise autocast warns at its end that nothing in it can compute in FP8.
            region.outermost.has_layers = True
        if use is not None:
            region = use.region
        # A forward during a backward repeats an earlier one.  If no tape knows that one, its region and its
        # scales cannot be found any more.
        is_unknown = use is None and in_backward()
        if region is None or not (region.enabled or region.calibrating):
            if is_unknown and region is None and self._ran_in_fp8:
                raise_recomputed()
            if self._ran_in_fp8:  # nn.Module.__setattr__ is slow
                self._ran_in_fp8 = False
            return [WITHOUT_FP8] * len(self.linear_maps)
        if self._ran_in_fp8 is not region.enabled:
            self._ran_in_fp8 = region.enabled
        if region.enabled:
            require_fp8(device, isinstance(region.recipe, BlockScaling))
            self._notice_change(region.recipe)
        if isinstance(region.recipe, DelayedScaling):
            if is_unknown:
                raise_recomputed()
            return self._delayed(region, region.recipe, device, use, records=records_amax(tape))
        if not region.enabled:
            return [WITHOUT_FP8] * len(self.linear_maps)
        casts = [stateless_casts(region.recipe)] * len(self.linear_maps)
        return counted(self, casts) if self.overflow_counters else casts

    def _delayed(
        self,
        region: Region,
        recipe: DelayedScaling,
        device: torch.device,
        use: Use | None,
        *,
        records: bool,
    ) -> list[Casts]:
        require_shared_scales(self, self.exchanges, recipe, region.group)
        forward = self._scaling("forward", recipe, device, renew=records)
        backward = self._scaling("backward", recipe, device, renew=records)
        if records:
            # First, as it tells whether the region or the step updates them.
            note((forward, backward))
            region.use(forward)
            forward.was_loaded = backward.was_loaded = False
        return delayed_casts(region, recipe, forward, backward, records=records, use=use)

    def _scaling(
        self, direction: Direction, recipe: DelayedScaling, device: torch.device, *, renew: bool
    ) -> Scaling:
        """This layer's scales of one direction, created or renewed if they are missing or stale.

        Args:
            direction: forward or backward.
            recipe: of this call.
            device: of this call.
            renew: whether a changed recipe renews them.  A forward that records nothing must not: on one rank
                alone it would change which collectives that rank joins.
        """
        before = self._scalings.get(direction)
        is_same = not renew or (before is not None and _equal(before.recipe, recipe))
        if before is not None and is_same and before.device == device and before.is_current:
            return before
        forward, backward = recipe.fp8_format.forward, recipe.fp8_format.backward
        dtypes = [forward] * 2 if direction == "forward" else [backward]
        scaling = Scaling(self, direction, dtypes * len(self.linear_maps), recipe, device)
        scaling.arena.observe(self.overflow_counters)
        is_other = before is not None and before.scale_means != scaling.scale_means
        # A checkpoint's scales come from the recipe of the run that saved it, not from that of `before`.
        if before is not None and is_other and not before.was_loaded:
            scaling.arena.rescale(recipe)
        if before is not None and not before.was_loaded:
            scaling.has_scales = before.has_scales
        self._scalings[direction] = scaling
        return scaling

    def _notice_change(self, recipe: Recipe) -> None:
        if self._last_recipe is None or not _equal(self._last_recipe, recipe):
            if self._last_recipe is not None:
                _warn_of_change(self._last_recipe, recipe)
            self._last_recipe = recipe

    def prepare_map(
        self,
        of: MapOf,
        casts: Casts,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        sources: Iterable[Tensor | None],
    ) -> tuple[Operand, LinearCall]:
        """Prepares the operand and the call of the linear primitive for one linear map.

        Args:
            of: the linear map.
            casts: how its operands are cast.
            dtype: dtype of the activations.
            is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every
                time.
            sources: tensors that the map's input is computed from; None entries are skipped.

        Raises:
            RuntimeError: if no usable cast of the weight is kept, or its stored FP8 form does not fit the
                recipe.
            ValueError: if FP8 GEMMs cannot read a transposed weight.
            TypeError: if is_first_microbatch is not None, True or False.
        """
        name, weight, bias, transposed = of
        require_bool_or_none(type(self).__name__, is_first_microbatch)
        trains = torch.is_grad_enabled()
        needs_input_grad = trains and _requires_grad(sources)
        stored = FP8_OPERAND.of(weight)
        if transposed:
            require_turnable(self, name, casts.recipe, stored is not None)
        if stored is not None and casts.recipe is None:
            # Widened again in backward: the memory may have been freed and gathered anew by then.
            stored = partial(_widened, stored, dtype)
        operand = self._weight_cache.operand(
            name,
            weight,
            casts,
            is_first_microbatch,
            dtype,
            stored=stored,
            # `turned` makes the columnwise form the one that the forward reads.
            columnwise=needs_input_grad or transposed,
        )
        if transposed:
            operand = turned(operand)
        exchange = self.exchanges.get(name, UNSPLIT)
        fuses = self.fuse_wgrad_accumulation
        if fuses == "if_claimed":
            fuses = CLAIM_MAIN_GRAD.of(weight) is not None
        call = LinearCall(
            name=self._name_of(name),
            weight=weight if fuses or self._delayed_wgrads is not None else None,
            weight_dtype=weight.dtype,
            dtype=dtype,
            split=casts.split,
            exchange=exchange,
            quantizer=casts.x,
            grad_quantizer=casts.grad,
            fuse_wgrad=fuses,
            is_first_microbatch=is_first_microbatch,
            stored_weight=stored,
            needs_input_grad=needs_input_grad,
            needs_weight_grad=trains and weight.requires_grad,
            bias_grad=bias.dtype if trains and bias is not None and bias.requires_grad else None,
            delayed=self._delayed_wgrads,
            transposed=transposed,
            # Block scaling casts after the all-gather.
            overlaps=exchange.overlap
            and overlapped.is_available(weight.device)
            and not isinstance(casts.recipe, BlockScaling),
        )
        return operand, call

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward deferred (`delay_wgrad_compute`).

        Raises:
            RuntimeError: if no backward has deferred any.
        """
        if self._delayed_wgrads is None:
            return
        for name in reversed(self.linear_maps):
            weight = self.get_parameter(name)
            if weight.requires_grad:
                self._delayed_wgrads.compute_oldest(self._name_of(name), weight)

    def _name_of(self, weight: str) -> str:
        """The weight's name in messages."""
        return f"{type(self).__name__}.{weight}"

    def fp8_weights(self) -> tuple[str, ...]:
        """Names of weights that only FP8 GEMMs read, so that they may be stored in FP8.

        A name stands for a parameter or for a pack of several (`contract/packed.py`).
        """
        return tuple(name for name in self.linear_maps if self.allows_fp8 and _suit_fp8(self._parts_of(name)))

    def _parts_of(self, name: str) -> Sequence[Tensor | None]:
        """The parameters that form a linear map's weight."""
        return [getattr(self, name, None)]

    # ---- module protocol --------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MatmulLayer:
        """Applies `fn` as `LateBuffers` does, and drops the casts of the previous parameters."""
        super()._apply(fn, recurse)
        self._weight_cache.kept.clear()
        return self

    def prepare_load(self, shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
        """Prepares for loading as `LateBuffers` does, and drops what belongs to the previous parameters."""
        self._weight_cache.kept.clear()
        for scaling in self._scalings.values():
            scaling.was_loaded = True
            scaling.reread()
        super().prepare_load(shapes, device)

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles: they keep the buffers and get their own place in an arena."""
        fresh = {
            "_scalings": {},
            "overflow_counters": (),
            "_weight_cache": WeightCache(type(self).__name__),
            "_delayed_wgrads": None if self._delayed_wgrads is None else DelayedWgrads(),
        }
        return {**super().__getstate__(), **fresh}


def _suit_fp8(weights: Iterable[Tensor | None]) -> bool:
    return all(w is not None and all(size > 0 and size % ALIGNMENT == 0 for size in w.shape) for w in weights)


def _widened(stored: Callable[[], Operand], dtype: torch.dtype) -> Operand:
    """Widens a weight that is stored in FP8, for GEMMs that are not in FP8."""
    return dequantized(stored(), dtype)


def _requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any tensor requires a gradient.  A generator inside any() takes three times as long."""
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _equal(one: Recipe, other: Recipe) -> bool:
    """Compares recipes; usually both are one object, and comparing all fields takes longer."""
    return one is other or one == other


@cache
def _warn_of_change(before: Recipe, after: Recipe) -> None:
    """Warns of a changed recipe, once for all layers."""
    logger.warning(
        "the FP8 recipe changed from %s to %s; delayed scaling goes on with the scales and histories it has",
        before,
        after,
    )
