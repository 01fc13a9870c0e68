"""Gradients of attention whose bits repeat, by cuDNN through nvidia-cudnn-frontend.

    P = softmax(scale * Q K^T),  O = P V
    dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),  dQ = scale * dS K,  dK = scale * dS^T Q

cuDNN's usual backward adds the parts of dQ, one for each block of keys, with atomics: in the order in which
the blocks end.  PyTorch therefore takes flash attention under torch.use_deterministic_algorithms(True), whose
ordered backward is 2.5 times slower.  cuDNN has an ordered backward, too, for which PyTorch has no switch:
it stores the scores' gradients, and a second GEMM adds them in order.

Bytes beside the operands: 2 a score, 4 GiB for 32 heads of 8,192 tokens.  So the heads take turns, and each
turn's scores fill at most `WORKSPACE`.
"""

from __future__ import annotations

import atexit
import importlib
import logging
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.triton import is_here, on_device_of

WORKSPACE = 2**30
"""Bytes that the gradients of scores may take at a time."""

MAX_DIM = 128
"""Longest heads, in elements, that cuDNN has an ordered backward for on Hopper."""

_log = logging.getLogger(__name__)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    logsumexp: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    scale: float,
    is_causal: bool,
) -> None:
    groups, each = key.shape[1], query.shape[1] // key.shape[1]
    q, o, do, k, v = (x.float() for x in (query, out, grad_out, key, value))
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    scores = scale * q @ k.transpose(-1, -2)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    p = (scores - logsumexp).exp()
    ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * scale
    grad_query.copy_(ds @ k)
    grad_key.copy_((ds.transpose(-1, -2) @ q).unflatten(1, (groups, each)).sum(2))
    grad_value.copy_((p.transpose(-1, -2) @ do).unflatten(1, (groups, each)).sum(2))


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    logsumexp: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    scale: float,
    is_causal: bool,
) -> None:
    operands = (query, key, value, out, grad_out, logsumexp, grad_query, grad_key, grad_value)
    if not is_here(query):
        with on_device_of(query):
            launch(*operands, scale, is_causal)
        return
    groups = key.shape[1]
    turn = _groups_a_turn(query, key)
    for first in range(0, groups, turn):
        parts = [x.narrow(1, first * x.shape[1] // groups, turn * x.shape[1] // groups) for x in operands]
        # One number a query, which cuDNN reads packed only; through one dimension, as a dimension of size one
        # may have any stride.
        parts[5] = parts[5].reshape(-1).view(parts[5].shape)
        plan = _plan(query.device, query.dtype, tuple(map(_layout, parts)), scale, is_causal)
        if plan is None:
            raise RuntimeError(
                f"cuDNN has no ordered backward of attention for query {tuple(query.shape)} and key "
                f"{tuple(key.shape)}; torch.backends.cuda.enable_cudnn_sdp(False) takes flash attention's"
            )
        plan.run(parts)


def _groups_a_turn(query: Tensor, key: Tensor) -> int:
    """Number of groups of heads whose scores fit into the workspace: a divisor of all groups."""
    batch, heads, queries, _ = query.shape
    groups, keys = key.shape[1:3]
    bytes_a_group = 2 * batch * queries * keys * heads // groups
    fits = max(1, WORKSPACE // max(1, bytes_a_group))
    return next(turn for turn in range(min(groups, fits), 0, -1) if groups % turn == 0)


class _Layout(NamedTuple):
    """Shape and strides of an operand, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _layout(x: Tensor) -> _Layout:
    return _Layout(tuple(x.shape), x.stride())


class _Plan:
    """A backward that cuDNN has prepared for one layout.

    Args:
        graph: the graph of cuDNN's frontend.
        names: its tensors, in the order of the operator's operands.
        device: device of the operands.
    """

    def __init__(self, graph: Any, names: list[Any], device: torch.device) -> None:
        self._graph, self._names, self._device = graph, names, device
        self._workspace = max(1, graph.get_workspace_size())

    def run(self, operands: list[Tensor]) -> None:
        """Computes the gradients on the current stream."""
        handle = _handle(self._device)
        bindings().set_stream(handle=handle, stream=torch.cuda.current_stream(self._device).cuda_stream)
        # From PyTorch's allocator, which may hand it on as soon as the stream's work is queued; and in a CUDA
        # graph's recording it comes from the graph's pool.
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        self._graph.execute(dict(zip(self._names, operands, strict=True)), workspace, handle=handle)


@cache
def bindings() -> Any:
    """The module of cuDNN's frontend, or None without nvidia-cudnn-frontend; logs once which it is."""
    try:
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        _log.info(
            "Deterministic attention: flash attention's backward; with nvidia-cudnn-frontend it is cuDNN's, "
            "2.5 times as fast (%s)",
            error,
        )
        return None
    # Plans that outlive the module are reported as leaks when the process ends.
    atexit.register(_plan.cache_clear)
    _log.info(
        "Deterministic attention: cuDNN %d, through nvidia-cudnn-frontend %s", version, cudnn.__version__
    )
    return cudnn


@cache
def _handle(device: torch.device) -> Any:
    """The context of cuDNN on a device; kept until the process ends."""
    return bindings().create_handle()


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device, dtype: torch.dtype, layouts: tuple[_Layout, ...], scale: float, is_causal: bool
) -> _Plan | None:
    """The prepared backward of these layouts, made once; None if cuDNN has none."""
    cudnn = bindings()
    types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
    fp32 = cudnn.data_type.FLOAT
    handle = _handle(device)
    graph = cudnn.pygraph(
        io_data_type=types[dtype], intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    dtypes = [*[types[dtype]] * 5, fp32]
    inputs = [
        graph.tensor(dim=list(layout.shape), stride=list(layout.strides), data_type=each)
        for layout, each in zip(layouts, dtypes, strict=False)
    ]
    names = ("q", "k", "v", "o", "dO", "stats")
    outputs = graph.sdpa_backward(
        **dict(zip(names, inputs, strict=True)),
        attn_scale=scale,
        use_causal_mask=is_causal,
        use_deterministic_algorithm=True,
    )
    for output, layout in zip(outputs, layouts[len(inputs) :], strict=True):
        output.set_output(True).set_dim(list(layout.shape)).set_stride(list(layout.strides))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        _log.info("Deterministic attention of %s: cuDNN has none (%s)", layouts[0].shape, error)
        return None
    return _Plan(graph, [*inputs, *outputs], device)


_attention_backward = operator(
    "attention_backward_(Tensor query, Tensor key, Tensor value, Tensor out, Tensor grad_out, "
    "Tensor logsumexp, Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, float scale, "
    "bool is_causal) -> ()",
    reference=reference,
    launch=launch,
    # As FlopCounterMode counts attention: five products of all scores, masked or not.
    flops=lambda query, key, *others, **named: 10 * query[0] * query[1] * query[2] * key[2] * query[3],
)


def is_ordered(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether attention of these has an ordered backward: on Hopper, with nvidia-cudnn-frontend."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[3] <= MAX_DIM
        and query.shape[3] % 8 == 0
        and all(x.dtype == query.dtype and x.stride(3) == 1 for x in (query, key, value))
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and bindings() is not None
    )


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    logsumexp: Tensor,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, with the same bits for the same operands.

    Args:
        query: bf16 or fp16 [batch, heads, queries, dim], of any strides except that the last is 1.
        key: likewise [batch, groups, keys, dim]; `groups` divides `heads`.
        value: the shape of `key`.
        out: the result of attention, the shape of `query`.
        grad_out: its gradient; copied if its strides are not those of `out`.
        logsumexp: FP32 [batch, heads, queries, 1]: of the scaled scores of each query.
        scale: factor of the scores.
        is_causal: whether query i sees keys 0 to i only.
    """
    if grad_out.stride() != out.stride():
        # An expanded gradient, as of a sum; one plan serves all.
        grad_out = torch.empty_like(out).copy_(grad_out)
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    _attention_backward(query, key, value, out, grad_out, logsumexp, *grads, scale, is_causal)
    return grads
