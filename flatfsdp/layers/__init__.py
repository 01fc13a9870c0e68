"""Transformer layers with optional FP8 GEMMs and Transformer Engine's interface."""

from flatfsdp.layers.attention.dot_product import DotProductAttention
from flatfsdp.layers.attention.multihead import MultiheadAttention
from flatfsdp.layers.attention.rotary import RotaryPositionEmbedding
from flatfsdp.layers.convert import convert
from flatfsdp.layers.dropout import bias_dropout_add
from flatfsdp.layers.embedding import Embedding
from flatfsdp.layers.layernorm_mlp import LayerNormMLP
from flatfsdp.layers.linear import LayerNormLinear, Linear
from flatfsdp.layers.loss.cross_entropy import cross_entropy
from flatfsdp.layers.loss.linear_cross_entropy import LinearCrossEntropy
from flatfsdp.layers.norm import LayerNorm, RMSNorm
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
    "convert",
    "cross_entropy",
]
