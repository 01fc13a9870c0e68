"""LayerNorm and RMSNorm, forward and backward, with casts to FP8 inside.

`forward.py` has the formulas and picks one of three kernels: `rows.py` as a rule, `transposed.py` for many
rows in FP8 by columns, too, and `wide.py` for more than 16384 columns; `tensors.py` is what these share.
"""
