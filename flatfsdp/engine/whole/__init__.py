"""A model as a whole: its units by name, its full parameters, its state dict and its memory."""
