"""State that modules keep beside parameters and buffers (`get_extra_state`), as tensors and JSON.

packed.py               values as tensors and JSON, and back
transformer_engine.py   Transformer Engine's modules, which pickle theirs
modules.py              all modules of a model, for `saving.py` and `loading.py`

A checkpoint holds only data that can be read without executing anything.  So the process that saves unpickles
its own modules' pickles, and the process that loads makes them anew.
"""
