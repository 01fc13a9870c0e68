"""Rotary embeddings (`rope.py`), and query, key and value joined into one tensor (`join.py`)."""
