"""A model that somebody brings: how it is built, what a batch is, where its loss is, which modules are units.

Next: `parity/` trains it twice and compares, `plan/` says what it will take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

BuildModel = Callable[[], nn.Module]
"""Builds the model, which is not sharded; PyTorch's generators are seeded before."""

Batches = Callable[[int, int], Iterable[Any]]
"""(rank, world size) -> batches, one a microbatch: the same ones each time that it is called."""

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> loss, 0-dim."""


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns for a batch: by itself, as `.loss` or as `["loss"]`.

    Args:
        batch: a dict is passed as keyword arguments, a tuple or list as positional ones, all else as one.

    Raises:
        ValueError: if it returns none.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, Tensor) and output.dim() == 0:
        found = output
    if found is None:
        raise ValueError(
            f"{type(model).__name__} returns {type(output).__name__} without a loss; pass loss=, a function "
            "of model and batch, or give it labels"
        )
    return found


def layers_of(model: nn.Module) -> Callable[[str, nn.Module, int], bool] | None:
    """The items of the outermost nn.ModuleList and nn.Sequential, as a policy of `auto_wrap` and `shard`.

    Returns:
        None if there are no such items with parameters: then the model is one unit.
    """
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    outermost = [name for name in lists if not any(_is_below(name, other) for other in lists)]
    layers = {
        _joined(name, child)
        for name in outermost
        for child, module in model.get_submodule(name).named_children()
        if any(True for _ in module.parameters())
    }
    return (lambda name, module, numel: name in layers and numel > 0) if layers else None


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
