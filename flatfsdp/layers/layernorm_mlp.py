"""`LayerNormMLP`: a norm, two linear maps and the activation between them as one autograd node.

In:   [..., hidden_size], optionally a residual to add first;  out: [..., hidden_size].
Next: `transformer.py` uses it as its second half.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.tensor_parallel import Mode
from flatfsdp.kernels.activation import GATED, NAMES
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import norm_mlp, prepare
from flatfsdp.layers.layer_options import MatmulOptions
from flatfsdp.layers.normalized import NormKind
from flatfsdp.layers.own_maps import NormFirst
from flatfsdp.layers.shared import InitMethod
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.torch_private import never_traced


class LayerNormMLP(NormFirst):
    """A norm and an MLP: y = fc2(activation(fc1(norm(x)))), with Transformer Engine's arguments.

    Args:
        hidden_size: size of input and output.
        ffn_hidden_size: size between the two linear maps.
        eps: epsilon of the norm.
        activation: a name in `flatfsdp.kernels.activation.NAMES`; gated ones (swiglu, geglu, ...) double
            fc1's rows: [activated | linear].
        init_method: fills fc1's weight in place; default: normal with standard deviation 0.023.
        output_layer_init_method: the same for fc2's weight.
        return_bias: return (out, bias) instead of adding fc2's bias.
        return_layernorm_output: return norm(x) as well.
        checkpoint: save only the input, and recompute norm, fc1 and activation in backward.  The name is
            Transformer Engine's; nothing is saved to disk.
        bias: whether the linear maps have biases.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's gain is 1 + its weight.
        set_parallel_mode: the ranks of `tp_group` share fc1's rows and fc2's columns.
        options: options of every layer with linear maps, listed in `MatmulOptions`.

    Attributes:
        hidden_size: size of input and output.
        ffn_hidden_size: this rank's part of the size between the maps.
        layer_norm_weight, layer_norm_bias: [hidden_size]; RMSNorm has no bias.
        fc1_weight: [ffn_hidden_size, hidden_size], twice the rows if gated;  fc1_bias: its rows.
        fc2_weight: [hidden_size, ffn_hidden_size];  fc2_bias: [hidden_size].

    Raises:
        ValueError: for an unknown activation or normalization, or a size that does not divide evenly over the
            ranks.
    """

    linear_maps = ("fc1_weight", "fc2_weight")
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    @takes_te_arguments
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
        self._add_norm(hidden_size, NormKind.named(normalization, eps, zero_centered_gamma))
        column: Mode | None = "column" if set_parallel_mode else None
        row: Mode | None = "row" if set_parallel_mode else None
        self.exchanges["fc1_weight"] = Exchange.of(self._parallel, column)
        self.exchanges["fc2_weight"] = Exchange.of(self._parallel, row)
        inner, parts = self.ffn_hidden_size, 2 if activation in GATED else 1
        whole = (ffn_hidden_size,)
        self._add_map("fc1_", (parts * inner, hidden_size), bias, column, whole * parts, init_method)
        self._add_map("fc2_", (hidden_size, inner), bias, row, whole, output_layer_init_method)
        self.reset_parameters()

    @never_traced
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Normalizes the input and applies the MLP: [..., hidden_size] to the same shape.

        Args:
            inp: [..., hidden_size].
            is_first_microbatch: True casts the FP8 weights and keeps them, False reuses them, None casts
                every time.
            residual: of inp's shape; the norm adds it to `inp` in the same pass.
            return_residual: return `inp`, or inp + residual, as well, for a residual connection around this
                layer.

        Returns:
            out, or a tuple of out, the bias (`return_bias`), the norm's result (`return_layernorm_output`)
            and the norm's input (`return_residual`).

        Raises:
            ValueError: if a shape does not fit, or a size does not suit FP8.
            TypeError: if the input's dtype is not the weight's and torch.autocast is off.
            RuntimeError: if the device has no FP8, or no usable cast of a weight is kept.
        """
        fc1 = MapOf("fc1_weight", self.fc1_weight, self.fc1_bias)
        bias = self.fc2_bias
        fc2 = MapOf("fc2_weight", self.fc2_weight, None if self.return_bias else bias)
        called = norm_mlp(
            prepare(self, inp, fc1, fc2, is_first_microbatch=is_first_microbatch),
            self._norm_of(),
            self.activation,
            residual=residual,
            keep=self.return_layernorm_output,
            checkpoint=self.checkpoint,
        )
        return self._results(called, bias, inp, return_residual=return_residual)

    def extra_repr(self) -> str:
        """Settings shown in the module's repr."""
        return f"{self.hidden_size}, {self.ffn_hidden_size}, activation={self.activation!r}"
