"""Optimizer steps over many runs of parameters in one launch."""
