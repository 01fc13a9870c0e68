"""Attention, from the joint query, key and value projection to the output projection."""
