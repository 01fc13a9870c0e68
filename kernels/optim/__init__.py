"""Optimizer steps over many runs of parameters in one launch.

`adamw.py` and `sgd.py` have the formulas and one kernel each; `runs.py` defines a run and how a kernel finds
it: read it first.
"""
