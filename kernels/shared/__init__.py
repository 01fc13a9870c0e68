"""Helpers of several kernels.  Read the first two first, and the others when a kernel imports them.

triton.py    Triton, prepared launches, dtypes
ops.py       kernels as PyTorch operators
outputs.py   results in the activations' dtype and in FP8, amaxes, sums over rows; checks of arguments
pairs.py     tiles as pairs of rows, for kernels that also write an FP8 transpose
tables.py    lists of tensors of any length as one table on the device
tiles.py     the measured tile of each kernel
"""
