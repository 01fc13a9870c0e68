"""Kernels as PyTorch operators: torch.compile, fake tensors and dispatch modes see one opaque call.

Every operator writes into tensors that its caller has allocated and returns nothing: the schema names the
mutated tensors, and the fake implementation has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch._C import _len_torch_dispatch_stack
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import register_flop_formula

_library = library.Library("flatfsdp", "FRAGMENT")


def operator(
    schema: str,
    *,
    reference: Callable[..., None],
    launch: Callable[..., None],
    flops: Callable[..., int] | None = None,
) -> Callable[..., None]:
    """Register `flatfsdp::<name>`, and return the function that calls it.

    Args:
        schema: for example "scale_(Tensor(a!) out, Tensor x, float factor) -> ()".
        reference: plain PyTorch; runs on the CPU, and the kernel is tested against it.
        launch: starts the Triton kernel; runs on CUDA.
        flops: for a GEMM: its operations from the shapes of its arguments, for FlopCounterMode.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, reference, "CPU")
    _library.impl(name, launch, "CUDA")
    library.register_fake(f"flatfsdp::{name}", lambda *args, **kwargs: None, lib=_library)
    registered = getattr(torch.ops.flatfsdp, name).default
    # Selective checkpointing keeps what operators return, which is nothing here: always run them again.
    SAC_IGNORED_OPS.add(registered)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.flatfsdp, name))(flops)

    def call(first: Tensor, *args: Any) -> None:
        # The dispatcher costs more host time than the launch; only observers need it.
        if type(first) is not Tensor or torch.compiler.is_dynamo_compiling() or _len_torch_dispatch_stack():
            registered(first, *args)
        elif torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(first.device.type):
            # A backward may run inside torch.autocast, which would round FP32 operands of GEMMs.
            with torch.autocast(first.device.type, enabled=False):
                call(first, *args)
        elif first.is_cuda:
            launch(first, *args)
        else:
            reference(first, *args)

    return call
