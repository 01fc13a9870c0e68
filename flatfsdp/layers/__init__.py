"""Transformer layers whose products may be in FP8, with Transformer Engine's interface."""

from flatfsdp.layers.layernorm_linear import LayerNormLinear
from flatfsdp.layers.layernorm_mlp import LayerNormMLP
from flatfsdp.layers.linear import Linear

__all__ = ["LayerNormLinear", "LayerNormMLP", "Linear"]
