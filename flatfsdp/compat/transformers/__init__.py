"""Hugging Face transformers on FlatFSDP.

policy, initialise   which modules become units; initial values of models on the meta device
fused                computation of models by our kernels: `fuse`, `unfuse`
files                safetensors, read and written part by part: `load_hf`, `save_hf`
trainer              `FlatTrainer` instead of `Trainer`; a separate import, because it imports transformers
"""

from flatfsdp.compat.transformers.files.load import load_hf
from flatfsdp.compat.transformers.files.save import save_hf
from flatfsdp.compat.transformers.fused.fuse import fuse, unfuse
from flatfsdp.compat.transformers.initialise import init_weights_of
from flatfsdp.compat.transformers.policy import policy_of

__all__ = ["fuse", "init_weights_of", "load_hf", "policy_of", "save_hf", "unfuse"]
