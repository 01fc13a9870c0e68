"""Packs of layers that tensor-parallel ranks share, over replicas and in pipelines: the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from flatfsdp import Precision, by_class, checkpoint, fp8, microbatches, shard
from flatfsdp.contract.packed import is_packed
from flatfsdp.contract.tensor_parallel import declare_split
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import Role
from flatfsdp.layers import Linear, TransformerLayer
from flatfsdp.layers.linear import Projection
from flatfsdp.parallel import FlatStage, clip_grad_norm_
from tests.support import joint_layers
from tests.support.joint_layers import QKV, OneWeight
from tests.support.models import update
from tests.support.pipelines import mesh_of
from tests.support.ranks import on_ranks
from tests.support.tp_models import data_parallel, data_rank, tp_mesh

WIDTH, HEADS, GROUPS, SEQUENCE, BATCH = 64, 4, 2, 16, 2
RECIPE = fp8.CurrentScaling()
SETTINGS = ((True, True), (False, True), (True, False))
"""Flag, and whether to reshard after the forward."""


class Net(nn.Module):
    """Two transformer layers, [seq, batch, hidden]; query, key and value are parameters of their own."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            TransformerLayer(
                WIDTH,
                2 * WIDTH,
                HEADS,
                GROUPS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_wgrad_accumulation="if_claimed",
                set_parallel_mode=True,
                sequence_parallel=sequence_parallel,
                tp_group=mesh.get_group("tp"),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Trained(NamedTuple):
    model: Any
    losses: list[Tensor]
    state: dict[str, Tensor]


def train(
    mesh: DeviceMesh, flag: bool, reshard: bool, sequence_parallel: bool, precision: Precision | None = None
) -> Trained:
    """Losses, norms of gradients and whole parameters of two steps; in FP8 where weights are stored so."""
    options: dict[str, Any] = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    options |= {"mesh": data_parallel(mesh), "tp_group": mesh.get_group("tp"), "precision": precision}
    model = shard(Net(mesh, sequence_parallel), by_class(TransformerLayer), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(data_rank(mesh))
    in_fp8 = precision is not None and precision.fp8_weights is not None
    parts, part = (mesh["tp"].size(), mesh.get_local_rank("tp")) if sequence_parallel else (1, 0)
    losses = []
    for _ in range(2):
        for _ in microbatches(model, range(2)):
            x = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator).chunk(parts)[part]
            with fp8.autocast(recipe=RECIPE) if in_fp8 else nullcontext():
                loss = model(x)
            loss.backward()
            losses.append(loss.detach())
        losses.append(clip_grad_norm_(model, 0.1))
        update(optimizer)
    return Trained(model, losses, checkpoint.full_state_dict(model))


def assert_same(one: Trained, other: Trained) -> None:
    assert [loss.item() for loss in one.losses] == [loss.item() for loss in other.losses]
    assert one.state.keys() == other.state.keys()
    assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel"),
    [((2, 2), False), ((2, 1, 2), True)],
    ids=["sharded", "replicated, sequence-parallel"],
)
@on_ranks(4)
def test_layers_that_ranks_share(sizes: tuple[int, ...], sequence_parallel: bool) -> None:
    """Each rank's parts are one operand: the bits of a concatenation of them."""
    mesh = tp_mesh(*sizes)
    with mock.patch.object(Projection, "packed_parameters", return_value=()):
        apart = train(mesh, False, True, sequence_parallel)
    for setting in SETTINGS[1:] if sequence_parallel else SETTINGS:
        found = train(mesh, *setting, sequence_parallel)
        assert_same(found, apart)
        assert packs_of(found.model) == 2 * [(True, True)]
    assert packs_of(apart.model) == 2 * [(False, False)]


def packs_of(model: nn.Module) -> list[tuple[bool, bool]]:
    """Whether weights and biases are one operand, for each layer with several weights."""
    split = [module for module in model.modules() if isinstance(module, Projection) and module._is_split]
    return [(is_packed(module, "weight"), is_packed(module, "bias")) for module in split]


@on_ranks(4)
def test_weights_stored_in_fp8() -> None:
    """A pack has one scale on all ranks that share it."""
    mesh = tp_mesh(2, 2)
    precision = Precision(compute=torch.float32, fp8_weights=RECIPE)
    runs = [train(mesh, *setting, sequence_parallel=False, precision=precision) for setting in SETTINGS]
    for run in runs:
        assert_same(run, runs[0])
        scales = [
            group.compute_shard.scales.scale[pack.first : pack.last]
            for _, group in named_groups(run.model)
            if group.layout.role is Role.FP8
            for pack in group.layout.packs
        ]
        assert len(scales) == 2 and all(len(each) == 3 and len(each.unique()) == 1 for each in scales)


@on_ranks(2)
def test_parts_of_which_only_some_are_split(rank: int) -> None:
    """The parts lie in several flat buffers, so their layer multiplies with them separately."""
    mesh = tp_mesh(1, 2)
    options = {"mesh": mesh["dp"], "tp_group": mesh.get_group("tp")}
    runs = []
    for flag in (True, False):
        torch.manual_seed(0)
        layer = QKV(fuse=False, bias=False, rows={"q": 16, "k": 16, "v": 16})
        declare_split(layer.parts["q"].weight, 0, (32,))
        model = shard(layer, optimize_backward_concat=flag, **options)
        model(joint_layers.batch(0)).square().sum().backward()
        assert layer.found == (None, None) and not is_packed(layer, "qkv_weight")
        runs.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

    fused = Linear(32, 48, bias=False, parameters_split=("q", "k", "v"), fuse_wgrad_accumulation=True)
    declare_split(fused.q_weight, 0, (32,))
    with pytest.raises(RuntimeError, match=r"in one FlatFSDP unit and of one dtype.*'if_claimed'"):
        shard(fused, **options)(joint_layers.batch(0))


@on_ranks(4)
def test_stages_of_a_pipeline() -> None:
    """Forwards of several microbatches come before the first one's backward: the bits of one weight."""
    one_losses, one_norms = train_pipeline(OneWeight, True, True)
    runs = [train_pipeline(QKV, flag, reshard) for flag, reshard in SETTINGS]
    assert runs[0] == runs[1] == runs[2]
    losses, norms = runs[0]
    assert losses == one_losses and norms == pytest.approx(one_norms, rel=1e-6)


def train_pipeline(kind: type[QKV], flag: bool, reshard: bool) -> tuple[list[float], list[float]]:
    """Losses of two steps, on ranks with the last stage; norms of all gradients."""
    mesh = mesh_of(2, 2)
    rank, count = mesh.get_local_rank("pp"), 2
    options: dict[str, Any] = {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    nets = [joint_layers.Net(kind) for _ in range(count)]
    models = [shard(net, by_class(joint_layers.Layer), mesh=mesh["dp"], **options) for net in nets]
    stages = [
        FlatStage(model, rank + 2 * index, 2 * count, group=mesh.get_group("pp"))
        for index, model in enumerate(models)
    ]
    pipeline = ScheduleInterleaved1F1B(stages, 4, lambda out, target: (out - target).square().mean())
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses: list[Tensor] = []
    norms = []
    for step in range(2):
        x = joint_layers.batch(10 * step + mesh.get_local_rank("dp"))
        pipeline.step(*([x] if rank == 0 else []), target=x if rank == 1 else None, losses=losses)
        norms.append(float(sum(p.grad.square().sum() for p in parameters)))
        update(optimizer)
    for model in models:
        assert all(is_packed(m, "qkv_weight") for m in model.modules() if type(m) is QKV)
    return [loss.item() for loss in losses], norms
