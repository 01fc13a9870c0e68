"""Hugging Face Accelerate with FlatFSDP as the engine.

accelerator   `FlatAccelerator`: an Accelerator whose `prepare` shards
options       what of Accelerator's options it refuses, and how the model is to be sharded
renamed       an optimizer that was made before its model was sharded gets this rank's parts
apart         whole tensors that Accelerate does not take for one
states        which optimizer belongs to which model, and where `save_state` writes them
"""

from flatfsdp.compat.accelerate.accelerator import FlatAccelerator

__all__ = ["FlatAccelerator"]
