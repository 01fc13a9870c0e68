"""`checkpoint_wrapper`: activation checkpointing of a module, over `torch.utils.checkpoint`.

In:   a module, wrapped or not.
Out:  the same module, whose forward keeps only its inputs; the backward runs it again.
Next: it composes with FSDP in either order: a unit inside a checkpoint, or a checkpoint inside a unit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint


class _ThreadState(threading.local):
    """Flags of one thread: on CUDA, backward and recomputation run in their own thread."""

    is_checkpointing = False
    is_recomputing = False
    is_disabled = False


_thread = _ThreadState()


def is_checkpointing() -> bool:
    """Whether this thread is in the first forward of a checkpointed module."""
    return _thread.is_checkpointing


def is_recomputing() -> bool:
    """Whether this thread recomputes a checkpointed module for its backward.

    Layers with side effects (a counter, for example) check this to apply them only once.
    """
    return _thread.is_recomputing


@contextmanager
def _while_set(flag: str) -> Iterator[None]:
    before = getattr(_thread, flag)
    setattr(_thread, flag, True)
    try:
        yield
    finally:
        setattr(_thread, flag, before)


def disable_checkpointing() -> AbstractContextManager[None]:
    """Context in which checkpointed modules run as plain ones."""
    return _while_set("is_disabled")


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Makes `module` checkpoint its activations from now on, and returns it.

    Its forward may take and return anything, by position or keyword.  The recomputation sees the same random
    numbers and autocast state.  BatchNorm statistics are updated only in the first run, except for layers
    with an attribute `disable_patch_batchnorm`.  The module can be copied and pickled.

    Args:
        module: the module; changed in place.
        offload_to_cpu: keep its input tensors in (pinned) CPU memory until the backward.
    """
    module.forward = _CheckpointedForward(module, offload_to_cpu)
    return module


class _CheckpointedForward:
    """Replaces `module.forward` after `checkpoint_wrapper`."""

    def __init__(self, module: nn.Module, offload_to_cpu: bool) -> None:
        # Weak, because the module holds this object; so the module is freed with its last user.
        self._module = weakref.ref(module)
        self._offload_to_cpu = offload_to_cpu

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None, "the checkpointed module is gone"
        forward = partial(type(module).forward, module)
        if _thread.is_disabled or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Positional tensors are saved through autograd's hooks, so they can be offloaded.
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return forward(*args, **kwargs)

        pins = torch.cuda.is_available()
        with torch.autograd.graph.save_on_cpu(pins) if self._offload_to_cpu else nullcontext():
            return checkpoint(run, *leaves, use_reentrant=False, context_fn=partial(_contexts, module))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._module(), self._offload_to_cpu)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return _while_set("is_checkpointing"), _recomputation(module)


@contextmanager
def _recomputation(module: nn.Module) -> Iterator[None]:
    """Runs the body as a recomputation, with copies of the statistics of every BatchNorm below `module`.

    Without updates BatchNorm would save fewer tensors than in the forward, and checkpoint compares them.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    counted = {m: dict(m._buffers) for m in norms if not hasattr(m, "disable_patch_batchnorm")}
    for norm, statistics in counted.items():
        norm._buffers.update({k: v if v is None else v.clone() for k, v in statistics.items()})
    try:
        with _while_set("is_recomputing"):
            yield
    finally:
        for norm, statistics in counted.items():
            norm._buffers.update(statistics)
