"""GEMMs by cuBLASLt or PyTorch; no file here has a kernel of its own.

`gemm.py` computes the forward and the input's gradient in FP8; `block_gemm.py` these and the weight's
gradient with one scale per block; `wgrad.py` the weight's gradient, accumulated in place.  `cublas_lt.py`
calls cuBLASLt for `gemm.py` and `wgrad.py`, with tiles from `tiles.py`.
"""
