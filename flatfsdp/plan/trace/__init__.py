"""A step of the engine itself, on the meta device: what it holds, computes and sends.

ranks.py          process groups of any size that only pretend
attention.py      attention as a GPU keeps it
gpu_functions.py  which functions run as on a GPU
on_meta.py        a model that was built with memory
places.py         which unit runs, forward or backward
live_memory.py    bytes that are allocated, and for what
work.py           seconds that a GPU needs for each operator
conditions.py     what a condition on values comes to
observer.py       shows each operator to those above
step.py           two steps of one rank: a `Trace`
layers.py         the trace of a model with many equal layers, from a few of them
"""
