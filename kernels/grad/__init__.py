"""Gradients added to FP32 buffers."""
