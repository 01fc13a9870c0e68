"""Layers that are made with a tp_size and get their tp_group later, as Transformer Engine allows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import shard
from flatfsdp.layers import Embedding, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer
from tests.support.ranks import on_ranks

WIDTH, TOKENS, BATCH = 32, 16, 2

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(Linear, WIDTH, 48, parallel_mode="column"),
    "row": partial(Linear, WIDTH, 48, parallel_mode="row"),
    "LayerNormLinear": partial(LayerNormLinear, WIDTH, 48, parallel_mode="column"),
    "LayerNormMLP": partial(LayerNormMLP, WIDTH, 64, activation="swiglu", set_parallel_mode=True),
    "TransformerLayer": partial(
        TransformerLayer, WIDTH, 64, 4, set_parallel_mode=True, qk_norm_type="RMSNorm", output_layernorm=True
    ),
    "Embedding": partial(Embedding, 64, WIDTH, padding_idx=40),
}


def input_of(name: str, sequence_parallel: bool) -> Tensor:
    if name == "Embedding":
        return torch.randint(0, 64, (TOKENS, BATCH))
    part = 2 if sequence_parallel and name != "row" else 1
    return torch.randn(TOKENS // part, BATCH, WIDTH // 2 if name == "row" else WIDTH)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@on_ranks(2)
def test_the_same_as_with_a_group_from_the_start(rank: int, name: str, sequence_parallel: bool) -> None:
    make = partial(LAYERS[name], sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    first = make(tp_group=dist.group.WORLD)
    late = make(tp_size=2)
    alone = DeviceMesh.from_group(dist.new_group([rank], use_local_synchronization=True), "cpu")
    with pytest.raises(RuntimeError, match=r"tp_size is 2.*set_tensor_parallel_group"):
        late(input_of(name, sequence_parallel))
    with pytest.raises(RuntimeError, match=r"tp_size is 2.*set_tensor_parallel_group"):
        shard(late, mesh=alone, tp_group=dist.group.WORLD)
    other = copy.deepcopy(late)
    torch.manual_seed(0)
    other.set_tensor_parallel_group(dist.group.WORLD)
    torch.manual_seed(0)
    for _ in range(2):  # the second time changes nothing
        late.set_tensor_parallel_group(dist.group.WORLD)
    for (key, a), b in zip(first.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b) and vars(a) == vars(b), key
        assert torch.equal(a, other.get_parameter(key))
    results = []
    for layer in (first, late):
        torch.manual_seed(7 + rank)
        x = input_of(name, sequence_parallel)
        torch.manual_seed(7)  # of dropout, alike on all ranks
        out = layer(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks(2)
def test_what_was_loaded_stays() -> None:
    make = partial(LAYERS["TransformerLayer"])
    source, late = make(tp_group=dist.group.WORLD), make(tp_size=2)
    late.load_state_dict(source.state_dict())
    late.set_tensor_parallel_group(dist.group.WORLD)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), late.parameters(), strict=True))
    on_meta = make(tp_size=2, device="meta")
    on_meta.set_tensor_parallel_group(dist.group.WORLD)
    assert all(vars(a) == vars(b) for a, b in zip(source.parameters(), on_meta.parameters(), strict=True))


@on_ranks(2)
def test_a_loop_over_all_modules_may_tell_them() -> None:
    """Transformer Engine has such a loop; norms are among the modules, and have no tp_size."""
    layer = LAYERS["TransformerLayer"](tp_size=2)
    for module in layer.modules():
        if hasattr(module, "set_tensor_parallel_group"):
            module.set_tensor_parallel_group(dist.group.WORLD)
    layer(input_of("TransformerLayer", False))


@on_ranks(2)
def test_groups_that_do_not_fit(rank: int) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    for size, group, message in (
        (2, alone, "tp_size is 2, and tp_group has 1 ranks"),
        (4, dist.group.WORLD, "tp_size is 4, and tp_group has 2 ranks"),
        (1, dist.group.WORLD, "made for one rank, and the group has 2; pass tp_size=2"),
    ):
        with pytest.raises(ValueError, match=message):
            Linear(WIDTH, 48, parallel_mode="column", tp_size=size).set_tensor_parallel_group(group)
    layer = Linear(WIDTH, 48, parallel_mode="column", tp_group=dist.group.WORLD)
    layer.set_tensor_parallel_group(dist.group.WORLD)
    with pytest.raises(TypeError, match=r"process groups cannot be pickled; save state_dict"):
        pickle.dumps(layer)
    whole = Linear(WIDTH, 48)
    whole.set_tensor_parallel_group(alone)
    whole.set_tensor_parallel_group(None)


@on_ranks(4)
def test_groups_of_other_ranks_do_not_fit(rank: int) -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    first, second = (
        next(group for group in two if rank in dist.get_process_group_ranks(group))
        for two in (pairs[:2], pairs[2:])
    )
    for layer in (
        Linear(WIDTH, 48, parallel_mode="column", tp_group=first),
        TransformerLayer(WIDTH, 64, 4, set_parallel_mode=True, tp_size=2),
    ):
        layer.set_tensor_parallel_group(first)
        with pytest.raises(ValueError, match=r"ranks .* share it already, not "):
            layer.set_tensor_parallel_group(second)
