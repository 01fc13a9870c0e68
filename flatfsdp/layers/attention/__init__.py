"""Attention, from the packed query, key and value projection to the output projection."""
