"""Rotary embeddings (`rope.py`), and joining query, key and value into one tensor (`join.py`)."""
