"""Gradients added to FP32 buffers.

`accumulate.py` does it for one gradient in plain PyTorch, `accumulate_many.py` for the small ones of many
parameters in one launch, and `embedding.py` for the rows of an embedding that occur in a microbatch.
"""
