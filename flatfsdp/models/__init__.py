"""Models made of FlatFSDP's own layers, whole or as one stage of a pipeline."""

from flatfsdp.models.config import PRESETS, LlamaConfig, flops_per_token, stage_layers
from flatfsdp.models.llama import Llama
from flatfsdp.models.pipeline import LlamaPipeline

__all__ = ["PRESETS", "Llama", "LlamaConfig", "LlamaPipeline", "flops_per_token", "stage_layers"]
