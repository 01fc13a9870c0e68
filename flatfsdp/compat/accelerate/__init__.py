"""Hugging Face Accelerate with FlatFSDP as the engine.

accelerator   `FlatAccelerator`: an Accelerator whose `prepare` shards
options       which options of Accelerator it refuses
optimizers    hands over this rank's parts to optimizers that are older; which belongs to which model
states        the folder that `save_state` writes
"""

from flatfsdp.compat.accelerate.accelerator import FlatAccelerator

__all__ = ["FlatAccelerator"]
