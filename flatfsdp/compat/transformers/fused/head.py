"""The head and loss of a causal language model: in training, logits are neither kept in FP32 nor returned.

In:   the last hidden states, [batch, seq, hidden], and labels.
Out:  logits, or the mean cross-entropy, or its sum over `num_items_in_batch`.
Next: `layers/loss/linear_cross_entropy.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp.compat.transformers.fused.fused_part import FusedPart, name_of
from flatfsdp.compat.transformers.fused.why_not import changed, no_tensor
from flatfsdp.contract.late_buffers import LATE_BUFFERS
from flatfsdp.contract.mixed import About
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import linear, prepare
from flatfsdp.layers.convert import ConvertedLinear
from flatfsdp.layers.loss.cross_entropy import Reduction
from flatfsdp.layers.loss.linear_cross_entropy import linear_cross_entropy
from flatfsdp.torch_private import never_traced


class FusedHead(FusedPart, MatmulLayer):
    """The nn.Linear that computes logits, in the dtype of the activations; never in FP8."""

    linear_maps = ("weight",)
    allows_fp8 = False
    weight: nn.Parameter

    @never_traced
    def forward(self, input: Tensor, targets: Tensor | None = None, how: Reduction | None = None) -> Tensor:
        """Returns logits without targets, and the FP32 loss with them.

        Args:
            input: [batch, seq, hidden].
            targets: int64 [batch, seq], the id that follows each token.
            how: reduction and ignored index; needed with targets.
        """
        of = MapOf("weight", self.weight, None)
        if targets is not None:
            assert how is not None
            chunk = self._fusion.head_chunk_tokens
            return linear_cross_entropy(prepare(self, input, of), targets, how, chunk)
        if not torch.is_grad_enabled() or no_tensor("it", self):
            logits: Tensor = super().forward(input)
            return logits
        return linear(prepare(self, input, of))


class FusedCausalLM(FusedPart, nn.Module):
    """A causal language model of transformers whose loss is computed together with its head."""

    @classmethod
    def about(cls, plain: type[nn.Module]) -> About:
        """Class attributes of the mixed class."""
        return {"forward": _with_loss(plain.forward)}

    def save_pretrained(self, *args: Any, state_dict: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Saves as transformers does, without FP8 scales, which it would not recognise."""
        state = self.state_dict() if state_dict is None else state_dict
        own = {
            f"{name}.{buffer}"
            for name, module in self.named_modules()
            if isinstance(module, FusedPart)
            for buffer in LATE_BUFFERS.of(module)  # type: ignore[arg-type]
        }
        left = {name: value for name, value in state.items() if name not in own}
        return super().save_pretrained(*args, state_dict=left, **kwargs)  # type: ignore[misc]

    def _joins_loss(self, arguments: dict[str, Any]) -> bool:
        """Whether head and loss of this call are computed together."""
        if arguments.get("labels") is None or not self.training:
            return False
        extras = map(arguments.get, ("label_smoothing", "weight", "output_router_logits"))
        if any(each is not None and each is not False for each in extras):
            return False
        kept = arguments.get("logits_to_keep", 0)
        if not isinstance(kept, int) or kept != 0 or getattr(self.config, "output_router_logits", False):
            return False
        if arguments.get("return_dict", getattr(self.config, "return_dict", True)) is False:
            return False
        reason = self._why_not()
        if reason is not None:
            self._fusion.say(f"the loss of {name_of(self)}", reason)
        return reason is None

    def _why_not(self) -> str | None:
        loss = sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss
        head: Any = self.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, ConvertedLinear):
            return "its head was converted; fuse before you convert, or leave the head out"
        if not isinstance(head, FusedHead):
            kind = f"{type(head).__module__}.{name_of(head)}"
            return f"its head is a {kind} that was not there when it was fused, or has a bias"
        if self.loss_function is not loss:
            return "it has a loss_function of its own"
        return no_tensor("its head", head) or changed("its head", head)


def _with_loss(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces transformers' forward where the loss can be computed without logits."""
    names = tuple(inspect.signature(plain).parameters)[1:]

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, skip_logits: bool = True, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if not (skip_logits and self._joins_loss(arguments)):
            return plain(self, *args, **kwargs)
        return _forward(self, arguments)

    return forward


def _forward(model: Any, arguments: dict[str, Any]) -> Any:
    own = {name: arguments.pop(name, None) for name in ("labels", "logits_to_keep", "return_dict")}
    if arguments.get("use_cache") is None and arguments.get("position_ids") is None:
        # Training does not decode, so a cache is useless.  With explicit positions, transformers separates
        # packed sequences only without a cache.
        arguments["use_cache"] = False
    outputs = getattr(model, model._family.base)(**arguments)
    ignored = arguments.get("ignore_index", -100)
    targets = arguments.get("shift_labels")
    if targets is None:
        targets = F.pad(own["labels"], (0, 1), value=ignored)[..., 1:]
    hidden_states = outputs.last_hidden_state
    count = arguments.get("num_items_in_batch")
    how = Reduction(ignored, "mean" if count is None else "sum")
    targets = targets.to(hidden_states.device).reshape(hidden_states.shape[:-1])
    loss = model.get_output_embeddings()(hidden_states, targets, how)
    if count is not None:
        loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
    kind = getattr(sys.modules["transformers.modeling_outputs"], model._family.output)
    return kind(
        loss=loss,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
