"""The model of a plan: a random tree of modules around the shapes of calls that real models make.

Every module takes a hidden state [batch, width] in any of the forms that `hidden_of` knows, and the `Call`
as keyword, and returns another hidden state in such a form, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatfsdp.torch_private import in_backward
from tests.support.stress.plans import (
    Branches,
    Chain,
    Checkpoint,
    Container,
    FailWhere,
    Form,
    Freeze,
    Frozen,
    Leaf,
    LeafKind,
    Node,
    Plan,
    Recompute,
    Repeat,
    Residual,
    Return,
    Skip,
    Unit,
)

BATCH, VOCAB = 2, 5


class PlannedError(RuntimeError):
    pass


@dataclass
class Call:
    """What is not differentiated: handed to every module as an object that no engine looks into.

    Attributes:
        tokens: int64 [batch].
        target: [batch, 1].
        failing: where this call raises PlannedError, if it does.
    """

    tokens: Tensor
    target: Tensor
    rank: int
    microbatch: int
    failing: FailWhere | None = None


@dataclass
class Result:
    """A dataclass as modules return them, with a tensor further down and something that is none."""

    hidden: Tensor
    more: list[Tensor]
    note: str = "not a tensor"


def pack(hidden: Tensor, form: Form) -> Any:
    """Every form but "none"; those with two tensors need both, except "dict", whose second goes unused."""
    half = hidden * 0.5
    packed = {
        "tensor": lambda: hidden,
        "tuple": lambda: (half, None, half),
        "dict": lambda: {"hidden": hidden, "unused": half},
        "dataclass": lambda: Result(half, [half]),
        "none": lambda: None,
    }
    return packed[form]()


def hidden_of(value: Any) -> Tensor:
    if isinstance(value, tuple):
        return value[0] + value[2]
    if isinstance(value, dict):
        return value["hidden"]
    if isinstance(value, Result):
        return value.hidden + value.more[0]
    return value


def apply(module: nn.Module, hidden: Any, call: Call) -> Any:
    """What `module` returns; its own input, if it returns nothing."""
    result = module(hidden, call=call)
    return hidden if result is None else result


def apply_recomputed(module: nn.Module, value: Any, call: Call, how: Recompute | None) -> Any:
    if how is None:
        return apply(module, value, call)
    # Reentrant checkpoints see tensors among their arguments, not inside them.
    run: Callable[[Tensor], Tensor] = lambda hidden: hidden_of(apply(module, hidden, call))  # noqa: E731
    return checkpoint(run, hidden_of(value), use_reentrant=how == "reentrant")


# ---- leaves ---------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """tanh of a stock layer that takes and returns [batch, width]."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return self.stock(hidden_of(value)).tanh()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, kernel_size=3, padding=1)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return self.conv(hidden_of(value).unsqueeze(1)).sum(1).tanh()


class Recurrent(nn.Module):
    """A sequence of one; keeps a list of its own weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return self.gru(hidden_of(value).unsqueeze(0))[0].squeeze(0)


class Attention(nn.Module):
    """The batch attends to itself; reads its output layer's parameters without calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, num_heads=1)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        hidden = hidden_of(value).unsqueeze(1)
        return self.attention(hidden, hidden, hidden)[0].squeeze(1)


class Hooked(nn.Module):
    """The gradient of its weight is doubled by a hook."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.register_hook(_double)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return self.linear(hidden_of(value)).tanh()


def _double(grad: Tensor) -> Tensor:
    return 2 * grad


class OwnGradient(nn.Module):
    """A linear layer that adds to `main_grad` itself where there is one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return _LinearWithOwnGradient.apply(hidden_of(value), self.weight).tanh()


class _LinearWithOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(hidden)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        (hidden,) = ctx.saved_tensors
        weight_grad = grad.t() @ hidden if ctx.needs_input_grad[1] else None
        if weight_grad is not None and hasattr(ctx.weight, "get_main_grad"):
            ctx.weight.get_main_grad().add_(weight_grad)
            weight_grad = None
        return grad @ ctx.weight, weight_grad


class Scale(nn.Module):
    """A bare parameter, of shape () or [width]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(shape))

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return hidden_of(value) * self.scale


class DetachedScale(Scale):
    """Its parameter's gradient does not depend on the gradient of the input, which needs the parameter."""

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return hidden_of(value) * self.scale.detach() + self.scale


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return hidden_of(value) + self.embedding(call.tokens)


class Tied(nn.Module):
    """Two layers with one weight and a bias each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.down.weight = self.up.weight

    def forward(self, value: Any, *, call: Call) -> Tensor:
        return self.down(self.up(hidden_of(value)).tanh()).tanh()


class Unused(nn.Module):
    """Has a parameter and returns its own input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(width))

    def forward(self, value: Any, *, call: Call) -> Any:
        return value


class Counter(nn.Module):
    """A buffer that counts the calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Any, *, call: Call) -> Any:
        self.calls += 1
        return value


class Fuse(nn.Module):
    """Raises where the call says so."""

    def forward(self, value: Any, *, call: Call) -> Any:
        hidden = hidden_of(value)
        if call.failing == "backward" and hidden.requires_grad:
            hidden.register_hook(_fail)
        if call.failing == "forward" or (call.failing == "recomputation" and in_backward()):
            _fail()
        return value


def _fail(_grad: Tensor | None = None) -> None:
    raise PlannedError


def _leaf(kind: LeafKind, width: int) -> nn.Module:
    makers: dict[LeafKind, Callable[[], nn.Module]] = {
        "linear": lambda: Layer(nn.Linear(width, width)),
        "linear without bias": lambda: Layer(nn.Linear(width, width, bias=False)),
        "mlp": lambda: Layer(nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))),
        # A small epsilon would make gradients of rounding errors: two numbers normalise to 1 and -1.
        "norm": lambda: Layer(nn.LayerNorm(width, eps=1.0)),
        "conv": Convolution,
        "gru": lambda: Recurrent(width),
        "attention": lambda: Attention(width),
        "hook": lambda: Hooked(width),
        "own gradient": lambda: OwnGradient(width),
        "scalar": Scale,
        "vector": lambda: Scale(width),
        "detached vector": lambda: DetachedScale(width),
        "embedding": lambda: Embedding(width),
        "tied": lambda: Tied(width),
        "unused": lambda: Unused(width),
        "counter": Counter,
        "fuse": Fuse,
    }
    return makers[kind]()


# ---- parents --------------------------------------------------------------------------------------------


class ChainModule(nn.Module):
    def __init__(self, children: Sequence[nn.Module], container: Container) -> None:
        super().__init__()
        named = {f"child{index}": child for index, child in enumerate(children)}
        containers: dict[Container, Callable[[], nn.Module]] = {
            "list": lambda: nn.ModuleList(children),
            "dict": lambda: nn.ModuleDict(named),
            "sequential": lambda: nn.Sequential(*children),
        }
        self.parts = containers[container]()

    def forward(self, value: Any, *, call: Call) -> Any:
        for part in self.parts.children():
            value = apply(part, value, call)
        return value


class BranchesModule(nn.Module):
    def __init__(self, children: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(children)

    def forward(self, value: Any, *, call: Call) -> Tensor:
        results = [hidden_of(apply(branch, value, call)) for branch in self.branches]
        return torch.stack(results).mean(0) if results else hidden_of(value)


class Parent(nn.Module):
    """A module around one child."""

    def __init__(self, child: nn.Module, node: Any = None) -> None:
        super().__init__()
        self.child = child
        self._node = node


class ResidualModule(Parent):
    def forward(self, value: Any, *, call: Call) -> Tensor:
        hidden = hidden_of(value)
        return 0.5 * hidden + hidden_of(apply(self.child, hidden, call))


class RepeatModule(Parent):
    def __init__(self, child: nn.Module, node: Repeat) -> None:
        super().__init__(child, node)
        if node.two_names:
            self.again = child

    def forward(self, value: Any, *, call: Call) -> Any:
        second = self.again if self._node.two_names else self.child
        value = apply_recomputed(self.child, value, call, self._node.first)
        return apply_recomputed(second, value, call, self._node.second)


class CheckpointModule(Parent):
    def forward(self, value: Any, *, call: Call) -> Tensor:
        return apply_recomputed(self.child, value, call, self._node.how)


class SkipModule(Parent):
    def forward(self, value: Any, *, call: Call) -> Any:
        if call.microbatch not in self._node.microbatches:
            return apply(self.child, value, call)
        if self._node.rank is None:
            return value
        # A unit that returned its own input on one rank only would come later in the backward there.
        return hidden_of(value) * 1 if self._node.rank == call.rank else apply(self.child, value, call)


class ReturnModule(Parent):
    def forward(self, value: Any, *, call: Call) -> Any:
        return pack(hidden_of(apply(self.child, value, call)), self._node.form)


PARENTS: dict[type, type[Parent]] = {
    Residual: ResidualModule,
    Repeat: RepeatModule,
    Checkpoint: CheckpointModule,
    Skip: SkipModule,
    Return: ReturnModule,
}


def build_node(node: Node, width: int) -> nn.Module:
    """The module; those that are to be units have a true attribute `is_unit`."""

    def child(of: Node) -> nn.Module:
        return build_node(of, width)

    match node:
        case Leaf(kind, frozen):
            return _freeze(_leaf(kind, width), frozen)
        case Chain(children, container):
            return ChainModule([child(c) for c in children], container)
        case Branches(children):
            return BranchesModule([child(c) for c in children])
        case Residual() | Repeat() | Checkpoint() | Skip() | Return():
            return PARENTS[type(node)](child(node.child), node)
        case Frozen(inner):
            return child(inner).requires_grad_(False)
        case Unit(inner):
            module = child(inner)
            module.is_unit = True  # type: ignore[assignment]
            return module


def _freeze(module: nn.Module, what: Freeze) -> nn.Module:
    count = {"nothing": 0, "first parameter": 1, "everything": None}[what]
    for parameter in list(module.parameters())[:count]:
        parameter.requires_grad_(False)
    return module


# ---- the whole model ------------------------------------------------------------------------------------


class Unsharded(nn.Module):
    """A schedule calls these on every model; only FlatFSDP, which hides them, has something to do."""

    def no_sync(self) -> nullcontext[None]:
        return nullcontext()

    def set_is_last_backward(self, is_last: bool) -> None:
        pass


class Model(Unsharded):
    """Stem, body, head; returns the loss of one microbatch, 0-dim, in the plan's form."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stem = nn.Parameter(1 + torch.rand(plan.width)) if plan.stem else None
        self.body = build_node(Chain(plan.body), plan.width)
        has_fuse = any(isinstance(module, Fuse) for module in self.body.modules())
        self.fuse = None if has_fuse else Fuse()
        self.head = nn.Linear(plan.width, 1)
        self._output = plan.output

    def forward(self, hidden: Tensor, *, call: Call) -> Any:
        if self.stem is not None:
            hidden = hidden * self.stem
        hidden = hidden_of(apply(self.body, hidden, call))
        if self.fuse is not None:
            hidden = self.fuse(hidden, call=call)
        loss = (self.head(hidden).tanh() - call.target).square().mean()
        return pack(loss, self._output)
