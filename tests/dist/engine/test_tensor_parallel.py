"""FlatFSDP around tensor-parallel layers: gradients are those of one process, with every policy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from flatfsdp import Precision, checkpoint, param_groups, shard
from flatfsdp.comm.ranks import Ranks
from flatfsdp.contract.placement import Placement
from flatfsdp.contract.tensor_parallel import declare_split, declare_whole
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import ELEMENT_ALIGNMENT
from flatfsdp.layers import Linear, RMSNorm
from tests.support.models import Trace, backward, data, plain_net, same_trace, update, whole_grads
from tests.support.plain_layers import assert_near
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tp_models import ParallelMLP, ParallelNet, build_tp, data_rank, tp_mesh

STEPS, COUNT = 2, 2
BF16 = Precision(compute=torch.bfloat16, accumulate=torch.bfloat16, reduce=torch.bfloat16)


def train(model: Any, replica: int) -> tuple[Trace, dict[str, Tensor]]:
    """Trains two steps of SGD; also returns the first step's gradients, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads, first = [], [], {}
    for batches in data(replica, STEPS, COUNT):
        losses += backward(model, batches)
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        first = first or whole_grads(model)
        update(optimizer)
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], []), first


def train_in_one_process(replicas: int, replica: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = plain_net(ParallelNet)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, first = [], {}
    for of_step in zip(*(data(r, STEPS, COUNT) for r in range(replicas)), strict=True):
        for owner, batches in enumerate(of_step):
            for tokens in batches:
                loss = model(tokens)
                (loss / replicas).backward()
                if owner == replica:
                    losses.append(loss.detach())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        update(optimizer)
    return losses, first


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 2), {}),
        ((2, 2), {"reshard_after_forward": False, "grad_sync": "every"}),
        ((2, 2), {"replicates": True}),
        ((2, 2), {"factors": (4.0, 0.5)}),
        ((2, 1, 2), {"grad_sync": "every"}),
        ((1, 4), {"cpu_offload": True}),
        ((2, 2), {"precision": BF16}),
    ],
    ids=["zero3", "zero2-every", "replicated", "factors", "hybrid-every", "tp4-offload", "bf16"],
)
@on_ranks(4)
def test_flag_off_on_fused_and_one_process_agree(world_size: int, sizes: Any, options: Any) -> None:
    mesh = tp_mesh(*sizes)
    replica, replicas = data_rank(mesh), world_size // mesh["tp"].size()
    factors = options.pop("factors", None)
    runs = []
    for flag, fused in ((False, False), (True, False), (True, True)):
        model = build_tp(mesh, optimize_backward_concat=flag, fused=fused, **options)
        if factors is not None:
            model.set_gradient_divide_factors(*factors)
        runs.append(train(model, replica))
    (off, grads), (on, _), (fused_run, _) = runs
    for other in (on, fused_run):
        assert all(same_trace(off, other).values()), same_trace(off, other)
    if options.get("precision") is not None:
        return
    losses, expected = train_in_one_process(replicas, replica)
    torch.testing.assert_close(torch.stack(off.losses), torch.stack(losses), rtol=1e-6, atol=0)
    assert grads.keys() == expected.keys()
    assert_near(grads, expected)


@on_ranks(4)
def test_a_unit_is_gathered_in_one_launch_and_partial_gradients_are_summed_once() -> None:
    mesh = tp_mesh(2, 2)
    model = build_tp(mesh, grad_sync="every")
    placements = Counter((prefix, group.layout.placement) for prefix, group in named_groups(model))
    of_blocks = [(f"blocks.{i}.", placement) for i in range(2) for placement in Placement]
    assert placements == Counter([("", Placement.EQUAL), *of_blocks])
    ((*batches,),) = data(data_rank(mesh), 1, 3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        backward(model, batches)
    # One launch a unit, however many groups it has; gains are summed over tp_group once a step.
    units, passes = 3, len(batches)
    assert model.fsdp_state.shared.ledger.calls["reduce"] == units * passes
    assert model.fsdp_state.shared.ledger.calls["gather"] == units * passes + 2 * passes
    assert model.fsdp_state.shared.ledger.calls["tp_all_reduce"] == 2
    assert model.fsdp_state.shared.ledger.bytes["tp_all_reduce"] == 2 * ELEMENT_ALIGNMENT * 4
    labels = [event.name for event in profiled.events() if "tp_all_reduce" in event.name]
    assert [label.split()[:3] for label in labels] == [
        ["flatfsdp.tp_all_reduce", f"blocks.{i}", "mb=2"] for i in (1, 0)
    ]


@on_ranks(4)
def test_partial_gradients_are_summed_in_fp32() -> None:
    """Gradients 1 and 2**-10 of two ranks, all communicated in bf16, keep their sum."""
    mesh = tp_mesh(2, 2)
    layer = nn.Linear(1, 1, bias=False)
    declare_whole(layer.weight, partial_grad=True)
    precision = Precision(reduce=torch.bfloat16, accumulate=torch.bfloat16)
    model = shard(layer, mesh=mesh["dp"], tp_group=mesh.get_group("tp"), precision=precision)
    part = 1.0 if mesh.get_local_rank("tp") else 2.0**-10
    model(torch.tensor([[part]])).sum().backward()
    if mesh.get_local_rank("dp") == 0:
        assert next(model.parameters()).grad == 1.0 + 2.0**-10


@on_ranks(4)
def test_parameters_that_all_ranks_have_start_equal() -> None:
    mesh = tp_mesh(2, 2)
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.fill_(mesh.get_local_rank("tp"))
    model = shard(layer, mesh=mesh["dp"], tp_group=mesh.get_group("tp"))
    assert not model.state_dict()["weight"].any()


def tp_ranks(mesh: Any) -> Ranks:
    return Ranks.of(mesh.get_group("tp"))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("parts", "[72, 20] in (36, 36)] where rank 3 has"),
        ("kind", "blocks.0.gain [3] at"),
        ("extra", "blocks.2"),
    ],
)
@on_ranks(4)
def test_a_model_that_differs_on_one_rank_raises_on_all(rank: int, what: str, expected: str) -> None:
    mesh = tp_mesh(2, 2)
    net = ParallelNet(tp_ranks(mesh), blocks=3 if (rank, what) == (3, "extra") else 2)
    if (rank, what) == (3, "parts"):
        declare_split(net.blocks[0].up_weight, 0, (24, 48))
    if (rank, what) == (3, "kind"):
        declare_whole(net.blocks[0].gain, partial_grad=False)
    model = shard(net, mesh=mesh["dp"], tp_group=mesh.get_group("tp"))
    with pytest.raises(RuntimeError, match="not the same on all ranks") as raised:
        model(torch.zeros(1, 2, dtype=torch.int64))
    assert not model.fsdp_state.shared.ledger.calls
    assert expected in str(raised.value)
    assert len({*of_all_ranks(str(raised.value))}) == 1


@on_ranks(4)
def test_groups_that_do_not_fit_are_named(rank: int, world_size: int) -> None:
    mesh = tp_mesh(2, 2)
    tp_group, ranks = mesh.get_group("tp"), tp_ranks(mesh)

    def layer() -> Linear:
        return Linear(4, 8, parallel_mode="column", tp_group=tp_group)

    def block() -> ParallelMLP:
        return ParallelMLP(ranks, fused=False)

    with pytest.raises(ValueError, match=r"up_weight.* a part of a whole of 36\+36 .* got no tp_group"):
        shard(block(), mesh=mesh["dp"])
    partial = nn.Linear(2, 2)
    declare_whole(partial.bias, partial_grad=True)
    with pytest.raises(ValueError, match=r"gradient of bias is summed over .* pass the tp_group"):
        shard(partial, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"ranks \d, \d are in tp_group and in the group that"):
        shard(block(), tp_group=tp_group)
    with pytest.raises(TypeError, match="tp_group is a DeviceMesh"):
        shard(block(), mesh=mesh["dp"], tp_group=mesh["tp"])
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    with pytest.raises(ValueError, match=r"up_weight, of shape \[36, 20\].* 36\+36 .* tp_group of 4 ranks"):
        shard(block(), mesh=DeviceMesh.from_group(alone, "cpu"), tp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"ranks \[\d, \d\] share the layer of .* got a tp_group"):
        # Swapped, and of the same sizes.
        shard(layer(), mesh=mesh["tp"], tp_group=mesh.get_group("dp"))
    with pytest.raises(ValueError, match=r"share the layer of parameter \w*weight, .* got no tp_group"):
        shard(layer(), mesh=mesh["dp"])
    copied = layer()
    # Past the layer, which would mark it.
    copied._parameters["bias"] = nn.Parameter(copied.bias.detach())
    with pytest.raises(ValueError, match="bias is of a layer that several ranks share, and does not"):
        shard(copied, mesh=mesh["dp"], tp_group=tp_group)
    megatron = nn.Linear(4, 6, bias=False)
    vars(megatron.weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=5)
    with pytest.raises(ValueError, match=r"weight, of shape \[6, 4\], is said to be a part along dim"):
        shard(megatron, mesh=mesh["dp"], tp_group=tp_group)
    parallelized = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"weight is a DTensor; .* without parallelize_module or"):
        shard(parallelized, mesh=mesh["dp"], tp_group=tp_group)
    inner = shard(nn.Linear(2, 2), mesh=mesh["dp"])
    outer = shard(nn.Sequential(inner, nn.Linear(2, 2)), mesh=mesh["dp"], tp_group=tp_group)
    with pytest.raises(ValueError, match="unit 0 needs the tp_group of its root"):
        outer(torch.zeros(1, 2))


@on_ranks(4)
def test_marks_of_others_are_understood(rank: int, world_size: int) -> None:
    """Marks of Megatron, which have no sizes, and of layers that know no ranks."""
    mesh = tp_mesh(2, 2)
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    for tp_group, shape in ((mesh.get_group("tp"), (12, 4)), (alone, (6, 4)), (None, (6, 4))):
        layer = nn.Sequential(nn.Linear(4, 6, bias=False), RMSNorm(6, sequence_parallel=tp_group is not None))
        vars(layer[0].weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=3)
        is_split = shape == (12, 4)
        model = shard(layer, mesh=mesh["dp"], tp_group=tp_group)
        placements = {group.layout.placement for group in model.fsdp_state.groups}
        assert placements == ({Placement.SPLIT, Placement.PARTIAL} if is_split else {Placement.EQUAL})
        assert checkpoint.full_state_dict(model)["0.weight"].shape == shape
        # Rank 0 has the first third of each third.
        thirds = checkpoint.full_state_dict(model)["0.weight"].view(3, -1, 4)
        own = model.state_dict()["0.weight"].view(3, -1, 4)
        first = mesh.get_local_rank("tp") * own.shape[1] if is_split else 0
        assert torch.equal(thirds[:, first : first + own.shape[1]], own)


@on_ranks(4)
def test_reports_tell_placements_apart_and_groups_are_chosen_by_whole_shapes() -> None:
    mesh = tp_mesh(2, 2)
    model = build_tp(mesh)
    rows = [row for row in model.memory_report().rows if row.buffer == "master shard"]
    sizes = Counter[Placement]()
    for _, group in named_groups(model):
        sizes[group.layout.placement] += group.master.flat.nbytes
    assert len(sizes) == 3 and {row.placement: row.total for row in rows} == sizes
    text = str(model.memory_report())
    assert "master shard, split" in text and "flat buffer, equal" in text
    shapes: dict[str, tuple[int, ...]] = {}
    param_groups(model, [{"params": lambda name, shape: shapes.setdefault(name, shape) is not None}])
    assert shapes == {name: tuple(p.shape) for name, p in ParallelNet().named_parameters()}
