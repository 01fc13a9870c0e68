"""Transformer Engine's layers in a model that FlatFSDP shards.

They need nothing to compute: see `docs/transformer_engine.md`.  Here is what their owner may ask of them.
"""

from __future__ import annotations

from torch import nn


def requantize_in_backward(model: nn.Module) -> None:
    """Lets Transformer Engine's layers quantize gathered weights again in the backward, not keep them.

    Between its forward and its backward a layer keeps each weight in FP8 with its transpose, 2 bytes an
    element, so that all of the model's are there at once, even where FlatFSDP frees what it has gathered.
    FSDP2 has Transformer Engine do without, and so does this: less memory for one more cast a microbatch.

    Losses and gradients stay the same bits with current and block scaling.  With delayed scaling they do not:
    by the backward the scale may be the next one.  `is_first_microbatch` has no effect any more.

    Args:
        model: before or after it is sharded, before its first forward.

    Raises:
        ValueError: if no layer in it is Transformer Engine's.
    """
    layers = [module for module in model.modules() if hasattr(type(module), "is_fsdp2")]
    if not layers:
        raise ValueError(
            f"no module of this {type(model).__name__} is a layer of Transformer Engine that can do so; this "
            "was tested with version 2.20"
        )
    for layer in layers:
        # What the property `is_fsdp2` has found out, where it has been asked.
        vars(layer)["_is_fsdp2"] = True
