"""Before any kernel is defined: without a GPU, Triton kernels run in the interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
