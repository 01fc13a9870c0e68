"""Casts to FP8, scales, transposes and column sums."""
