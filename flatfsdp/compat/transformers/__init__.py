"""Hugging Face transformers: at the speed of our own layers, and its files for models that are sharded."""

from flatfsdp.compat.transformers.fuse import fuse, unfuse
from flatfsdp.compat.transformers.initialise import init_weights_of
from flatfsdp.compat.transformers.policy import policy_of

__all__ = ["fuse", "init_weights_of", "policy_of", "unfuse"]
