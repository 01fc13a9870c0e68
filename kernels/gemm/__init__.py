"""GEMMs by cuBLASLt or PyTorch, and weight gradients that are added in place."""
