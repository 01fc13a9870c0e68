"""A layer's FP8 state in checkpoints: scales and histories, created on first use or on load.

In:   a state dict that contains them, or one from before FP8, or one of Transformer Engine's layers.
Out:  late buffers, which stay in FP32 when the layer is cast.
Next: `delayed_scaling.py` reads and updates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class WithoutExtraState(nn.Module):
    """Ignores the pickled FP8 state of layers and norms in Transformer Engine's checkpoints."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        # PyTorch passes ..., missing_keys, unexpected_keys, error_msgs by position.
        unexpected_keys: list[str] = args[-2]
        if prefix + "_extra_state" in unexpected_keys:
            unexpected_keys.remove(prefix + "_extra_state")


class LateBuffers(WithoutExtraState):
    """A layer with buffers that appear on first use.

    Attributes:
        late_buffers: their names; they stay in FP32, and loading a checkpoint creates them.
    """

    late_buffers: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LateBuffers:
        """Moves the state as well, but keeps scales in FP32 when the module is cast."""
        # Taken out, because `super()` would cast them with the rest: in bf16, scales and amaxes would lose
        # digits.
        state = {key: self._buffers.pop(key) for key in self.late_buffers if key in self._buffers}
        super()._apply(fn, recurse)
        for key, tensor in state.items():
            assert tensor is not None
            moved = fn(tensor)
            self.register_buffer(key, moved if moved.dtype == tensor.dtype else tensor.to(moved.device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = {key: state_dict[prefix + key] for key in self.late_buffers if prefix + key in state_dict}
        there = (tensor for tensor in (*self._buffers.values(), *saved.values()) if tensor is not None)
        device = next((tensor.device for tensor in there), None)
        # Before `super()`, which calls a tensor without a buffer unexpected.
        self.prepare_load({key: tensor.shape for key, tensor in saved.items()}, device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing_keys: list[str] = args[-3]
        # A checkpoint may predate FP8.
        for key in self.late_buffers:
            if prefix + key in missing_keys:
                missing_keys.remove(prefix + key)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # A copy, so that saving it does not save the whole model's arena.
        for key in self.late_buffers:
            if self._buffers.get(key) is not None:
                destination[prefix + key] = destination[prefix + key].contiguous().clone()

    def prepare_load(self, shapes: Mapping[str, torch.Size], device: torch.device | None) -> None:
        """Creates the buffers that a checkpoint contains.

        Args:
            shapes: shapes of the late buffers in the checkpoint, by their names.  This layer may not have run
                yet, or with a history of another length.
            device: device of new buffers.
        """
        for key, shape in shapes.items():
            own = self._buffers.get(key)
            if own is None or own.shape != shape:
                self.register_buffer(key, torch.zeros(shape, dtype=torch.float32, device=device))
