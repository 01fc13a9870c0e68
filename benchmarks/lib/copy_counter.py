"""Counts the bytes that any data-parallel engine copies and sends on this rank, without asking the engine.

`byte_ledger.py` is the engine's own account; this is an independent measurement to check it against, and the
only way to put FlatFSDP, FSDP2 and others in one table.  A `CopyCounter` is a `TorchDispatchMode`: it sees
every operator below autograd, including the optimizer's and the collectives', and classifies them by what the
kernel does, never by who called it:

    cast     copy into a narrower dtype, or into another one of the same width
    widen    copy into a wider dtype
    copy     copy within one dtype
    concat   cat, stack, chunk_cat: many tensors into one
    add      element-wise addition, in place or not
    scale    element-wise multiplication, division or clamping
    fill     a constant into memory
    turn     copy of a transposed matrix, within one dtype
    measure  norm or largest magnitude: reads everything, writes little
    staging  gloo's own copy of a reduce-scatter's result from its work buffer; NCCL has none

**Engine or model?**  An operator counts if its tensors have at least `min_numel` elements.  Run a model whose
activations are smaller than that and whose parameters, and 1/N shards of parameters, are larger (one sample
of width 64, 64 x 64 weights on up to 4 ranks, `min_numel=256`): then every large operator is either a matrix
multiplication with a weight or the engine's.  This needs no list of engines, no knowledge of their buffers,
and no guess about shapes.  Smaller copies are kept in `ignored_bytes`; engines that loop over small
parameters (biases, norms) pay for them there.  Large operators that this file does not know are listed in
`unclassified`: a total is complete only if that is empty.  Use a fused optimizer (`AdamW(..., fused=True)`),
whose single operator is known; one made of adds and multiplications would be counted as the engine's.

**Bytes** are those of an ideal kernel: each argument read once, each result written once, an expanded
dimension once, single numbers never.  Temporaries inside a kernel do not count (PyTorch's CPU kernels widen a
bf16 argument of a mixed-dtype add into one, its CUDA kernels do not; on the CPU each of `KERNELS` is many
operators).  Neither does the internal work of a collective.

**Where modes reach.**  Backward on CPU runs in the calling thread, so the mode is still on.  On CUDA it runs
in one thread per device; autograd passes the caller's thread-local state, including dispatch modes, to those
threads with each backward (`at::ThreadLocalState`), so the mode is on there, too: observed with torch 2.11 on
an H200 and, on CPU, with 2.11 and 2.13.  Not observed are threads that an engine starts itself, and kernels
launched past the dispatcher (Triton, a backend's own copies).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kind(str, Enum):
    """What a copy kernel does; the table is in the module's docstring."""

    CAST = "cast"
    WIDEN = "widen"
    COPY = "copy"
    CONCAT = "concat"
    ADD = "add"
    SCALE = "scale"
    FILL = "fill"
    TURN = "turn"
    MEASURE = "measure"
    STAGING = "staging"


@dataclass(frozen=True)
class Copy:
    """One local copy kernel.

    Attributes:
        kind: what the kernel does.
        op: operator, such as `aten.copy_`.
        via: the engine's own operator that it ran in, such as `fsdp.chunk_cat`; empty if none.
        bytes: read plus written.
    """

    kind: Kind
    op: str
    via: str
    bytes: int


@dataclass(frozen=True)
class Collective:
    """One collective of N ranks.

    Attributes:
        name: "all_gather", "reduce_scatter", "all_reduce", or the operator's name; "identity" for integers,
            by which ranks tell each other what they run, and what they have used.
        payload: bytes of the full buffer: an all-gather's result, a reduce-scatter's input.
        wire: bytes that this rank sends in a bandwidth-optimal algorithm, and also receives: (N - 1) / N of
            the payload; twice that for an all-reduce.
    """

    name: str
    payload: int
    wire: float


class CopyCounter(TorchDispatchMode):
    """Records copies and collectives inside the context; the module's docstring defines them.

        with CopyCounter(min_numel=256) as counter:
            for batch in microbatches(model, batches):
                model(batch).sum().backward()
            optimizer.step()
        print(counter.bytes(Kind.CONCAT) / numel, counter.calls("all_gather"))

    Args:
        min_numel: operators whose largest tensor (or list of tensors, added up) has fewer elements are
            attributed to the model.

    Attributes:
        copies: local copy kernels, in order.
        collectives: collectives, in order.
        ignored_bytes: bytes of copies smaller than `min_numel`.
        unclassified: large operators that are neither a known copy nor known arithmetic, with counts.
    """

    def __init__(self, min_numel: int) -> None:
        super().__init__()
        self.min_numel = min_numel
        self.copies: list[Copy] = []
        self.collectives: list[Collective] = []
        self.ignored_bytes = 0
        self.unclassified: Counter[str] = Counter()
        self._via = ""
        self._staged: Counter[tuple[int, int]] = Counter()

    # -- results -----------------------------------------------------------------------------------------

    def bytes(self, *kinds: Kind) -> int:
        """Bytes read and written by copies of these kinds; without arguments, of all but `staging`."""
        wanted = kinds or tuple(kind for kind in Kind if kind is not Kind.STAGING)
        return sum(copy.bytes for copy in self.copies if copy.kind in wanted)

    def calls(self, name: str) -> int:
        """Number of collectives with this name."""
        return sum(c.name == name for c in self.collectives)

    def wire(self, name: str) -> float:
        """Bytes on the wire of the collectives with this name."""
        return sum(c.wire for c in self.collectives if c.name == name)

    # -- recording ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(t not in (Tensor, torch.nn.Parameter) for t in types):
            # A tensor subclass (DTensor) takes itself apart first; its plain tensors come back here.
            return NotImplemented
        kwargs = kwargs or {}
        name = _name(func)
        if name in KERNELS:
            self._record_kernel(func, name, args, kwargs)
            return func(*args, **kwargs)
        if func.namespace in OPENED_NAMESPACES and name not in ARITHMETIC:
            return self._open(func, args, kwargs)
        if name not in COPIES and name not in ARITHMETIC:
            # Composite operators arrive whole in inference mode and inside opened operators; whether a
            # `reshape` copies is visible in its parts.
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if name in COLLECTIVES:
            self._record_collective(name, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._record(func, name, args, kwargs, result)
        return result

    def _open(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an engine's own operator with the mode on, so that its contents are measured, not assumed."""
        name = _name(func)
        tensor = next(_tensors([*args, *kwargs.values()]), None)
        key = "CPU" if tensor is None or tensor.device.type == "cpu" else "CUDA"
        before, outer = len(self.copies), self._via
        ignored = self.ignored_bytes
        self._via = name
        try:
            with self:
                result = func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
        finally:
            self._via = outer
        if len(self.copies) == before and self.ignored_bytes == ignored:
            # A kernel launched past the dispatcher: its bytes were not counted.
            self.unclassified[name] += 1
        return result

    def _record(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if name in ARITHMETIC or name in METADATA or _is_view(func):
            return
        read, written = _traffic(func, name, args, kwargs, result)
        if not written:
            return
        is_large = max(sum(t.numel() for t in each) for each in (read, written)) >= self.min_numel
        if name not in COPIES:
            if is_large:
                self.unclassified[name] += 1
            return
        nbytes = sum(_nbytes(t) for t in [*read, *written])
        if not is_large:
            self.ignored_bytes += nbytes
            return
        kind = COPIES[name] or _by_dtype(read[0], written[0])
        if kind is Kind.COPY and self._takes_staged(written[0]):
            kind = Kind.STAGING
        self.copies.append(Copy(kind, name, self._via, nbytes))

    def _record_kernel(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        kind, counted = KERNELS[name]
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        tensors = [list(_tensors([{**given, **kwargs}[argument]])) for argument in counted]
        nbytes = sum(_nbytes(tensor) for found in tensors for tensor in found)
        if sum(tensor.numel() for tensor in tensors[-1]) < self.min_numel:
            self.ignored_bytes += nbytes
            return
        self.copies.append(Copy(kind, name, name, nbytes))

    def _record_collective(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        label, payload_arg, hops = COLLECTIVES[name]
        bound = [*args, *kwargs.values()]
        payload = sum(_nbytes(t) for t in _tensors([bound[payload_arg]]))
        if sum(t.numel() for t in _tensors(bound)) < self.min_numel:
            return
        dtypes = {t.dtype for t in _tensors([bound[payload_arg]])}
        if dtypes == {torch.int64} or (label == "all_reduce" and dtypes == {torch.uint8}):
            label = "identity"
        group = next(dist.ProcessGroup.unbox(a) for a in bound if isinstance(a, torch.ScriptObject))
        size = group.size()
        self.collectives.append(Collective(label, payload, hops * payload * (size - 1) / size))
        if label == "reduce_scatter":
            for output in _tensors([bound[0]]):
                if output.device.type == "cpu":
                    self._staged[output.data_ptr(), output.numel()] += 1

    def _takes_staged(self, written: Tensor) -> bool:
        """Whether this is gloo's copy of a reduce-scatter's result, made inside `wait()`."""
        key = (written.data_ptr(), written.numel())
        if not self._staged[key]:
            return False
        self._staged[key] -= 1
        return True


# -- what is what ----------------------------------------------------------------------------------------

OPENED_NAMESPACES = frozenset({"fsdp", "flatfsdp"})
"""Namespaces of engines' operators, FSDP2's and ours: the counter looks inside them."""


def _by_dtype(read: Tensor, written: Tensor) -> Kind:
    if read.dtype != written.dtype:
        return Kind.WIDEN if written.dtype.itemsize > read.dtype.itemsize else Kind.CAST
    is_transposed = read.dim() == 2 and read.t().is_contiguous() and not read.is_contiguous()
    return Kind.TURN if is_transposed and written.is_contiguous() else Kind.COPY


def _aten(*names: str) -> list[str]:
    """Full names of operators given as words."""
    return [f"aten.{name}" for words in names for name in words.split()]


COPIES: dict[str, Kind | None] = {
    **dict.fromkeys(
        _aten("copy_ copy _to_copy clone _foreach_copy_ split_with_sizes_copy constant_pad_nd"), None
    ),
    **dict.fromkeys(_aten("cat stack _chunk_cat"), Kind.CONCAT),
    **dict.fromkeys(_aten("add_ add _foreach_add_ _foreach_add sub_ sub"), Kind.ADD),
    **dict.fromkeys(
        _aten("div_ div mul_ mul _foreach_div_ _foreach_div _foreach_mul_ _foreach_mul clamp_ clamp"),
        Kind.SCALE,
    ),
    **dict.fromkeys(_aten("_foreach_norm linalg_vector_norm"), Kind.MEASURE),
    **dict.fromkeys(_aten("fill_ zero_ _foreach_zero_ zeros zeros_like new_zeros ones ones_like"), Kind.FILL),
    **dict.fromkeys(_aten("new_ones full full_like new_full"), Kind.FILL),
}
"""Operators that move data without computing anything that a model needs; None: the dtypes tell the kind."""

ARITHMETIC = frozenset(
    _aten(
        "mm addmm bmm baddbmm _scaled_mm embedding embedding_dense_backward normal_ uniform_ randn rand",
        "_fused_sgd_ _fused_adam_ _fused_adamw_",
    )
) | {"flatfsdp.scaled_mm_", "flatfsdp.wgrad_", "flatfsdp.wgrad_fp8_"}
"""The model's and the optimizer's own operators on large tensors."""

KERNELS: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "flatfsdp.max_abs_many_": (Kind.MEASURE, ("tensors",)),
    "flatfsdp.cast_many_": (Kind.CAST, ("sources", "targets")),
    "flatfsdp.transpose_many_": (Kind.TURN, ("sources", "targets")),
}
"""Our operators that are one kernel on CUDA -> (what it does, arguments whose bytes it moves)."""

METADATA = frozenset(
    _aten(
        "empty empty_like empty_strided new_empty new_empty_strided resize_ set_ record_stream _unsafe_view",
        "lift_fresh detach_ t_ squeeze_ unsqueeze_ transpose_ as_strided_",
    )
)
"""Operators that allocate or relabel memory without moving data."""

COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "c10d._allgather_base_": ("all_gather", 0, 1),
    "c10d.allgather_": ("all_gather", 0, 1),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1, 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "c10d.allreduce_": ("all_reduce", 0, 2),
    "c10d.allreduce_coalesced_": ("all_reduce", 0, 2),
    "c10d.broadcast_": ("broadcast", 0, 1),
    "c10d.alltoall_base_": ("all_to_all", 1, 1),
}
"""Operator -> (name, position of the argument with the full payload, times that it crosses the wire)."""

_OVERWRITTEN = frozenset(
    {"aten.copy_", "aten._foreach_copy_", "aten.fill_", "aten.zero_", "aten._foreach_zero_"}
)
"""Operators that write their first argument without reading it."""


def _traffic(
    func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that the operator reads and tensors that it writes, from its schema."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = list(_tensors([value]))
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        if mutated:
            written += tensors
        is_overwritten = mutated and (argument.is_out or (position == 0 and name in _OVERWRITTEN))
        if not is_overwritten and not _is_template(name):
            read += tensors
    if not any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        written = list(_tensors([result]))
    return read, written


def _name(func: Any) -> str:
    """`aten.copy_`: the operator without its overload."""
    return str(func._schema.name).replace("::", ".")


def _is_template(name: str) -> bool:
    """Whether the operator's tensor arguments only give a shape and dtype."""
    return name.endswith("_like") or name.startswith("aten.new_")


def _is_view(func: Any) -> bool:
    """Whether the results alias arguments and nothing is written."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once, a single number does not."""
    if tensor.dim() == 0:
        return 0
    distinct = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return distinct * tensor.element_size()
