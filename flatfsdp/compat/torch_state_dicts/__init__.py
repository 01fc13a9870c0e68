"""PyTorch's `torch.distributed.checkpoint.state_dict`: get_state_dict, set_state_dict and the others.

They take a rank's shards for whole parameters.  Given a sharded model they give whole ones, or an error with
the way out.

connect         what PyTorch calls before it reads the model: once that has happened, `functions` are in use
functions       in the place of PyTorch's; imported then, because that takes a second
"""
