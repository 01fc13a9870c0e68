"""Hugging Face transformers: at the speed of our own layers, and its files for models that are sharded."""

from flatfsdp.compat.transformers.files.load import load_hf
from flatfsdp.compat.transformers.files.save import save_hf
from flatfsdp.compat.transformers.fuse import fuse, unfuse
from flatfsdp.compat.transformers.initialise import init_weights_of
from flatfsdp.compat.transformers.policy import policy_of

__all__ = ["fuse", "init_weights_of", "load_hf", "policy_of", "save_hf", "unfuse"]
