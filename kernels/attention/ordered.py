"""Gradients of attention whose bits repeat, by cuDNN through nvidia-cudnn-frontend.

    P = softmax(scale * Q K^T),  O = P V
    dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),  dQ = scale * dS K,  dK = scale * dS^T Q

cuDNN's usual backward adds the parts of dQ, one for each block of keys, with atomics: in the order in which
the blocks end.  PyTorch therefore takes flash attention under torch.use_deterministic_algorithms(True), whose
ordered backward is 2.5 times slower.  cuDNN has an ordered backward, too, for which PyTorch has no switch:
it stores the scores' gradients, and a second GEMM adds them in order.

Bytes beside the operands: 2 a score, 4 GiB for 32 heads of 8,192 tokens.  So sequences and groups of heads
take turns, and each turn's scores fill at most `WORKSPACE`, or belong to one group of one sequence.
"""

from __future__ import annotations

import atexit
import importlib
import logging
from collections.abc import Iterator
from functools import cache, cached_property, lru_cache
from itertools import product
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.kernels.shared.ops import operator
from flatfsdp.kernels.shared.triton import is_here, on_device_of

WORKSPACE = 2**30
"""Bytes that the gradients of scores may take at a time."""

_MOST_A_GROUP = 2**32
"""Bytes above which a group of one sequence takes flash attention's: those of four heads of 23,000 tokens."""

_MAX_DIM = 128
"""Longest heads, in elements, that cuDNN has an ordered backward for on Hopper."""

_OLDEST = 91600
"""cuDNN 9.16: for older ones the frontend copies lengths from the host in each run, also in a CUDA graph."""

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
    turns = list(_turns(operands))
    wanted = _Wanted(query.dtype, tuple(map(_layout, turns[0])), scale, is_causal)
    context = _context(query.device)
    plan = None if context is None else context.plan(wanted)
    if context is None or plan is None:
        raise RuntimeError(
            f"cuDNN has no ordered backward of attention for query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}, or would run it for the first time in the capture of a CUDA graph: run it "
            "once before, or take flash attention's by torch.backends.cuda.enable_cudnn_sdp(False)"
        )
    for parts in turns:
        context.run(plan, parts)


def _turns(operands: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
    """Views of the operands, of as many sequences and groups of heads at a time as fit into the workspace."""
    query, key = operands[:2]
    batch, groups = key.shape[:2]
    fit = WORKSPACE // max(1, _bytes_a_group(query, key))
    sequences, turn = _divisor(batch, fit // groups), _divisor(groups, fit)
    for sequence, group in product(range(0, batch, sequences), range(0, groups, turn)):
        of_heads = [(x.shape[1] // groups * group, x.shape[1] // groups * turn) for x in operands]
        parts = [
            x.narrow(0, sequence, sequences).narrow(1, *at) for x, at in zip(operands, of_heads, strict=True)
        ]
        # One number a query, which cuDNN reads packed, from an aligned address.
        if parts[5].shape != operands[5].shape:
            parts[5] = parts[5].clone(memory_format=torch.contiguous_format)
        yield parts


def _bytes_a_group(query: Tensor, key: Tensor) -> int:
    """Bytes of the scores of one sequence and of the heads that share a key."""
    return 2 * query.shape[1] // key.shape[1] * query.shape[2] * key.shape[2]


def _divisor(number: int, most: int) -> int:
    return next(each for each in range(max(1, min(number, most)), 0, -1) if number % each == 0)


class _Layout(NamedTuple):
    """Shape and strides of an operand, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _layout(x: Tensor) -> _Layout:
    """What cuDNN is told about an operand.

    PyTorch allows any stride in a dimension of size one, and keeps odd ones.  cuDNN refuses some, although no
    address depends on them, so it is told the stride of a dimension that lies around all that follow.
    """
    shape, strides = tuple(x.shape), list(x.stride())
    for at in reversed(range(len(shape))):
        if shape[at] == 1:
            inner = zip(shape[at + 1 :], strides[at + 1 :], strict=True)
            strides[at] = max((size * stride for size, stride in inner), default=1)
    return _Layout(shape, tuple(strides))


class _Wanted(NamedTuple):
    """What a plan is made for; `layouts` are those of the operator's nine tensors."""

    dtype: torch.dtype
    layouts: tuple[_Layout, ...]
    scale: float
    is_causal: bool

    def __str__(self) -> str:
        return f"Deterministic attention of query {self.layouts[0].shape} and key {self.layouts[1].shape}"


class _Plan:
    """A backward that cuDNN has prepared.

    Attributes:
        graph: the graph of cuDNN's frontend.
        names: its tensors, in the order of the operator's.
        workspace: bytes that it needs.
        has_run: whether it has run, so that its kernels are loaded.
    """

    def __init__(self, graph: Any, names: list[Any]) -> None:
        self.graph, self.names = graph, names
        self.workspace: int = graph.get_workspace_size()
        self.has_run = False


class _Context:
    """cuDNN on one device, the current one: its handle, and all plans.

    Plans stay until the process ends: CUDA graphs that have recorded them launch their kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plans: dict[_Wanted, _Plan | None] = {}
        # The handle has one stream at a time, and autograd's thread is another one than the forward's.
        self._lock = Lock()

    @cached_property
    def _handle(self) -> Any:
        return bindings().create_handle()

    def plan(self, wanted: _Wanted) -> _Plan | None:
        """The plan, made if need be; None if cuDNN has none.

        Neither is a plan made while a CUDA graph is captured, nor does one run there for the first time: both
        load kernels, and may allocate.  Then it is None, too.
        """
        with self._lock:
            plan = self._plans.get(wanted)
            if plan is not None and plan.has_run:
                return plan
            if torch.cuda.is_current_stream_capturing():
                _log.info("%s: flash attention's in a CUDA graph, as it has not run before", wanted)
                return None
            if wanted not in self._plans:
                self._plans[wanted] = _built(wanted, self._handle)
            return self._plans[wanted]

    def run(self, plan: _Plan, operands: list[Tensor]) -> None:
        """Computes the gradients on the current stream."""
        # From PyTorch's allocator, in a capture from the graph's pool; the next kernel of the stream may have
        # it.  Not by `torch.empty`, as deterministic algorithms would fill a gigabyte before each use.
        workspace = torch.UntypedStorage(plan.workspace, device=self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock:
            bindings().set_stream(handle=self._handle, stream=stream)
            tensors = dict(zip(plan.names, operands, strict=True))
            plan.graph.execute(tensors, workspace.data_ptr(), handle=self._handle)
            plan.has_run = True


@cache
def _context(device: torch.device) -> _Context | None:
    """None if the device, which is the current one, is not Hopper, or without nvidia-cudnn-frontend."""
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return _Context(device) if is_hopper and bindings() is not None else None


@cache
def bindings() -> Any:
    """The module of cuDNN's frontend, or None without nvidia-cudnn-frontend; logs once which it is."""
    try:
        cudnn = importlib.import_module("cudnn")
        version = cudnn.backend_version()
        if version < _OLDEST:
            raise ImportError(f"cuDNN is {version}, older than {_OLDEST}")
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        _log.info(
            "Deterministic attention: flash attention's backward; with nvidia-cudnn-frontend it is cuDNN's, "
            "2.5 times as fast (%s)",
            error,
        )
        return None
    # Plans that outlive the module are reported as leaks when the process ends.
    atexit.register(_context.cache_clear)
    _log.info(
        "Deterministic attention: cuDNN %d, through nvidia-cudnn-frontend %s", version, cudnn.__version__
    )
    return cudnn


def _built(wanted: _Wanted, handle: Any) -> _Plan | None:
    cudnn = bindings()
    io = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[wanted.dtype]
    fp32 = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    names = ("q", "k", "v", "o", "dO", "stats")
    inputs = [
        graph.tensor(dim=[*layout.shape], stride=[*layout.strides], data_type=fp32 if name == "stats" else io)
        for name, layout in zip(names, wanted.layouts, strict=False)
    ]
    outputs = graph.sdpa_backward(
        **dict(zip(names, inputs, strict=True)),
        attn_scale=wanted.scale,
        use_causal_mask=wanted.is_causal,
        use_deterministic_algorithm=True,
    )
    for output, layout in zip(outputs, wanted.layouts[len(names) :], strict=True):
        output.set_output(True).set_dim([*layout.shape]).set_stride([*layout.strides])
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        _log.warning("%s: flash attention's backward, as cuDNN has none (%s)", wanted, error)
        return None
    return _Plan(graph, [*inputs, *outputs])


_attention_backward = operator(
    "attention_backward_(Tensor query, Tensor key, Tensor value, Tensor out, Tensor grad_out, "
    "Tensor logsumexp, Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, float scale, "
    "bool is_causal) -> ()",
    reference=reference,
    launch=launch,
    # As FlopCounterMode counts attention: five products of all scores, masked or not.
    flops=lambda query, key, *others, **named: 10 * query[0] * query[1] * query[2] * key[2] * query[3],
)


def is_ordered(query: Tensor, key: Tensor, value: Tensor, *, scale: float, is_causal: bool) -> bool:
    """Whether cuDNN has an ordered backward for these; the first call with their layout prepares it.

    It needs Hopper, nvidia-cudnn-frontend, bf16 or fp16, and heads of at most 128 elements.  While a CUDA
    graph is captured, it is true of what has run before.
    """
    inputs = (query, key, value)
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(type(x) is not Tensor or x.dtype != query.dtype or x.storage_offset() % 8 for x in inputs):
        return False
    expected = _expected(*(_Layout(tuple(x.shape), x.stride()) for x in inputs), query.dtype)
    if expected is None:
        return False
    with on_device_of(query):
        context = _context(query.device)
        wanted = _Wanted(query.dtype, expected, scale, is_causal)
        return context is not None and context.plan(wanted) is not None


@lru_cache(maxsize=1024)
def _expected(query: _Layout, key: _Layout, value: _Layout, dtype: torch.dtype) -> tuple[_Layout, ...] | None:
    """Layouts of the operands of one turn; None if cuDNN has no backward for them."""
    q, k, v = (torch.empty_strided(*each, dtype=dtype, device="meta") for each in (query, key, value))
    dim = q.shape[3]
    if dim > _MAX_DIM or dim % 8 or k.shape != v.shape or min(q.shape[2], k.shape[2]) < 2 or not q.numel():
        return None
    if _bytes_a_group(q, k) > _MOST_A_GROUP:
        return None
    for x in (q, k, v):
        *outer, last = _layout(x).strides
        # cuDNN loads 16 bytes at a time; a stride of zero is an expanded tensor, whose gradient has another.
        if last != 1 or any(stride % 8 or not stride for stride in outer):
            return None
    out, statistics = torch.empty_like(q), q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
    operands = (q, k, v, out, out, statistics, *map(torch.empty_like, (q, k, v)))
    return tuple(map(_layout, next(_turns(operands))))


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
        out: the result of attention, the shape of `query`; copied if it is not packed as the query is.
        grad_out: its gradient; likewise.
        logsumexp: FP32 [batch, heads, queries, 1], contiguous: of the scaled scores of each query.
        scale: factor of the scores.
        is_causal: whether query i sees keys 0 to i only.
    """
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    # `is_ordered` has prepared the one plan in which results are packed as the query is.
    out, grad_out = (_packed_as(grads[0], x) for x in (out, grad_out))
    _attention_backward(query, key, value, out, grad_out, logsumexp, *grads, scale, is_causal)
    return grads


def _packed_as(like: Tensor, x: Tensor) -> Tensor:
    """`x`, or a copy: an expanded gradient, as of a sum, has strides of zero."""
    is_packed = _layout(x) == _layout(like) and x.storage_offset() % 8 == 0
    return x if is_packed else torch.empty_like(like).copy_(x)
