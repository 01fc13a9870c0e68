"""Transformer layers whose products may be in FP8, with Transformer Engine's interface."""

from flatfsdp.layers.attention import DotProductAttention
from flatfsdp.layers.cross_entropy import cross_entropy
from flatfsdp.layers.dropout import bias_dropout_add
from flatfsdp.layers.embedding import Embedding
from flatfsdp.layers.layernorm_linear import LayerNormLinear
from flatfsdp.layers.layernorm_mlp import LayerNormMLP
from flatfsdp.layers.linear import Linear
from flatfsdp.layers.linear_cross_entropy import LinearCrossEntropy
from flatfsdp.layers.multihead_attention import MultiheadAttention
from flatfsdp.layers.norm import LayerNorm, RMSNorm
from flatfsdp.layers.rotary import RotaryPositionEmbedding
from flatfsdp.layers.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Embedding",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearCrossEntropy",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "bias_dropout_add",
    "cross_entropy",
]
