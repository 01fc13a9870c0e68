"""Storage: the flat buffers of a group, their owners, and when each appears and goes.

    storage        dtype       length  owner        appears                  goes
    master shard   param       1/N     MasterShard  construction             never
    compute shard  stored      1/N     ComputeShard construction             never (none if same dtype)
    FlatBuffer     stored      1       FlatGroup    unshard                  reshard
    the same       FP8         1       FP8Weights   unshard for backward     reshard (FP8 weights, transposed)
    MainGrad       accumulate  1       FlatGroup    first gradient of a step handed to the reducer
    reduced shard  reduce      1/N     Reducer      reduce-scatter           becomes the master's gradient
    partial_grad   accumulate  1/N     FlatGroup    an early reduction       becomes the reduced shard
    block_grad     accumulate  1/N     FlatGroup    a block's first lanes    is added to partial_grad

Parameters are stored in the compute dtype, or in FP8.  With `cpu_offload` the master shard and its gradient
are in CPU memory.
"""
