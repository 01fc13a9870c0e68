"""The ranks that share a model, what they send each other, and the streams and graphs that it runs in."""
