"""Losses of language models that never make FP32 logits of the whole vocabulary."""
