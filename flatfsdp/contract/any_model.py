"""Interface to a user's own model: how to build it, its batches, its loss, and the modules that become units.

Next: `parity/` trains it twice and compares, `plan/` predicts its memory and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

BuildModel = Callable[[], nn.Module]
"""Function that builds the unsharded model; PyTorch's generators are seeded before the call."""

Batches = Callable[[int, int], Iterable[Any]]
"""Function (rank, world size) -> batches, one a microbatch; every call must give the same ones."""

Loss = Callable[[nn.Module, Any], Tensor]
"""Function (model, batch) -> loss, 0-dim."""


def loss_of(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    """Returns the loss of a model for a batch: its result, or `.loss` or `["loss"]` of the result.

    Args:
        model: the model to call.
        batch: passed as keyword arguments if a dict, as positional ones if a tuple or list, else as one
            argument.
        options: further keyword arguments of the model.

    Raises:
        ValueError: if the model returns no loss.
    """
    if isinstance(batch, Mapping):
        output = model(**batch, **options)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch, **options)
    else:
        output = model(batch, **options)
    found = getattr(output, "loss", output if isinstance(output, Tensor) and output.dim() == 0 else None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        raise ValueError(
            f"{type(model).__name__} returns {type(output).__name__} without a loss; pass loss=, or labels"
        )
    return found


def layers_of(model: nn.Module) -> Callable[[str, nn.Module, int], bool] | None:
    """Policy for `auto_wrap` and `shard` that picks items of the outermost nn.ModuleList and nn.Sequential.

    Returns:
        The policy, or None if no such items have parameters; the model is then one unit.
    """
    layers: set[str] = set()
    outermost: tuple[str, ...] = ()
    # Outer modules come before inner ones.
    for name, each in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(each, nn.ModuleList | nn.Sequential) and not name.startswith(outermost):
            outermost += (prefix,)
            layers.update(prefix + child for child, item in each.named_children() if list(item.parameters()))
    return (lambda name, module, numel: name in layers and numel > 0) if layers else None
