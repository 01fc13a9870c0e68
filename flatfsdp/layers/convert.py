"""Existing models: their nn.Linear, and GPT-2's Conv1D, become layers of ours in place.

In:   a model, before FlatFSDP shards it.
Out:  the same model; what computes in FP8 is then up to `autocast`.

A layer stays the object that it was, with its parameters and hooks, and an instance of its own class: what
adapts nn.Linear, such as PEFT, adapts it before and after.
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
"""Whether to convert a layer, an nn.Linear or Conv1D, by itself and its name in the model."""

Model = TypeVar("Model", bound=nn.Module)

SMALLEST = 1024
"""On an H200, with 8192 tokens, casting costs what FP8 gains at about this width."""


def is_large_enough(layer: nn.Module, name: str) -> bool:
    """The default filter: both sizes suit FP8, and the GEMM is large enough to gain from it."""
    sizes = layer.get_parameter("weight").shape
    return all(size % ALIGNMENT == 0 for size in sizes) and min(sizes) >= SMALLEST


class ConvertedLinear(Mixed, MatmulLayer):
    """What stands in front of nn.Linear, or of Conv1D of transformers, whose weight is [in, out].

    Attributes:
        is_transposed: whether it is a Conv1D.
    """

    is_transposed: ClassVar[bool]
    weight: nn.Parameter
    bias: nn.Parameter | None

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        return {"is_transposed": plain is not nn.Linear}

    @never_traced
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """[..., in_features] to [..., out_features].

        Args and raises: as `Linear.forward`.
        """
        of = MapOf("weight", self.weight, self.bias, self.is_transposed)
        return linear(self, of, prepare(self, inp, of), is_first_microbatch=is_first_microbatch)

    def fp8_weights(self) -> tuple[str, ...]:
        """As of each `MatmulLayer`; FP8 GEMMs read no transposed weight as it is stored."""
        return () if self.is_transposed else super().fp8_weights()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return made_again(self)


def convert(
    model: Model,
    filter: LinearFilter | None = None,
    fp8: bool = True,
    fuse_wgrad_accumulation: FuseWgrad | None = None,
) -> Model:
    """Lets our kernels compute the nn.Linear and Conv1D of `model`, in place.

    The layers stay what they were: the same objects, of the same classes by name, with their parameters,
    hooks and ties.  Which matrices are left as they are, and why, is logged.

    Args:
        filter: called with each nn.Linear or Conv1D and its name; default with fp8: `is_large_enough`, else
            all.
        fp8: False: the layers never compute in FP8, whatever autocast says; for fused weight gradients alone.
        fuse_wgrad_accumulation: see `flatfsdp.layers.Linear`; default: not with fp8, and True without.

    Returns:
        The model.

    Raises:
        ValueError: if no layer is converted, the model is sharded, or a weight is not the layer's parameter,
            but computed by a hook.
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
    """Subclasses compute something else."""
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
    """Raises ValueError if `model` was sharded in place, which makes other classes of its nn.Linear."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "weight" in taken_from(module):
            raise ValueError(_sharded(name))


def _log(model: nn.Module, chosen: Collection[nn.Module], known: Collection[nn.Module]) -> None:
    """Says in one line which matrices are not converted, and why; a warning if no filter could choose them.

    Layers of one name but for their numbers are counted together.
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
                reason = "a table"
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
