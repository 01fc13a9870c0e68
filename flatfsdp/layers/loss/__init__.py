"""Losses of language models, without FP32 logits of the whole vocabulary."""
