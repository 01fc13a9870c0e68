"""Numerical operations of FlatFSDP, one file per operation; installed as `flatfsdp.kernels`.

Most files contain, in this order: the formula, a plain PyTorch reference, the Triton kernel, the operator
that chooses between the two (`shared/ops.py`), and the function to call.
"""
