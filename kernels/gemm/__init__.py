"""GEMMs by cuBLASLt or PyTorch; no file here has a kernel of its own.

`gemm.py` is for the forward and the input's gradient in FP8, `block_gemm.py` the same and the weight's with
a scale for each block, `wgrad.py` the weight's gradient, added in place.  `cublas_lt.py` calls cuBLASLt for
`gemm.py` and `wgrad.py`, with tiles by `tiles.py`.
"""
