"""Hugging Face transformers at the speed of our own layers: `fuse(model)`, and `unfuse(model)`."""

from flatfsdp.compat.transformers.fuse import fuse, unfuse

__all__ = ["fuse", "unfuse"]
