"""Hugging Face Accelerate with FlatFSDP as the engine.

accelerator   `FlatAccelerator`: an Accelerator whose `prepare` shards
options       which options of Accelerator it refuses, and how models are sharded
renamed       an optimizer that was made before its model was sharded gets this rank's parts
apart         separates whole tensors that Accelerate would mistake for tied ones
states        which optimizer belongs to which model, and where `save_state` writes them
"""

from flatfsdp.compat.accelerate.accelerator import FlatAccelerator

__all__ = ["FlatAccelerator"]
