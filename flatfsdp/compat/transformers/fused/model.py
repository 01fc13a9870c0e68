"""`FusedModel`: a model without its head, which does not wait for the GPU to learn that it needs no mask.

In:   the arguments of transformers' forward, and among them no mask and no positions.
Out:  transformers' own forward, given `no_mask()` for its layers.
Next: `layer.py` takes that mask away again.

Without a mask, transformers searches the positions, which it has made itself, for several sequences in one
row, so that in each forward the host waits until the GPU has done everything that it was given before.
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
from flatfsdp.flat.module_wrapper import ModuleWrapper


class FusedModel(FusedPart, nn.Module):
    """A decoder of transformers: embedding, layers, norm."""

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        return {"forward": _with_known_mask(plain.forward)}

    def _is_only_causal(self, arguments: Mapping[str, Any]) -> bool:
        """Whether each token sees all those before it in its row, and nothing is remembered."""
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
        # Another module would take the mask for what it is.
        layers: Any = self.layers
        return all(isinstance(_inside(layer), FusedLayer) for layer in layers)


def _length(arguments: Mapping[str, Any]) -> int:
    """Of the sequences; 0 without any, which transformers refuses."""
    inputs = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return max((each.shape[1] for each in inputs if each is not None), default=0)


def _inside(layer: nn.Module) -> nn.Module:
    return layer.module if isinstance(layer, ModuleWrapper) else layer


def _with_known_mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    names = tuple(inspect.signature(plain).parameters)[1:]

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        # What is compiled has no values to look at.
        if not torch.compiler.is_compiling() and self._is_only_causal(arguments):
            arguments["attention_mask"] = no_mask()
            return plain(self, **arguments)
        return plain(self, *args, **kwargs)

    return forward
