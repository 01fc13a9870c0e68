"""`WeightCache`: a weight's GEMM operand, from the flat buffer, cast now, or kept by the first microbatch.

In:   a weight, and how it is cast in this call (`fp8/casts.py`).
Out:  its `Operand`.
Next: `matmul/linear_map.py` multiplies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatfsdp.contract.operand import Operand
from flatfsdp.contract.recipe import BlockScaling, Recipe
from flatfsdp.fp8.casts import Casts
from flatfsdp.fp8.quantizers import Quantizer, with_columnwise
from flatfsdp.fp8.recompute import current_tape
from flatfsdp.matmul.gemms import is_blockwise


class WeightCache:
    """The FP8 weights of one layer, cast by the first microbatch of a step.

    Args:
        layer: name of the layer, for messages.

    Attributes:
        kept: recipe and operand of each cast, by the weight's name.
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self.kept: dict[str, tuple[Recipe, Operand]] = {}

    def operand(
        self,
        name: str,
        weight: Tensor,
        casts: Casts,
        is_first_microbatch: bool | None,
        dtype: torch.dtype,
        *,
        stored: Callable[[], Operand] | None,
        columnwise: bool,
    ) -> Operand:
        """The weight as a GEMM operand: stored in FP8 by FlatFSDP, cast now, or kept by the first microbatch.

        Args:
            name: name of the weight.
            weight: the parameter.
            casts: how this call casts.
            is_first_microbatch: None: cast now, keep nothing; True: cast and keep; False: reuse what is kept.
            dtype: dtype of the GEMMs without FP8.
            stored: the weight's `FP8_OPERAND`; without FP8 GEMMs, a function that widens it to `dtype`.
            columnwise: whether dgrad needs it.

        Raises:
            RuntimeError: if nothing is kept, or it was cast with another recipe; if the weight is stored in
                FP8 with one scale and the recipe uses a scale for each block.
        """
        if stored is not None:
            if isinstance(casts.recipe, BlockScaling):
                raise RuntimeError(
                    f"{self._layer}.{name} is kept in FP8 with one scale (Precision(fp8_weights=...)): for "
                    "BlockScaling keep weights in 16 bits (fp8_weights=None), or use another recipe"
                )
            return stored()
        if casts.recipe is None:
            return casts.weight.cast(weight.detach().to(dtype), rowwise=True, columnwise=columnwise).operand
        is_kept = is_first_microbatch is False or (is_first_microbatch is True and _is_replay())
        if not is_kept:
            source = weight.detach().contiguous()
            operand = casts.weight.cast(source, rowwise=True, columnwise=columnwise).operand
        else:
            operand = self.find(name, casts.recipe)
            if columnwise and operand.columnwise is None:
                # A forward without gradients kept no columnwise form.
                operand = _with_columnwise(operand, weight, casts.weight)
        if is_first_microbatch is not None:
            self.kept[name] = (casts.recipe, operand)
        return operand

    def find(self, name: str, recipe: Recipe) -> Operand:
        """The operand that the first microbatch has kept.

        Raises:
            RuntimeError: if none is kept, or it was cast with another recipe.
        """
        kept_recipe, operand = self.kept.get(name, (None, None))
        if operand is None:
            raise RuntimeError(
                f"{self._layer}: is_first_microbatch=False, but {name} was not cast yet; call the layer with "
                "is_first_microbatch=True in the first microbatch of each step"
            )
        if kept_recipe != recipe:
            raise RuntimeError(
                f"{self._layer}: {name} has the cast of another recipe; begin with is_first_microbatch=True"
            )
        return operand


def _is_replay() -> bool:
    tape = current_tape()
    return tape is not None and tape.is_replay


def turned(operand: Operand) -> Operand:
    """The operand of the transposed weight, from that of a weight [in_features, out_features]."""
    high, rowwise, columnwise, rowwise_inv, columnwise_inv = operand
    return Operand(None if high is None else high.t(), columnwise, rowwise, columnwise_inv, rowwise_inv)


def _with_columnwise(operand: Operand, weight: Tensor, quantizer: Quantizer) -> Operand:
    """Adds the columnwise form that the same cast would have made for dgrad."""
    if is_blockwise(operand.rowwise_inv):
        both = quantizer.cast(weight.detach().contiguous(), rowwise=False, columnwise=True).operand
        return operand._replace(columnwise=both.columnwise, columnwise_inv=both.columnwise_inv)
    return with_columnwise(operand)
