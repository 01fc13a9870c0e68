"""Makes PyTorch's `torch.distributed.checkpoint.state_dict` work on sharded models.

PyTorch's get_state_dict, set_state_dict and the others would take a rank's shards for whole parameters.  For
sharded models they now return whole ones, or raise an error that names the alternative.

A sharded module replaces PyTorch's functions when these first ask it for names (`UnitModule`): the import
takes a second, and programs that never ask keep PyTorch as it is.
"""
