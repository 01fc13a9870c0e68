"""FlatFSDP: what is stored for each unit, when it moves in a step, and what others must not do to it."""
