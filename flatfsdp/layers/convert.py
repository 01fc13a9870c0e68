"""`convert`: replaces the nn.Linear and GPT-2 Conv1D layers of an existing model with ours, in place.

In:   a model, before FlatFSDP shards it.
Out:  the same model; which layers compute in FP8 then depends on `autocast`.

A converted layer stays the same object, with its parameters and hooks, and an instance of its own class:
tools that adapt nn.Linear, such as PEFT, work before and after.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from flatfsdp.contract.claimed import taken_from
from flatfsdp.contract.mixed import About, Mixed, made_again, mix
from flatfsdp.kernels.gemm.gemm import ALIGNMENT
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import linear, prepare
from flatfsdp.matmul.linear_map import FuseWgrad
from flatfsdp.torch_private import never_traced

logger = logging.getLogger(__name__)

LinearFilter = Callable[[Any, str], bool]
"""Whether to convert a layer (an nn.Linear or Conv1D), given the layer and its name in the model."""

Model = TypeVar("Model", bound=nn.Module)

SMALLEST = 1024
"""Smallest width for which FP8 gains more than the casts cost, on an H200 with 8192 tokens."""


def is_large_enough(layer: nn.Module, name: str) -> bool:
    """The default filter: both sizes suit FP8, and the GEMM is large enough to gain from it."""
    sizes = layer.get_parameter("weight").shape
    return all(size % ALIGNMENT == 0 for size in sizes) and min(sizes) >= SMALLEST


class ConvertedLinear(Mixed, MatmulLayer):
    """Mixed into the class of a converted nn.Linear, or transformers' Conv1D (whose weight is [in, out]).

    Attributes:
        is_transposed: whether the layer is a Conv1D.
    """

    is_transposed: ClassVar[bool]
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        """Class attributes of the mixed class."""
        return {"is_transposed": plain is not nn.Linear}

    @never_traced
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """One linear map: [..., in_features] to [..., out_features].

        Args:
            inp: [..., in_features].
            is_first_microbatch: True casts the FP8 weight and keeps it, False reuses it, None casts every
                time.

        Raises:
            ValueError: if the input's size does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of the weight is kept.
        """
        of = MapOf("weight", self.weight, self.bias, self.is_transposed)
        return linear(prepare(self, inp, of, is_first_microbatch=is_first_microbatch))

    def fp8_weights(self) -> tuple[str, ...]:
        """Names of weights that may be stored in FP8; none for a Conv1D, whose GEMMs read the transpose."""
        return () if self.is_transposed else super().fp8_weights()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made_again(self)


def convert(
    model: Model,
    filter: LinearFilter | None = None,
    fp8: bool = True,
    fuse_wgrad_accumulation: FuseWgrad | None = None,
) -> Model:
    """Makes our kernels compute the nn.Linear and Conv1D layers of `model`, in place.

    The layers stay the same objects, with the same class names, parameters, hooks and ties.  The log lists
    the matrices that were not converted, with the reasons.

    Args:
        model: the model, before it is sharded or wrapped.
        filter: called with each nn.Linear or Conv1D and its name; default: `is_large_enough` with fp8, else
            all layers.
        fp8: False keeps the layers out of FP8, whatever autocast says; use it for fused weight gradients
            alone.
        fuse_wgrad_accumulation: add weight gradients to FP32 `main_grad` buffers in the GEMM; default: False
            with fp8, True without.

    Returns:
        The model.

    Raises:
        ValueError: if no layer is converted, the model is already sharded, or a weight is computed by a hook
            instead of being the layer's parameter.
    """
    fuses = not fp8 if fuse_wgrad_accumulation is None else fuse_wgrad_accumulation
    if filter is None:
        filter = is_large_enough if fp8 else lambda layer, name: True
    found = [(name, module) for name, module in model.named_modules() if _can_be_converted(module)]
    for name, module in found:
        _require_own_weight(name, module)
    chosen = [module for name, module in found if filter(module, name)]
    if not chosen:
        _require_unsharded(model)
        raise ValueError(
            f"convert: none of the {len(found)} nn.Linear and Conv1D of {type(model).__name__} passes the "
            f"filter; the default one asks for sizes of at least {SMALLEST} that are multiples of {ALIGNMENT}"
        )
    _log(model, chosen, {module for _, module in found})
    for module in chosen:
        mix(module, ConvertedLinear)
        assert isinstance(module, ConvertedLinear)
        module._become(fuse_wgrad_accumulation=fuses)
        vars(module)["allows_fp8"] = fp8
    return model


def _can_be_converted(module: nn.Module) -> bool:
    """Whether a layer is exactly an nn.Linear or Conv1D; subclasses compute something else."""
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return kind is nn.Linear or is_conv1d


def _require_own_weight(name: str, module: nn.Module) -> None:
    """Raises ValueError if the weight is sharded, or if it is computed before each forward."""
    if "weight" in taken_from(module):
        raise ValueError(_sharded(name))
    if module._parameters.get("weight") is None:
        hooks = ", ".join(key for key, value in vars(module).items() if key.endswith("_hooks") and value)
        raise ValueError(
            f"convert: {name}.weight is no parameter, but what hooks ({hooks}) compute; leave the layer out "
            "by `filter`, or use torch.nn.utils.parametrizations"
        )


def _sharded(name: str) -> str:
    return f"convert: {name}.weight is sharded already; convert first, then shard or wrap the model"


def _require_unsharded(model: nn.Module) -> None:
    """Raises ValueError if `model` was sharded in place, which changes its layers' classes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "weight" in taken_from(module):
            raise ValueError(_sharded(name))


def _log(model: nn.Module, chosen: Collection[nn.Module], known: Collection[nn.Module]) -> None:
    """Logs in one line which matrices are not converted, and why; a warning if no filter could choose them.

    Layers whose names differ only in numbers are counted together.
    """
    converted = {module.get_parameter("weight") for module in chosen}
    elements: Counter[str] = Counter()
    level = logging.INFO
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 2 or parameter in converted:
                continue
            if module in known:
                reason = "not chosen by the filter"
            elif isinstance(module, nn.Embedding):
                reason = "an embedding table"
            else:
                reason = f"{parameter.dim()}-D, of {type(module).__name__}, which is no nn.Linear"
                level = logging.WARNING
            where = re.sub(r"\b\d+\b", "*", f"{path}.{name}".lstrip("."))
            elements[f"{where} ({reason})"] += parameter.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    logger.log(
        level,
        "converted %d layers; matrices that stay as they are have %s of %s parameters%s",
        len(chosen),
        f"{elements.total():,}",
        f"{total:,}",
        "".join(f"; {what}: {count:,}" for what, count in elements.items()),
    )
