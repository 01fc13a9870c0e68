"""`FusedLayer`: a decoder layer of transformers whose halves our kernels compute where they can.

    h   = x + dropout(attention(norm(x)))
    out = h + dropout(mlp(norm(h)))

The order and the functions are those of `flatfsdp.layers.TransformerLayer`.  Without dropout, the second
norm's kernel computes h.  Parts that cannot be fused are called as transformers calls them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.families import PartKind
from flatfsdp.compat.transformers.fused.fused_part import FusedPart, name_of
from flatfsdp.compat.transformers.fused.half import FusedHalf, HalfMaps
from flatfsdp.compat.transformers.fused.small import FusedNorm
from flatfsdp.contract.mixed import About
from flatfsdp.contract.packed import is_packed
from flatfsdp.layers.dropout import bias_dropout_add
from flatfsdp.torch_private import has_global_hooks, never_traced

_OF_LAYERS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"}
_OF_MODELS = {"output_hidden_states", "output_router_logits", "return_dict"}
_OF_HEADS = {"num_items_in_batch", "shift_labels", "ignore_index"}
_OF_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_KNOWN = _OF_LAYERS | _OF_MODELS | _OF_HEADS | _OF_ATTENTION
"""Arguments that do not affect what is fused; all are passed through all layers."""


class FusedLayer(FusedPart, nn.Module):
    """A decoder layer of transformers, computed by our kernels."""

    argument_names: tuple[str, ...]

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        """Class attributes of the mixed class."""
        return {"argument_names": tuple(inspect.signature(plain.forward).parameters)[2:]}

    @never_traced
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the fused halves, or transformers' own forward if the call asks for more."""
        arguments = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        mask = arguments.get("attention_mask")
        if mask is not None and mask.numel() == 0:
            arguments["attention_mask"] = None
        if not self._can_fuse(arguments):
            plain: Tensor = super().forward(hidden_states, **arguments)
            return plain
        branch, residual = self._attend(hidden_states, arguments)
        return self._run_mlp(branch, residual)

    def _can_fuse(self, arguments: dict[str, Any]) -> bool:
        """Whether the fused layer supports everything that this call asks for."""
        if has_global_hooks():
            return False
        if arguments.get("past_key_values") is not None and not torch.is_grad_enabled():
            # Generation, one token per call, would concatenate the weights each time.
            attention: Any = self._modules[self._family.attention_at]
            if not is_packed(attention, "qkv_weight"):
                return False
        return all(
            value is None or name in _KNOWN or (value is False and name.startswith("output_"))
            for name, value in arguments.items()
        )

    def _attend(self, hidden_states: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The input of the second norm: the branch and its residual, or their sum and None."""
        attention, norm, maps = self._half("attention", 0)
        if maps is None:
            return attention(hidden_states=norm(hidden_states), **arguments)[0], hidden_states
        branch, residual = attention.attend(hidden_states, norm, maps, arguments)
        dropped = attention.dropped()
        if dropped == 0:
            return branch, residual
        return bias_dropout_add(branch, None, residual, dropped, True), None

    def _run_mlp(self, branch: Tensor, residual: Tensor | None) -> Tensor:
        mlp, norm, maps = self._half("mlp", 1)
        if maps is None:
            summed = branch if residual is None else residual + branch
            whole: Tensor = summed + mlp(norm(summed))
            return whole
        out, summed = mlp.run(branch, residual, norm, maps)
        return bias_dropout_add(out, None, summed, mlp.dropped(), True)

    def _half(self, part: PartKind, index: int) -> tuple[Any, Any, HalfMaps | None]:
        """A half, the norm before it, and its linear maps; None if transformers has to compute it."""
        family = self._family
        half: Any = self._modules[getattr(family, f"{part}_at")]
        norm: Any = self._modules[family.norms_at[index]]
        is_ours = isinstance(half, FusedHalf) and isinstance(norm, FusedNorm)
        maps = half.maps(norm) if is_ours else "it, or its norm, is of another class than transformers' own"
        if not isinstance(maps, str):
            return half, norm, maps
        # Unless the family or the probe has left it out, which was said before.
        if getattr(family, part) and (family.name, part) not in self._fusion.left_out:
            self._fusion.say(name_of(half), maps)
        return half, norm, None


def no_mask() -> Tensor:
    """A stand-in for None as a mask of a `FusedLayer`; transformers passes on 4-D masks unchanged."""
    return torch.empty(0, 0, 0, 0)
