"""When it moves: gathers, reductions, and the end of a backward."""
