"""What several kernels use: operators, tiles, tables of addresses, outputs in FP8."""
