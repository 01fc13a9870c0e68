"""Numerical operations of FlatFSDP, one file per operation; installed as `flatfsdp.kernels`.

As a rule a file has the formula, plain PyTorch as the reference, the Triton kernel, the operator that picks
between the two (`shared/ops.py`) and the function to call, in this order.
"""
