"""FlatFSDP: what is stored for each unit, and when it moves in a step."""
