"""A small tensor-parallel model made by hand, so that the engine's part can be tested without the layers'."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatfsdp import by_class, shard
from flatfsdp.comm.ranks import ALONE, Ranks
from flatfsdp.contract.tensor_parallel import declare_split, declare_whole
from flatfsdp.layers.shared import initialize
from tests.support.meshes import replicating
from tests.support.models import VOCAB, WIDTH
from tests.support.ranks import cached_in_file

HIDDEN, HEAD = 36, 3


class CopyIn(torch.autograd.Function):
    """What all ranks have goes into parts of a layer; its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.ranks), None


class SumOut(torch.autograd.Function):
    """What the parts of a layer return is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    x = x.contiguous().clone()
    if ranks.size > 1:
        dist.all_reduce(x, group=ranks.group)
    return x


class ParallelMLP(nn.Module):
    """Gated, column-parallel then row-parallel; `gain` is one number for each element of a head, so that
    each rank's gradient is of its own heads.

    Args:
        fused: weight gradients go to `main_grad`, where there is one, without passing through autograd.
    """

    def __init__(self, ranks: Ranks, *, fused: bool) -> None:
        super().__init__()
        self.ranks, self.fused = ranks, fused
        part = HIDDEN // ranks.size
        self.norm = nn.LayerNorm(WIDTH)
        self.up_weight = nn.Parameter(torch.empty(2 * part, WIDTH))
        self.up_bias = nn.Parameter(torch.empty(2 * part))
        self.gain = nn.Parameter(torch.empty(HEAD))
        self.down_weight = nn.Parameter(torch.empty(WIDTH, part))
        self.down_bias = nn.Parameter(torch.empty(WIDTH))
        declare_split(self.up_weight, 0, (HIDDEN, HIDDEN))
        declare_split(self.up_bias, 0, (HIDDEN, HIDDEN))
        declare_split(self.down_weight, 1, (HIDDEN,))
        declare_whole(self.gain, partial_grad=ranks.size > 1)
        declare_whole(self.down_bias, partial_grad=False)
        for parameter in self.parameters(recurse=False):
            initialize(parameter, lambda whole: nn.init.normal_(whole, std=0.3), ranks)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return FusedLinear.apply(x, weight) if self.fused else F.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        entering = CopyIn.apply(self.norm(x), self.ranks)
        gate, up = (self.linear(entering, self.up_weight) + self.up_bias).chunk(2, -1)
        heads = (F.silu(gate) * up).unflatten(-1, (-1, HEAD)) * self.gain
        return x + SumOut.apply(self.linear(heads.flatten(-2), self.down_weight), self.ranks) + self.down_bias


class FusedLinear(torch.autograd.Function):
    """Adds its weight gradient to `main_grad` by itself, if the weight has one to offer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.get_main_grad = getattr(weight, "get_main_grad", None)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        wgrad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.get_main_grad is not None:
            ctx.get_main_grad().add_(wgrad)
            wgrad = None
        return grad @ weight, wgrad


class ParallelNet(nn.Module):
    """Returns the loss of predicting the input; embedding and head know nothing of tensor parallelism."""

    def __init__(self, ranks: Ranks = ALONE, *, fused: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(ParallelMLP(ranks, fused=fused) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


@cached_in_file
def tp_mesh(*sizes: int) -> DeviceMesh:
    """(dp, tp), or (replicate, shard, tp)."""
    names = ("dp", "tp") if len(sizes) == 2 else ("replicate", "shard", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "shard"]


def data_rank(mesh: DeviceMesh) -> int:
    """Number of the data that this rank sees, the same in a tensor-parallel group."""
    return dist.get_rank() // mesh["tp"].size()


def build_tp(
    mesh: DeviceMesh | None, *, fused: bool = False, seed: int = 0, replicates: bool = False, **options: Any
) -> Any:
    """Tensor-parallel over mesh["tp"]; without a mesh, not at all, over all ranks."""
    torch.manual_seed(seed)
    if mesh is not None:
        data: Any = data_parallel(mesh)
        if replicates:
            data = replicating(data.get_group())
        options |= {"mesh": data, "tp_group": mesh.get_group("tp")}
    net = ParallelNet(Ranks.of(options.get("tp_group")), fused=fused)
    return shard(net, by_class(ParallelMLP), **options)
