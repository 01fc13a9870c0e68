"""Rotary embeddings, and heads joined into one tensor."""
