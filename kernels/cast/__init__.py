"""Casts to FP8, scales, transposes and column sums.

cast.py          one matrix by one scale, with its amax, transpose and column sums: activations, gradients
block_cast.py    one matrix by a scale for each block of 1x128 or 128x128
shard_cast.py    many weights' shards in one launch
scaling.py       scales from amaxes, for delayed and current scaling
transpose.py     FP8 weights after their all-gather;  column_sum.py  bias gradients without a cast
"""
