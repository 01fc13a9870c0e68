"""LayerNorm and RMSNorm, forward and backward, with casts to FP8 inside.

`forward.py` has the formulas and chooses one of three kernels: usually `rows.py`, `transposed.py` for many
rows that are also transposed in FP8, and `wide.py` for more than 16384 columns; they share `tensors.py`.
"""
