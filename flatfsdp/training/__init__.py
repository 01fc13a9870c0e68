"""Training loops whose every number is decided by their settings: for commands, examples and benchmarks."""
