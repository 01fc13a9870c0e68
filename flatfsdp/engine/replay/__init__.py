"""Microbatches that are recorded as CUDA graphs and replayed, so that the host has nothing to do."""
