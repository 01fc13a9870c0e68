"""Faults on purpose: ranks killed while they save, files damaged behind their backs; what can be loaded then.

`python -m tests.support.faults --help` says how to run them by hand; tests run a sample of each.
"""
