"""Ranks that do something else on purpose: stop, are killed, raise, skip, are late, go another way.

program.py     what a rank does, as plain values, and how it does it
reference.py   the losses that plain data parallel has
processes.py   ranks as processes of their own, and how each of them ends
trials.py      programs that ranks run together, and what they have come to
mismatches.py  51 kinds of ranks that differ
at_random.py   random programs with one fault in each
"""
