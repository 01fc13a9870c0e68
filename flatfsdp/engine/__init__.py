"""The FlatFSDP engine, from the ground up: a room imports only rooms above it in this list.

storage   what is there: shards, gathered parameters, gradients, and what is true of a group now
step      when it moves: units, the root that drives them, reductions
guards    what would break a sharded model from outside, refused at the call that would do it
whole     a model as a whole: its units, its full parameters, its state dict, its memory
build     how a module becomes a unit: what it takes, and into which groups
replay    recorded microbatches
api       what users call: `shard`, `FlatFSDP`, methods, options, parameter groups
"""
