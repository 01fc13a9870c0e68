"""Before torch starts and any kernel is defined.

One thread, also in programs that tests start: tests compute on tiny tensors and run beside each other, so
more would only wait for each other.  Without a GPU, Triton kernels run in the interpreter.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
