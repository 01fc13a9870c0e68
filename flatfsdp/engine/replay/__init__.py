"""Replay: microbatches are recorded as CUDA graphs, which the host launches with one call each."""
