"""Makes PyTorch's `torch.distributed.checkpoint.state_dict` work on sharded models.

PyTorch's get_state_dict, set_state_dict and the others would take a rank's shards for whole parameters.  For
sharded models they now return whole ones, or raise an error that names the alternative.

The first unit that is built replaces PyTorch's functions (`engine/build/build_unit.py`); programs without one
keep them.
"""
