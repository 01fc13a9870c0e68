"""`FusedModel`: a model without its head that finds out without waiting for the GPU that it needs no mask.

In:   the arguments of transformers' forward, with neither mask nor positions.
Out:  transformers' own forward, given `no_mask()` for its layers.
Next: `layer.py` removes that mask again.

Without a mask, transformers searches the positions, even those that it made itself, for several sequences in
one row.  So the host waits in each forward until the GPU has finished all earlier work.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatfsdp.compat.transformers.fused.fused_part import FusedPart
from flatfsdp.compat.transformers.fused.layer import FusedLayer, no_mask
from flatfsdp.contract.mixed import About
from flatfsdp.contract.transparent import unwrapped


class FusedModel(FusedPart, nn.Module):
    """A decoder of transformers: embedding, layers, norm."""

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        """Class attributes of the mixed class."""
        return {"forward": _with_known_mask(plain.forward)}

    def _is_only_causal(self, arguments: Mapping[str, Any]) -> bool:
        """Whether each token attends to all previous tokens of its row, and no cache is used."""
        config: Any = self.config
        given = ("attention_mask", "position_ids", "past_key_values")
        if any(arguments.get(name) is not None for name in given):
            return False
        use_cache = arguments.get("use_cache")
        if config.use_cache if use_cache is None else use_cache:
            return False
        if config._attn_implementation != "sdpa" or not getattr(config, "is_causal", True):
            return False
        window = getattr(config, "sliding_window", None)
        if window is not None and _length(arguments) > window:
            return False
        # Another class of layer would use the stand-in as a real mask.
        layers: Any = self.layers
        return all(isinstance(unwrapped(layer), FusedLayer) for layer in layers)


def _length(arguments: Mapping[str, Any]) -> int:
    """The length of the sequences; 0 if there are none, which transformers refuses."""
    inputs = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return max((each.shape[1] for each in inputs if each is not None), default=0)


def _with_known_mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(plain).parameters)[1:]

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # Compiled code has no values to inspect.
        if not torch.compiler.is_compiling() and self._is_only_causal(arguments):
            arguments["attention_mask"] = no_mask()
            return plain(self, **arguments)
        return plain(self, *args, **kwargs)

    return forward
