"""The Llama of `llama.py` made of FlatFSDP's own layers, with or without FP8 GEMMs.

In:   a `Llama`, whose parameters the new model takes over; the same arguments of forward.
Out:  the same loss, up to rounding.
Next: `engines.py` makes a unit of each `TransformerLayer`, and one of the rest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from flatfsdp.fp8 import Recipe, autocast
from flatfsdp.layers import Embedding, LinearCrossEntropy, RMSNorm, RotaryPositionEmbedding, TransformerLayer
from lib.llama import Llama, LlamaConfig, mean_loss

OF_LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": "norm_attention.weight",
    "self_attention.layernorm_qkv.weight": "attention.qkv.weight",
    "self_attention.proj.weight": "attention.out.weight",
    "layernorm_mlp.layer_norm_weight": "norm_mlp.weight",
    "layernorm_mlp.fc1_weight": "mlp.gate_up.weight",
    "layernorm_mlp.fc2_weight": "mlp.down.weight",
}
"""The plain layer's names of a `TransformerLayer`'s parameters."""


class FusedLlama(nn.Module):
    """A `Llama` whose weight gradients are added to the flat FP32 buffer inside the GEMMs.

    Args:
        plain: do not use it afterwards; its parameters become the new model's.
        recipe: recipe of the layers' FP8 GEMMs; None for bf16.  The head's are in bf16 either way.
        fuses: False leaves the addition of weight gradients to autograd.
    """

    def __init__(self, plain: Llama, recipe: Recipe | None, *, fuses: bool = True) -> None:
        super().__init__()
        config = plain.config
        self.config = config
        self.recipe = recipe
        self.rotary = RotaryPositionEmbedding(config.head_dim, rotary_base=config.rope_theta)
        sizes = config.vocab, config.hidden
        # First, as in the forward: units are reduced in the reverse order of their registration.
        self.tokens: Embedding | None = None
        if config.vocab:
            self.tokens = Embedding(*sizes, fuse_wgrad_accumulation=fuses, device="meta")
        self.layers = nn.ModuleList(_layer(config, fuses) for _ in plain.layers)
        for ours, theirs in zip(self.layers, plain.layers, strict=True):
            _take_over(ours, theirs, OF_LAYER)
        self.norm: RMSNorm | None = None
        self.head: LinearCrossEntropy | None = None
        if config.vocab:
            self.norm = RMSNorm(config.hidden, config.norm_eps, device="meta")
            self.head = LinearCrossEntropy(*sizes[::-1], fuse_wgrad_accumulation=fuses, device="meta")
            _take_over(self, plain, {name: name for name in ("tokens.weight", "norm.weight", "head.weight")})

    def forward(
        self, inputs: Tensor, targets_bt: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """Returns what `Llama.forward` does; True and False let the layers cast FP8 weights once a step."""
        x_btc = inputs if self.tokens is None else self.tokens(inputs)
        rope = self.rotary(x_btc.shape[1], x_btc.device)
        with self._region():
            for layer in self.layers:
                x_btc = layer(x_btc, rotary_pos_emb=rope, is_first_microbatch=is_first_microbatch)
        if self.norm is not None and self.head is not None:
            x_btc = self.norm(x_btc)
            if self.config.loss == "cross-entropy":
                return self.head(x_btc, targets_bt)
            x_btc = self.head(x_btc)
        return mean_loss(self.config, x_btc, targets_bt)

    def _region(self) -> AbstractContextManager[None]:
        return nullcontext() if self.recipe is None else autocast(recipe=self.recipe)


def _layer(config: LlamaConfig, fuses: bool) -> TransformerLayer:
    """Makes a layer on the meta device."""
    return TransformerLayer(
        config.hidden,
        config.ffn,
        config.heads,
        config.kv_heads,
        config.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attn_input_format="bshd",
        fuse_qkv_params=True,
        # Queries, keys and values one after the other, as in the plain layer.
        qkv_weight_interleaved=False,
        fuse_wgrad_accumulation=fuses,
        device="meta",
    )


def _take_over(module: nn.Module, plain: nn.Module, names: dict[str, str]) -> None:
    """Makes `plain`'s parameters those of `module`; `names` maps names here to names there."""
    for ours, theirs in names.items():
        owner, _, attribute = ours.rpartition(".")
        setattr(module.get_submodule(owner), attribute, plain.get_parameter(theirs))
