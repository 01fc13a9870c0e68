"""Operations of a Hugging Face language model, counted from its weights and its configuration.

In:   a model that is not sharded yet.
Out:  operations of a forward and backward of a batch.
Next: `trainer.py` counts them for MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flatfsdp.contract.claimed import is_unit


@dataclass(frozen=True)
class FlopsOfTokens:
    """Operations of forward and backward, as `flatfsdp.models.flops_per_token` counts them.

    They are 6 per token and weight of a GEMM, 4 if the weight is frozen, and those of causal attention.
    Recomputation, embeddings and norms do not count.

    Attributes:
        of_weights: operations per token in GEMMs with weights.
        of_attention: operations per token and token of a sequence.
    """

    of_weights: int
    of_attention: int

    @staticmethod
    def of(model: Any) -> FlopsOfTokens | None:
        """Counts a model's; None if they are not those of all its weights.

        That is for a model that is sharded already, experts, convolutions, an encoder beside a decoder, and a
        configuration that does not say how wide attention is.
        """
        config = getattr(model, "config", None)
        layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
        width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
        if is_unit(model) or not (layers and heads and width) or getattr(config, "is_encoder_decoder", False):
            return None
        if any(name.endswith("experts") and value for name, value in vars(config).items()):
            return None
        of_weights = 0
        for module in model.modules():
            # Once a module, as a head multiplies with what an embedding only looks up.
            for weight in () if isinstance(module, nn.Embedding) else module._parameters.values():
                if weight is not None and weight.dim() > 2:
                    return None
                if weight is not None and weight.dim() == 2:
                    of_weights += (6 if weight.requires_grad else 4) * weight.numel()
        return FlopsOfTokens(of_weights, 6 * layers * heads * width)

    def __call__(self, tokens: Tensor) -> float:
        """Operations of a batch [b, t]."""
        return float(tokens.numel() * (self.of_weights + self.of_attention * tokens.shape[-1]))
