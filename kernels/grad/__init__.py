"""Gradients added to FP32 buffers.

`accumulate.py` handles one gradient in plain PyTorch, `accumulate_many.py` the small ones of many parameters
in one launch, `add_rows.py` one gradient of several ranks, and `embedding.py` the rows of an embedding that
occur in a microbatch.
"""
