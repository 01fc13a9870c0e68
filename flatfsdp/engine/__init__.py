"""The FlatFSDP engine: storage of each unit, its movement in a step, and guards against misuse."""
