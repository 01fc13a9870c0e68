"""`LayerNormMLP`: norm, two linear maps and the activation between them as one autograd node.

In:   [..., hidden_size], perhaps a residual that is added first;  out: [..., hidden_size].
Next: `transformer.py` has one as its second half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flatfsdp.contract.tensor_parallel import Mode, declare_map
from flatfsdp.kernels.activation import GATED, NAMES
from flatfsdp.layers.base import MapOf
from flatfsdp.layers.calls import norm_mlp, prepare
from flatfsdp.layers.norm_first import NormFirst
from flatfsdp.layers.normalized import NormKind
from flatfsdp.layers.options import MatmulOptions
from flatfsdp.layers.parameters import InitMethod, normal_init
from flatfsdp.layers.shared import initialize
from flatfsdp.layers.te_arguments import takes_te_arguments
from flatfsdp.matmul.exchange import Exchange
from flatfsdp.torch_private import never_traced


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

    @never_traced
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
        fc1 = MapOf("fc1_weight", self.fc1_weight, self.fc1_bias)
        bias = self.fc2_bias
        fc2 = MapOf("fc2_weight", self.fc2_weight, None if self.return_bias else bias)
        called = norm_mlp(
            self,
            self._norm_of(),
            fc1,
            fc2,
            prepare(self, inp, fc1, fc2),
            self.activation,
            residual=residual,
            keep=self.return_layernorm_output,
            checkpoint=self.checkpoint,
            is_first_microbatch=is_first_microbatch,
        )
        return self._results(called, bias, inp, return_residual=return_residual)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, activation={self.activation!r}"
