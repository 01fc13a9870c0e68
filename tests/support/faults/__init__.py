"""Faults on purpose: ranks that stop, are killed, raise, are late or differ; files and disks that fail.

`python -m tests.support.faults --help` says how to run them by hand; tests run a sample of each.
"""
