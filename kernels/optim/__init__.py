"""Optimizer steps over many runs of parameters in one launch.

`adamw.py` and `sgd.py` have the formulas and one kernel each; `runs.py` says what a run is and how a kernel
finds it, and is to be read first.
"""
