"""Training loops whose settings determine every number: for commands, examples and benchmarks."""
