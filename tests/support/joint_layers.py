"""A layer that multiplies with parameters of other modules as one operand, and the same in one weight."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flatfsdp import fp8
from flatfsdp.contract.packed import Pack, packed_tensor
from flatfsdp.layers.base import MapOf, MatmulLayer
from flatfsdp.layers.calls import linear, prepare

WIDTH, TOKENS = 32, 32
ROWS = {"q": 48, "k": 16, "v": 16}


class QKV(MatmulLayer):
    """x to [tokens, q + k + v], with parameters of nn.Linear modules, in one GEMM where possible.

    Attributes:
        found: the operands of the last forward, the weight's and the bias's.
    """

    linear_maps: ClassVar[tuple[str, ...]] = ("qkv_weight",)

    def __init__(self, fuse: Any = True, bias: bool = True, rows: dict[str, int] = ROWS) -> None:
        super().__init__(fuse_wgrad_accumulation=fuse)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, size, bias=bias) for name, size in rows.items()})
        kinds = ("weight", "bias") if bias else ("weight",)
        self._of_kind = {
            kind: Pack(f"qkv_{kind}", tuple((part, kind) for part in self.parts.values())) for kind in kinds
        }
        self.found: tuple[Tensor | None, ...] = ()

    def packed_parameters(self) -> tuple[Pack, ...]:
        return tuple(self._of_kind.values())

    def fp8_weights(self) -> tuple[str, ...]:
        return ("qkv_weight",)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = ([*(packed_tensor(self, pack) for pack in self.packed_parameters()), None])[:2]
        self.found = (weight, bias)
        if weight is None:
            return torch.cat([part(x) for part in self.parts.values()], -1)
        of = MapOf("qkv_weight", weight, bias)
        return linear(prepare(self, x, of))


class OneWeight(QKV):
    """The same with one weight [q + k + v, WIDTH] and one bias, which are parameters."""

    def __init__(self, fuse: Any = True, bias: bool = True) -> None:
        super().__init__(fuse, bias)
        tensors = {kind: torch.cat(pack.tensors()).detach() for kind, pack in self._of_kind.items()}
        self.parts = nn.ModuleDict()
        self._of_kind = {}
        for kind, tensor in tensors.items():
            self.register_parameter(f"qkv_{kind}", nn.Parameter(tensor))
            self._of_kind[kind] = Pack(f"qkv_{kind}", ((self, f"qkv_{kind}"),))


class Layer(nn.Module):
    """A norm, the packed projection, and a projection of their sum, with a residual connection."""

    def __init__(self, qkv: type[QKV] = QKV, fuse: Any = True, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = qkv(fuse, **options)
        self.out = nn.Linear(sum(ROWS.values()), WIDTH)

    def forward(self, x: Tensor, alone: str = "") -> Tensor:
        """
        Args:
            alone: a part that is used by itself, in place of the packed projection.
        """
        normalized = self.norm(x)
        if alone:
            return x + self.qkv.parts[alone](normalized).sum(-1, keepdim=True)
        return x + self.out(self.qkv(normalized).tanh())


class Net(nn.Module):
    """Two layers, each called through `call`.

    Args:
        freezes: beginnings of names of parameters without gradients.
    """

    def __init__(
        self, qkv: type[QKV] = QKV, fuse: Any = True, freezes: tuple[str, ...] = (), **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(qkv, fuse, **options) for _ in range(2))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(freezes or "\0"))
        self.call: Any = lambda layer, *args: layer(*args)

    def forward(self, x: Tensor, alone: str = "") -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x, alone)
        return x


def batch(seed: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: Tensor, *args: Any, recipe: Any = None) -> Tensor:
    """The model's loss, in FP8 if there is a recipe."""
    with fp8.autocast(enabled=recipe is not None, recipe=recipe or fp8.CurrentScaling()):
        out: Tensor = model(x, *args)
    return out.float().square().mean()
