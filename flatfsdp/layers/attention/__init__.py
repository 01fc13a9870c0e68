"""Attention, from the joint projection of query, key and value to the projection back."""
