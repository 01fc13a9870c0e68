"""`LayerNormMLP`: norm, two linear maps and the activation between them as one autograd node.

In:   [..., hidden_size], perhaps a residual that is added first;  out: [..., hidden_size].
Next: `transformer.py` has one as its second half.

    forward    norm -> (cast) -> fc1 -> activation -> (cast) -> fc2
    saved      norm's input and statistics; FP8 operands of both maps; fc1's result before the activation
    backward   fc2's gradients, then the activation's, which casts, transposes and sums for fc1's bias in one
               pass, then fc1's, then the norm's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from flatfsdp.contract.operand import Operand
from flatfsdp.contract.tensor_parallel import Mode, declare_map
from flatfsdp.fp8.quantizers import Quantized
from flatfsdp.kernels.activation import GATED, NAMES, activation_backward, activation_forward
from flatfsdp.layers.base import CallInput
from flatfsdp.layers.inputs import residual_matrix
from flatfsdp.layers.norm_first import NormFirst
from flatfsdp.layers.normalized import Normalized, NormKind, add_to, input_grads, normalize
from flatfsdp.layers.options import MatmulOptions
from flatfsdp.layers.parameters import InitMethod, normal_init
from flatfsdp.layers.shared import initialize
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.matmul.linear_map import (
    LinearCall,
    LinearSaved,
    linear_backward,
    linear_forward,
    quantize_grad,
)


class LayerNormMLP(NormFirst):
    """y = fc2(activation(fc1(norm(x)))), or norm(x + residual), with Transformer Engine's arguments.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: between the maps.
        eps: of the norm.
        activation: a name in `flatfsdp.kernels.activation.NAMES`; gated ones (swiglu, geglu, ...) double
            fc1's rows: [activated | linear].
        init_method, output_layer_init_method: fill fc1's and fc2's weight; see `LinearOptions`.
        return_bias: do not add fc2's bias but return (out, bias).
        return_layernorm_output: return norm(x) as well.
        checkpoint: save only the input, and compute norm, fc1 and activation again in backward.  The name is
            Transformer Engine's; nothing is saved to disk.
        bias, normalization, zero_centered_gamma, set_parallel_mode, options: see `BlockOptions`.

    Attributes:
        hidden_size, ffn_hidden_size: the second one is this rank's part.
        layer_norm_weight, layer_norm_bias: [hidden_size]; RMSNorm has no bias.
        fc1_weight: [ffn_hidden_size, hidden_size], twice the rows if gated;  fc1_bias: its rows.
        fc2_weight: [hidden_size, ffn_hidden_size];  fc2_bias: [hidden_size].

    Raises:
        ValueError: for an unknown activation or normalization, or if ranks cannot share a size equally.
    """

    linear_maps = ("fc1_weight", "fc2_weight")
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        activation: str = "gelu",
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        checkpoint: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        set_parallel_mode: bool = False,
        **options: Unpack[MatmulOptions],
    ) -> None:
        super().__init__(**options)
        if activation not in NAMES:
            raise ValueError(f"LayerNormMLP: activation is {activation!r}; there are {', '.join(NAMES)}")
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        if set_parallel_mode:
            self.ffn_hidden_size = self._parallel.share("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        self.activation = activation
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.checkpoint = checkpoint
        self.init_methods = (init_method or normal_init, output_layer_init_method or normal_init)
        self._add_norm(hidden_size, NormKind.named(normalization, eps, zero_centered_gamma))
        parts = 2 if activation in GATED else 1
        modes: tuple[Mode | None, Mode | None] = ("column", "row") if set_parallel_mode else (None, None)
        fc1, fc2 = (parts * self.ffn_hidden_size, hidden_size), (hidden_size, self.ffn_hidden_size)
        self._add_map("fc1", fc1, bias, modes[0], (ffn_hidden_size,) * parts)
        self._add_map("fc2", fc2, bias, modes[1], (ffn_hidden_size,))
        self._declare_delays()
        self.reset_parameters()

    def _add_map(
        self, name: str, shape: tuple[int, int], bias: bool, mode: Mode | None, sizes: tuple[int, ...]
    ) -> None:
        """Makes the parameters of fc1 or fc2.

        Args:
            sizes: see `declare_map`.
        """
        weight = self._new_parameter(*shape)
        added = self._new_parameter(shape[0]) if bias else None
        self.register_parameter(f"{name}_weight", weight)
        self.register_parameter(f"{name}_bias", added)
        self.exchanges[f"{name}_weight"] = Exchange.of(self._parallel, mode)
        declare_map(self._parallel, mode, weight, added, sizes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the parameters where they are; nothing on the meta device."""
        self._reset_norm()
        for init, weight, bias in zip(
            self.init_methods,
            (self.fc1_weight, self.fc2_weight),
            (self.fc1_bias, self.fc2_bias),
            strict=True,
        ):
            if not weight.is_meta:
                initialize(weight, init, self._parallel.ranks)
                if bias is not None:
                    bias.zero_()

    @torch.compiler.disable
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """[..., hidden_size] to [..., hidden_size].

        Args:
            is_first_microbatch: as `Linear`.
            residual, return_residual: as `LayerNormLinear`.

        Returns:
            out, or a tuple of out, the bias with `return_bias`, the norm's result with
            `return_layernorm_output` and what was normalized with `return_residual`.

        Raises:
            ValueError, TypeError, RuntimeError: as `Linear`.
        """
        ready = self.prepare_input(inp, self.fc1_weight, self.fc2_weight)
        added = residual_matrix(residual, inp, ready.x.dtype, self)
        fc1_weight, fc2_weight, spec = self._prepare_maps(inp, residual, ready, is_first_microbatch)
        out, normalized, summed = _LayerNormMLP.apply(
            ready.x,
            added,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            None if self.return_bias else self.fc2_bias,
            fc1_weight,
            fc2_weight,
            spec,
        )
        out = out.view(inp.shape)
        return self._results(out, self.fc2_bias, normalized, summed, inp, return_residual=return_residual)

    def _prepare_maps(
        self, inp: Tensor, residual: Tensor | None, ready: CallInput, is_first_microbatch: bool | None
    ) -> tuple[Operand, Operand, _Spec]:
        """Both weights, and what else the node needs."""
        fc2_bias = None if self.return_bias else self.fc2_bias
        fc1_casts, fc2_casts = ready.casts
        dtype, first = ready.x.dtype, is_first_microbatch
        before_fc1 = (inp, residual, self.layer_norm_weight, self.layer_norm_bias)
        before_fc2 = (*before_fc1, self.fc1_weight, self.fc1_bias)
        fc1_weight, fc1 = self.prepare_map(
            "fc1_weight", self.fc1_weight, self.fc1_bias, fc1_casts, dtype, first, before_fc1
        )
        fc2_weight, fc2 = self.prepare_map(
            "fc2_weight", self.fc2_weight, fc2_bias, fc2_casts, dtype, first, before_fc2
        )
        spec = _Spec(self.norm, self.activation, self.checkpoint, self.return_layernorm_output, fc1, fc2)
        return fc1_weight, fc2_weight, spec

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, activation={self.activation!r}"


@dataclass(slots=True)
class _Spec:
    """What one call of the node needs besides tensors.

    Attributes:
        keep: whether norm(x) is a result, too.
    """

    norm: NormKind
    activation: str
    checkpoint: bool
    keep: bool
    fc1: LinearCall
    fc2: LinearCall

    def again(self) -> _Spec:
        """For computing the same once more, in backward."""
        return replace(self, keep=False, fc1=self.fc1.again(), fc2=self.fc2.again())


class _BeforeFc2(NamedTuple):
    normalized: Normalized
    fc1: LinearSaved
    fc1_out: Tensor
    activated: Operand


def _before_fc2(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Operand,
    fc1_bias: Tensor | None,
    spec: _Spec,
) -> _BeforeFc2:
    normalized = normalize(
        x,
        norm_weight,
        norm_bias,
        spec.norm,
        spec.fc1.input_quantizer,
        residual=residual,
        columnwise=spec.fc1.wants_columnwise_input,
        keep=spec.keep,
    )
    fc1_out, saved = linear_forward(normalized.operand, fc1_weight, fc1_bias, spec.fc1)
    quantizer, columnwise = spec.fc2.input_quantizer, spec.fc2.wants_columnwise_input
    fused = quantizer.fused
    outputs = activation_forward(
        fc1_out,
        spec.activation,
        high_precision=fused is None,
        columnwise=columnwise and fused is not None,
        **(fused or {}),
    )
    if fused is not None:
        activated = quantizer.operand(outputs.rowwise, outputs.columnwise)
    else:
        assert outputs.out is not None
        activated = quantizer.cast(outputs.out, rowwise=True, columnwise=columnwise).operand
    return _BeforeFc2(normalized, saved, fc1_out, activated)


class _LayerNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        fc1_param: Tensor,
        fc1_bias: Tensor | None,
        fc2_param: Tensor,
        fc2_bias: Tensor | None,
        fc1_weight: Operand,
        fc2_weight: Operand,
        spec: _Spec,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        before = _before_fc2(x, residual, norm_weight, norm_bias, fc1_weight, fc1_bias, spec)
        summed = before.normalized.summed
        out, fc2 = linear_forward(before.activated, fc2_weight, fc2_bias, spec.fc2)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        if spec.checkpoint:
            ctx.save_for_backward(summed, norm_weight, norm_bias, fc1_bias, *fc1_weight, *fc2.weight)
        else:
            mean, rstd = before.normalized.mean, before.normalized.rstd
            # Where what comes before is frozen, backward stops early.
            norm = (summed, norm_weight, mean, rstd) if spec.fc1.needs_input_grad else (None,) * 4
            fc1_out = before.fc1_out if spec.fc2.needs_input_grad else None
            ctx.save_for_backward(*norm, fc1_out, *before.fc1.tensors, *fc2.tensors)
        return out, before.normalized.out, summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dnormalized: Tensor | None, dresidual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        spec: _Spec = ctx.spec.again() if ctx.spec.checkpoint else ctx.spec
        saved = _saved(ctx.saved_tensors, spec)
        fc1_dweight = fc1_dbias = fc2_dweight = fc2_dbias = None
        if dy is not None:
            quantized = quantize_grad(dy, spec.fc2)
            dactivated, fc2_dweight, fc2_dbias = linear_backward(quantized, saved.fc2, spec.fc2)
            if dactivated is not None:
                assert saved.fc1_out is not None
                quantized = _activation_backward(dactivated, saved.fc1_out, spec)
                dx, fc1_dweight, fc1_dbias = linear_backward(quantized, saved.fc1, spec.fc1)
                dnormalized = add_to(dx, dnormalized)
        maps = (fc1_dweight, fc1_dbias, fc2_dweight, fc2_dbias)
        grads = input_grads(
            dnormalized, saved.norm, spec.norm, dresidual, has_residual=ctx.needs_input_grad[1]
        )
        return *grads, *maps, None, None, None


class _Saved(NamedTuple):
    """None: not needed.

    Attributes:
        norm: what was normalized, weight, mean and rstd.
    """

    norm: Sequence[Tensor | None]
    fc1_out: Tensor | None
    fc1: LinearSaved
    fc2: LinearSaved


def _saved(tensors: Sequence[Tensor | None], spec: _Spec) -> _Saved:
    """What the forward saved, or computes again."""
    if not spec.checkpoint:
        norm, fc1_out, maps = tensors[:4], tensors[4], tensors[5:]
        middle = len(maps) // 2
        fc1, fc2 = LinearSaved.of(maps[:middle]), LinearSaved.of(maps[middle:])
        return _Saved(norm, fc1_out, fc1, fc2)
    x, norm_weight, norm_bias, fc1_bias, *weights = tensors
    assert x is not None and norm_weight is not None
    middle = len(weights) // 2
    fc1_weight, fc2_weight = Operand(*weights[:middle]), Operand(*weights[middle:])
    before = _before_fc2(x, None, norm_weight, norm_bias, fc1_weight, fc1_bias, spec)
    fc2 = LinearSaved(before.activated.for_backward, fc2_weight)
    mean, rstd = before.normalized.mean, before.normalized.rstd
    return _Saved((x, norm_weight, mean, rstd), before.fc1_out, before.fc1, fc2)


def _activation_backward(dy: Tensor, x: Tensor, spec: _Spec) -> Quantized:
    """The gradient of fc1's result as an operand, and its column sums for fc1's bias."""
    call, quantizer = spec.fc1, spec.fc1.grad_quantizer()
    needs_product = call.needs_input_grad or call.needs_weight_grad
    fused = quantizer.fused if needs_product else None
    grads = activation_backward(
        dy,
        x,
        spec.activation,
        high_precision=fused is None,
        rowwise=call.needs_input_grad,
        columnwise=call.needs_weight_grad and fused is not None,
        column_sum=call.bias_grad,
        **(fused or {}),
    )
    if fused is not None:
        return Quantized(quantizer.operand(grads.rowwise, grads.columnwise), grads.column_sum)
    if not needs_product:
        return Quantized(Operand(), grads.column_sum)
    assert grads.dx is not None
    cast = quantizer.cast(grads.dx, rowwise=call.needs_input_grad, columnwise=call.needs_weight_grad)
    return cast._replace(column_sum=grads.column_sum)
