"""A look for what makes ptxas lose FP8 values (Triton issue 11111: ptxas 12.8 and 12.9, not 13.3).

The GPU converts two FP32 numbers to a pair of bytes.  If one pair is merged with another into a 32-bit
register, for a wide store, and is also taken apart, for a transpose, ptxas keeps the merged register only,
and takes apart one that was never written.  The PTX is right, and no error comes: the transpose of some
columns is constant.
"""

from __future__ import annotations

import re
from collections import Counter

CONVERSION = re.compile(r"cvt\.rn\.satfinite\S+\s+(%rs\d+)")
MERGE = re.compile(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}")
NAME = re.compile(r"%rs\d+")


def endangered_pairs(ptx: str) -> set[str]:
    """Registers of FP8 pairs that are merged, and read by something else besides."""
    merged = {name for pair in MERGE.findall(ptx) for name in pair}
    uses = Counter(NAME.findall(ptx))
    # Once where it is written, once where it is merged.
    return {name for name in CONVERSION.findall(ptx) if name in merged and uses[name] > 2}
