"""The cases of `kernels.py`: each kernel at sizes of real layers, with the bytes it has to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatfsdp.kernels.activation import activation_backward, activation_forward
from flatfsdp.kernels.attention.rope import rope
from flatfsdp.kernels.cast.block_cast import Block, block_cast
from flatfsdp.kernels.cast.cast import cast, max_abs
from flatfsdp.kernels.cast.column_sum import column_sum
from flatfsdp.kernels.cast.scaling import update_scales
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many
from flatfsdp.kernels.cross_entropy import Statistics, cross_entropy_grad, cross_entropy_statistics
from flatfsdp.kernels.dropout import draw_seed, dropout_backward, dropout_forward
from flatfsdp.kernels.gemm.wgrad import wgrad
from flatfsdp.kernels.grad.accumulate_many import accumulate_many
from flatfsdp.kernels.grad.add_rows import add_rows
from flatfsdp.kernels.grad.embedding import embedding_grad
from flatfsdp.kernels.norm.backward import norm_backward
from flatfsdp.kernels.norm.forward import norm_forward
from flatfsdp.kernels.optim import adamw, sgd
from flatfsdp.kernels.optim.runs import Run
from lib.kernel_sizes import Sizes

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
Item = TypeVar("Item")
Call = Callable[[], object]
"""One call of a kernel; it returns the tensors to check: one, or a tuple, some of which are None."""


@dataclass(frozen=True, eq=False)
class Case:
    """One kernel at one size.

    Attributes:
        bytes: number of bytes that one call has to read and write; None if launches count instead.
        copies: number of calls with separate data that are needed so that none finds its data in the cache.
        make: makes data, and the call on them.
    """

    kernel: str
    variant: str
    size: str
    bytes: int | None
    copies: int
    make: Callable[[], Call]

    def calls(self) -> list[Call]:
        """The calls that the case needs, each with its own data."""
        return [self.make() for _ in range(self.copies)]


@dataclass(frozen=True, eq=False)
class Gemm:
    """One way to add one weight gradient to its FP32 buffer.

    Attributes:
        dtype: dtype of the operands.
        path: `SEPARATE` is the one that the others are compared with.
    """

    dtype: str
    path: str
    shape: str
    out: int
    inner: int
    tokens: int
    call: Call

    @property
    def flops(self) -> int:
        """Operations of one call."""
        return 2 * self.out * self.inner * self.tokens


def _writing(kernel: Callable[[], None], *written: Tensor) -> Call:
    """Wraps a kernel that returns nothing into a call that returns what it writes."""

    def call() -> tuple[Tensor, ...]:
        kernel()
        return written

    return call


IN_PLACE, ADDMM, SEPARATE = "in the GEMM", "torch.addmm in place", "PyTorch's GEMM, then add_"


class Bench:
    """Makes cases on one device, with normal data.

    Attributes:
        quick: whether to use only few sizes of each kernel.
    """

    def __init__(self, sizes: Sizes, device: torch.device, quick: bool) -> None:
        self.sizes, self.device, self.quick = sizes, device, quick
        self.scale = torch.full((1,), 16.0, device=device)

    def cases(self) -> Iterator[Case]:
        """All cases; the copy, with which all others are compared, comes first."""
        hidden, wide = self.sizes.hidden, self.sizes.wide_hidden
        ffn, gated = self.sizes.ffn, self.sizes.gated
        yield self._copy(ffn)
        for cols in self._some(hidden, wide, ffn):
            yield self._cast(cols, E4M3)
            yield self._cast(cols, E4M3, columnwise=True)
            yield self._cast(cols, E5M2, columnwise=True, column_sum=torch.float32)
        for cols in self._some(hidden, ffn):
            yield self._max_abs(cols)
        for cols in self._some(hidden, self.sizes.qkv):
            yield self._column_sum(cols)
        yield self._norm_forward(hidden, rms=False, to_fp8=False)
        yield self._norm_forward(hidden, rms=False, to_fp8=True)
        for cols in self._some(hidden, wide):
            yield self._norm_forward(cols, rms=True, to_fp8=True, with_residual=True)
        yield self._norm_backward(hidden, rms=False)
        if not self.quick:
            yield self._norm_backward(wide, rms=True)
        yield self._activation_forward("gelu", ffn, gates=1)
        yield self._activation_forward("swiglu", gated, gates=2)
        yield self._activation_backward("gelu", ffn, gates=1)
        yield self._activation_backward("swiglu", gated, gates=2)
        yield self._rope(hidden)
        yield self._dropout_forward(hidden)
        yield self._dropout_backward(hidden)
        yield self._transpose_many()
        yield self._accumulate_many()
        yield self._add_rows(wide)
        yield self._adamw(wide)
        yield self._sgd(wide)
        yield self._max_abs_many()
        yield self._cast_many()
        yield self._update_scales()
        yield self._embedding_grad()
        yield self._cross_entropy_statistics()
        yield self._cross_entropy_grad()
        yield self._block_cast("1x128", self.sizes.tokens, hidden)
        yield self._block_cast("128x128", *self.sizes.weights[-1])

    def _copy(self, cols: int) -> Case:
        def make() -> Call:
            source, target = self._tokens(cols), self._tokens(cols)
            return partial(target.copy_, source)

        return self._case("copy", "bf16", [(self.sizes.tokens, cols)], 4, make)

    def copy_of(self, nbytes: int) -> Case:
        """A copy that reads and writes as many bytes as a kernel."""

        def make() -> Call:
            source, target = (self._normal(nbytes // 4) for _ in range(2))
            return partial(target.copy_, source)

        return self._case("copy", "of as many bytes", [(1, nbytes // 4)], 4, make)

    def _cast(self, cols: int, dtype: torch.dtype, **options: Any) -> Case:
        def make() -> Call:
            return partial(cast, self._tokens(cols), self.scale, dtype, amax=self._zero(), **options)

        outputs = ["row", *(name.removesuffix("wise").replace("_", " ") for name in options)]
        name = f"to {'E4M3' if dtype == E4M3 else 'E5M2'}: {', '.join(outputs)}"
        per_element = 3 + options.get("columnwise", False)
        return self._case("cast", name, [(self.sizes.tokens, cols)], per_element, make)

    def _max_abs(self, cols: int) -> Case:
        size = [(self.sizes.tokens, cols)]
        return self._case("max_abs", "", size, 2, lambda: partial(max_abs, self._tokens(cols)))

    def _column_sum(self, cols: int) -> Case:
        size = [(self.sizes.tokens, cols)]
        return self._case("column_sum", "bf16", size, 2, lambda: partial(column_sum, self._tokens(cols)))

    def _norm_forward(self, cols: int, *, rms: bool, to_fp8: bool, with_residual: bool = False) -> Case:
        def make() -> Call:
            options = self._to_fp8() if to_fp8 else {}
            if with_residual:
                options["residual"] = self._tokens(cols)
            weight, bias = self._normal(cols), None if rms else self._normal(cols)
            return partial(norm_forward, self._tokens(cols), weight, bias, eps=1e-5, rms=rms, **options)

        name = "RMSNorm" if rms else "LayerNorm"
        name += f"{', residual' * with_residual}, to {'FP8' if to_fp8 else 'bf16'}"
        # The sum with a residual is read in two parts and written.
        per_element = 4 + 4 * with_residual
        return self._case("norm_forward", name, [(self.sizes.tokens, cols)], per_element, make)

    def _norm_backward(self, cols: int, *, rms: bool) -> Case:
        def make() -> Call:
            dy, x, d_residual = (self._tokens(cols) for _ in range(3))
            mean = None if rms else x.float().mean(1)
            rstd, weight = x.float().var(1).add(1e-5).rsqrt(), self._normal(cols)
            return partial(norm_backward, dy, x, weight, mean, rstd, rms=rms, d_residual=d_residual)

        name = f"{'RMSNorm' if rms else 'LayerNorm'}, residual"
        return self._case("norm_backward", name, [(self.sizes.tokens, cols)], 8, make)

    def _activation_forward(self, name: str, cols: int, gates: int) -> Case:
        def make() -> Call:
            return partial(activation_forward, self._tokens(cols), name, **self._to_fp8())

        # Each result takes `gates` elements of x.
        size = [(self.sizes.tokens, cols)]
        return self._case("activation_forward", f"{name}, to FP8", size, 2 + 2 / gates, make)

    def _activation_backward(self, name: str, cols: int, gates: int) -> Case:
        summed = torch.float32 if gates == 1 else None  # gated layers have no bias in practice

        def make() -> Call:
            dy, options = self._tokens(cols // gates), self._to_fp8()
            return partial(activation_backward, dy, self._tokens(cols), name, column_sum=summed, **options)

        per_element = 2 / gates + 2 + 2
        variant = f"{name}, to FP8{', column sum' if summed else ''}"
        return self._case("activation_backward", variant, [(self.sizes.tokens, cols)], per_element, make)

    def _rope(self, cols: int) -> Case:
        tokens, dim = self.sizes.tokens, self.sizes.head_dim

        def make() -> Call:
            angles = torch.randn(tokens, dim // 2, device=self.device)
            x = self._tokens(cols).view(tokens, 1, cols // dim, dim)
            return partial(rope, x, angles.cos(), angles.sin())

        return self._case("rope", "", [(tokens, cols)], 4 + 4 * dim / cols, make)

    def _dropout_forward(self, cols: int) -> Case:
        def make() -> Call:
            x, residual, bias = self._tokens(cols), self._tokens(cols), self._normal(cols)
            return partial(dropout_forward, x, bias, residual, 0.1, draw_seed(self.device))

        return self._case("dropout_forward", "bias, residual", [(self.sizes.tokens, cols)], 6, make)

    def _dropout_backward(self, cols: int) -> Case:
        def make() -> Call:
            return partial(dropout_backward, self._tokens(cols), 0.1, draw_seed(self.device), column_sum=True)

        size = [(self.sizes.tokens, cols)]
        return self._case("dropout_backward", "column sum", size, 4, make)

    def _transpose_many(self) -> Case:
        weights = self.sizes.weights

        def make() -> Call:
            sources = [self._normal(*shape).to(E4M3) for shape in weights]
            pairs = [(source, source.t().contiguous()) for source in sources]
            return _writing(partial(transpose_many, pairs), *(target for _, target in pairs))

        return self._case("transpose_many", "FP8 weights of a layer", weights, 2, make)

    def _accumulate_many(self) -> Case:
        weights = self.sizes.weights[:2]

        def make() -> Call:
            grads = [self._normal(*shape) for shape in weights]
            targets = [torch.zeros_like(grad, dtype=FP32) for grad in grads]
            again = [False] * len(grads)
            return _writing(partial(accumulate_many, targets, grads, again), *targets)

        return self._case("accumulate_many", "bf16, added", weights, 10, make)

    def _add_rows(self, cols: int) -> Case:
        ranks = 4

        def make() -> Call:
            target = self._normal_fp32(cols)
            rows = torch.stack([target.flatten()] * ranks)
            return _writing(partial(add_rows, target.view(-1), rows, first=True), target)

        size = [(self.sizes.tokens, cols)]
        return self._case("add_rows", f"{ranks} FP32 rows", size, 4 * (ranks + 1), make)

    def _adamw(self, cols: int) -> Case:
        numbers = adamw.Numbers.of(1e-4, (0.9, 0.95), 0.1)

        def make() -> Call:
            states = [self._normal_fp32(cols), self._normal_fp32(cols).square_()]
            step = torch.full((), 100.0, device=self.device)
            (corrected,) = adamw.bias_corrected([step], [adamw.Corrected(1e-4, 1e-8, 0.9, 0.95)], FP32)
            run = self._run(states, numbers, corrected)
            update = partial(adamw.adamw, [run], grad_scale=self.scale, dtype=BF16)
            return _writing(update, run.param, *run.states)

        size = [(self.sizes.tokens, cols)]
        return self._case("adamw", "FP32, bf16 copy and its amax", size, 30, make)

    def _sgd(self, cols: int) -> Case:
        numbers = sgd.Numbers(1e-4, 0.1, 0.9)

        def make() -> Call:
            step = torch.full((), 100.0, device=self.device)
            run = self._run([self._normal_fp32(cols)], numbers, step)
            update = partial(sgd.sgd, [run], grad_scale=self.scale, dtype=BF16)
            return _writing(update, run.param, *run.states)

        size = [(self.sizes.tokens, cols)]
        return self._case("sgd", "momentum, bf16 copy and its amax", size, 22, make)

    def _run(self, states: list[Tensor], numbers: Sequence[float], on_device: Tensor) -> Run:
        """Makes the run of an optimizer, with normal values and gradients, and as many for each state."""
        param, grad = (torch.randn_like(states[0]) for _ in range(2))
        return Run(param, grad, states, numbers, on_device, param.to(BF16), self._zero())

    def _max_abs_many(self) -> Case:
        shards = self.sizes.shards

        def make() -> Call:
            tensors = self._shards()
            amax = torch.zeros(len(tensors), device=self.device)
            return _writing(partial(max_abs_many, tensors, amax, through=BF16), amax)

        return self._case("max_abs_many", "FP32 shard of a layer", [(1, numel) for numel in shards], 4, make)

    def _cast_many(self) -> Case:
        shards = self.sizes.shards

        def make() -> Call:
            sources = self._shards()
            targets = [torch.empty_like(source, dtype=E4M3) for source in sources]
            scale = self.scale.expand(len(sources)).contiguous()
            return _writing(partial(cast_many, sources, targets, scale, through=BF16), *targets)

        return self._case("cast_many", "FP32 shard of a layer", [(1, numel) for numel in shards], 5, make)

    def _update_scales(self) -> Case:
        length, n = self.sizes.history, self.sizes.scales

        def make() -> Call:
            scale = torch.ones(n, device=self.device)
            history = torch.rand(length, n, device=self.device)
            return partial(update_scales, history, scale, torch.full_like(scale, 448.0))

        return self._case("update_scales", "histories of a model", [(length, n)], None, make)

    def _embedding_grad(self) -> Case:
        tokens, hidden, vocabulary = self.sizes.tokens, self.sizes.hidden, self.sizes.vocabulary
        ids = torch.randint(vocabulary, (tokens,), device=self.device)

        def make() -> Call:
            dy, target = self._tokens(hidden), torch.zeros(vocabulary, hidden, device=self.device)
            return _writing(partial(embedding_grad, target, dy, ids, first=False), target)

        per_element = 2 + 8 * len(ids.unique()) / tokens
        return self._case("embedding_grad", "added", [(tokens, hidden)], per_element, make)

    def _cross_entropy_statistics(self) -> Case:
        def make() -> Call:
            return partial(cross_entropy_statistics, *self._logits_and_targets())

        return self._case("cross_entropy_statistics", "read only", [self._logits_shape], 2, make)

    def _cross_entropy_grad(self) -> Case:
        def make() -> Call:
            logits, targets = self._logits_and_targets()
            found = Statistics(*cross_entropy_statistics(logits, targets))
            scale = torch.ones_like(found.sum)
            arguments = (logits, targets, found.max, found.sum.log(), scale)
            return partial(cross_entropy_grad, *arguments, inplace=True)

        return self._case("cross_entropy_grad", "in place", [self._logits_shape], 4, make)

    @property
    def _logits_shape(self) -> tuple[int, int]:
        """The shape of logits, for half of the tokens, as logits are large."""
        return self.sizes.tokens // 2, self.sizes.vocabulary

    def _logits_and_targets(self) -> tuple[Tensor, Tensor]:
        tokens, vocabulary = self._logits_shape
        targets = torch.randint(vocabulary, (tokens,), device=self.device)
        return self._normal(tokens, vocabulary), targets

    def _block_cast(self, block: Block, rows: int, cols: int) -> Case:
        def make() -> Call:
            return partial(block_cast, self._normal(rows, cols), block=block, rowwise=True, columnwise=True)

        return self._case("block_cast", f"{block}: row, column", [(rows, cols)], 4, make)

    def gemms(self) -> Iterator[Gemm]:
        """Every way to add a weight gradient, on the same data; only those in FP8 run on a CPU."""
        for shape, (out, inner) in self.sizes.gemms.items():
            calls = {"FP8": self._fp8_wgrads(out, inner)}
            if self.device.type == "cuda":
                calls["bf16"] = self._bf16_wgrads(out, inner)
            for dtype, paths in calls.items():
                for path, call in paths.items():
                    yield Gemm(dtype, path, shape, out, inner, self.sizes.tokens, call)

    def _fp8_wgrads(self, out: int, inner: int) -> dict[str, Call]:
        tokens, one = self.sizes.tokens, torch.ones(1, device=self.device)
        dy, x = self._normal(out, tokens).to(E5M2), self._normal(inner, tokens).to(E4M3)
        target = torch.zeros(out, inner, device=self.device)

        def fused() -> Tensor:
            wgrad(target, dy, x, first=False, dy_scale_inv=one, x_scale_inv=one)
            return target

        def separate() -> Tensor:
            return target.add_(torch._scaled_mm(dy, x.t(), scale_a=one, scale_b=one, out_dtype=FP32))

        return {IN_PLACE: fused, SEPARATE: separate}

    def _bf16_wgrads(self, out: int, inner: int) -> dict[str, Call]:
        dy, x = self._tokens(out), self._tokens(inner)
        target = torch.zeros(out, inner, device=self.device)

        def fused() -> Tensor:
            wgrad(target, dy, x, first=False)
            return target

        def addmm() -> Tensor:
            return torch.addmm(target, dy.t(), x, out_dtype=FP32, out=target)

        def separate() -> Tensor:
            return target.add_(torch.mm(dy.t(), x, out_dtype=FP32))

        return {IN_PLACE: fused, ADDMM: addmm, SEPARATE: separate}

    def _case(
        self,
        kernel: str,
        variant: str,
        shapes: Sequence[tuple[int, int]],
        per_element: float | None,
        make: Callable[[], Call],
    ) -> Case:
        """Makes a case; `shapes` are those of the matrices of one call, `per_element` is in bytes."""
        elements = sum(rows * cols for rows, cols in shapes)
        nbytes = None if per_element is None else int(per_element * elements)
        copies = max(2, ceil(self.sizes.rotation / nbytes)) if nbytes else 2
        (rows, cols), *others = shapes
        size = f"{1 + len(others)} matrices" if others else f"{rows} x {cols}"
        return Case(kernel, variant, size, nbytes, copies, make)

    def _some(self, *items: Item) -> tuple[Item, ...]:
        """All items, or only the first in a quick run."""
        return items[:1] if self.quick else items

    def _to_fp8(self) -> dict[str, Any]:
        """Arguments of a kernel that casts its result, in both layouts, and returns nothing else."""
        fp8 = {"scale": self.scale, "amax": self._zero(), "dtype": E4M3}
        return {**fp8, "high_precision": False, "columnwise": True}

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16)

    def _normal_fp32(self, cols: int) -> Tensor:
        return torch.randn(self.sizes.tokens, cols, device=self.device)

    def _shards(self) -> list[Tensor]:
        """One rank's shards of a layer's weights, in FP32."""
        return [torch.randn(numel, device=self.device) for numel in self.sizes.shards]

    def _tokens(self, cols: int) -> Tensor:
        return self._normal(self.sizes.tokens, cols)

    def _zero(self) -> Tensor:
        return torch.zeros(1, device=self.device)
