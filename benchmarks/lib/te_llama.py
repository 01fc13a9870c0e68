"""The Llama of `llama.py` with Transformer Engine's layers, in FP8 with delayed scaling.

In:   a `Llama`, whose parameters the new model takes over; the same arguments of forward.
Out:  the same loss, up to rounding.
Next: `engines.py` makes a unit of each layer, and one of the rest.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from lib.fp8_llama import OF_LAYER
from lib.llama import Llama, LlamaConfig, mean_loss

ENGINE = "transformer_engine.pytorch"


class EngineLlama(nn.Module):
    """A `Llama` whose layers are Transformer Engine's; embedding, last norm and head are PyTorch's.

    Args:
        plain: not to be used any more; its parameters are the new model's.
        fuse: whether weight gradients of the layers are added to FP32 `main_grad` in the GEMMs.
    """

    def __init__(self, plain: Llama, *, fuse: bool) -> None:
        super().__init__()
        engine = importlib.import_module(ENGINE)
        recipes = importlib.import_module("transformer_engine.common.recipe")
        config = plain.config
        self.config = config
        # Each rank scales its own activations, as the other engines do.
        self._region = lambda: engine.autocast(
            enabled=True, recipe=recipes.DelayedScaling(amax_history_len=16, reduce_amax=False)
        )
        self._rotary = engine.RotaryPositionEmbedding(config.head_dim, rotary_base=config.rope_theta)
        self.tokens, self.norm, self.head = plain.tokens, plain.norm, plain.head
        self.layers = nn.ModuleList()
        for number, theirs in enumerate(plain.layers, 1):
            layer = _layer(config, number, fuse)
            for name, source in OF_LAYER.items():
                layer.get_parameter(name).data = theirs.get_parameter(source).data
            self.layers.append(layer)

    def forward(self, inputs: Tensor, targets_bt: Tensor | None = None) -> Tensor:
        """Does what `Llama.forward` does."""
        x_btc = inputs if self.tokens is None else self.tokens(inputs)
        rope = self._rotary(x_btc.shape[1]).to(x_btc.device)
        with self._region():
            for layer in self.layers:
                x_btc = layer(x_btc, rotary_pos_emb=rope)
        if self.norm is not None and self.head is not None:
            x_btc = self.head(self.norm(x_btc))
        return mean_loss(self.config, x_btc, targets_bt)


def layer_class() -> type[nn.Module]:
    """The class of the layers, each of which becomes a unit."""
    found: type[nn.Module] = importlib.import_module(ENGINE).TransformerLayer
    return found


def _layer(config: LlamaConfig, number: int, fuse: bool) -> Any:
    return importlib.import_module(ENGINE).TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        num_gqa_groups=config.kv_heads,
        layernorm_epsilon=config.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=number,
        self_attn_mask_type="causal",
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format="bshd",
        params_dtype=torch.float32,
        fuse_qkv_params=True,
        # Queries, keys and values one after the other, as in the plain layer.
        qkv_weight_interleaved=False,
        fuse_wgrad_accumulation=fuse,
        device="cuda",
    )
