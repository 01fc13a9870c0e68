"""LayerNorm and RMSNorm, forward and backward, with casts to FP8 inside."""
