"""What users call: `shard`, `auto_wrap`, `FlatFSDP`, methods of sharded modules, parameter groups."""
