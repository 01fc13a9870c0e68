"""The ranks that share a model, and what they send each other."""
