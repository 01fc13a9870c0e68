"""Fused models under FlatFSDP and other engines: operands of their GEMMs, and valid orders of calls.

The other files of this folder test that they train, are saved and generate like plain ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flatfsdp import Precision, fp8, shard
from flatfsdp.compat.transformers import fuse, unfuse
from flatfsdp.contract.packed import is_packed, packed_tensor
from flatfsdp.layers import convert
from tests.support.assertions import assert_equal, assert_raises
from tests.support.ecosystem.families import FAMILIES, adapted, needs_peft, needs_transformers
from tests.support.ecosystem.fused import FUSED, assert_near, batch, build, train
from tests.support.ecosystem.training import train_plain, train_sharded
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


@on_ranks(2)
def test_query_key_and_value_are_one_operand_without_a_copy() -> None:
    model = shard(fuse(build("Llama")), FUSED["Llama"].is_unit)
    attention, seen = model.model.layers[0].self_attn, []

    def look(*_: Any) -> None:
        weight = packed_tensor(attention, attention.packed_parameters()[0])
        assert weight is not None
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        seen.append([each.data_ptr() for each in weight.split((32, 16, 16))])
        seen.append([each.data_ptr() for each in parts])

    model.model.layers[0].register_forward_pre_hook(look)
    model(**batch())
    assert seen[0] == seen[1]
    assert_raises(ValueError, "sharded already; unfuse it before", unfuse, model)


@on_ranks(2)
def test_weights_that_only_fused_gemms_read_are_kept_in_fp8(rank: int) -> None:
    precision = Precision(compute=torch.bfloat16, fp8_weights=fp8.CurrentScaling())
    found = []
    for flag in (True, False):
        options: dict[str, Any] = {"optimize_backward_concat": flag, "precision": precision}
        model = shard(fuse(build("Llama")), FUSED["Llama"].is_unit, **options)
        tokens = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(rank))
        with fp8.autocast(recipe=fp8.DelayedScaling(reduce_amax=False)):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        with torch.no_grad(), fp8.autocast(recipe=fp8.CurrentScaling()):
            assert model.eval()(input_ids=tokens, labels=tokens).loss.isfinite()
            model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
            with pytest.raises(RuntimeError, match="its weights are kept in FP8, which transformers cannot"):
                model(input_ids=tokens)
    assert_equal(*found)


@pytest.mark.parametrize("name", ["BERT", "T5"])
@on_ranks(2)
def test_other_models_are_refused_and_stay(name: str) -> None:
    model = FAMILIES[name].build()
    classes = [type(module) for module in model.modules()]
    assert_raises(ValueError, r"has no layer that is fused; .* shard any other model without it", fuse, model)
    assert [type(module) for module in model.modules()] == classes


# ---- the order of calls ---------------------------------------------------------------------------------


@needs_peft
@on_ranks(2)
def test_adapters_train_over_a_frozen_pack(rank: int, world_size: int) -> None:
    model = shard(adapted(fuse(build("Llama")), r=16), FUSED["Llama"].is_unit)
    expected = train(adapted(build("Llama"), r=16), range(world_size), is_sharded=False)
    assert_near(train(model, [rank], is_sharded=True)[4:], expected[4 * world_size :], tolerance=1e-4)
    assert is_packed(model.base_model.model.model.layers[0].self_attn, "qkv_weight")


TOO_LATE = {
    ("shard", "fuse"): "is sharded already; fuse first, then shard",
    ("shard", "convert"): "is sharded already; convert first, then shard",
    ("shard", "adapt"): "brings parameter .*LoRA",
}
"""Calls in an invalid order, and the message of the error."""


@needs_peft
@on_ranks(2)
def test_calls_in_any_order_are_the_same_or_raise(rank: int, world_size: int) -> None:
    family = FUSED["Llama"]
    calls: dict[str, Callable[[Any], Any]] = {
        "fuse": fuse,
        "convert": lambda model: convert(model, lambda _, name: "_proj" in name),
        "adapt": lambda model: adapted(getattr(model, "module", model), r=4),
        "shard": lambda model: shard(model, family.is_unit),
    }
    expected = train_plain(calls["adapt"](family.build()), rank, world_size, steps=1).losses
    trained = []
    for order in itertools.permutations(calls):
        model = family.build()
        for index, name in enumerate(order):
            reasons = [TOO_LATE[before, name] for before in order[:index] if (before, name) in TOO_LATE]
            if reasons:
                assert_raises((TypeError, ValueError), "|".join(reasons), calls[name], model)
                break
            model = calls[name](model)
        else:
            trained.append(order)
            losses = train_sharded(model, rank, steps=1).losses
            assert losses == pytest.approx(expected, rel=1e-5)
    assert len(trained) == 6 and all(order[-1] == "shard" for order in trained)


# ---- other parallelisms ---------------------------------------------------------------------------------


def parallel(model: Any) -> Any:
    """Splits a model with PyTorch's tensor parallelism over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column, row = ColwiseParallel(), RowwiseParallel()
    for layer in model.model.layers:
        plan: dict[str, Any] = {f"self_attn.{name}_proj": column for name in "qkv"}
        plan |= {"mlp.gate_proj": column, "mlp.up_proj": column, "self_attn.o_proj": row}
        parallelize_module(layer, mesh, plan | {"mlp.down_proj": row})
    ends = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    ends["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    return parallelize_module(model, mesh, ends)


def by_fsdp2(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "calls",
    [(fuse, parallel), (parallel, fuse), (fuse, by_fsdp2), (fuse, DistributedDataParallel)],
    ids=["fused, tensor-parallel", "tensor-parallel, fused", "fully_shard", "DDP"],
)
@on_ranks(2)
def test_without_flatfsdp(calls: tuple[Callable[[Any], Any], ...]) -> None:
    """Tensor-parallel parts are left to transformers; data-parallel engines see one fused model."""
    model, plain = build("Llama"), build("Llama")
    for call in calls:
        model = call(model)
    found = []
    for each in (model, plain):
        loss = each(**batch()).loss
        loss.backward()
        grads = [p.grad for p in each.parameters()]
        found.append([loss, *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)])
    assert_near(*found)


@on_ranks(2)
def test_after_another_engine() -> None:
    assert_raises(ValueError, "is sharded by fully_shard already; fuse first", fuse, by_fsdp2(build("Llama")))
    with pytest.raises(ValueError, match="is a DTensor; FlatFSDP shards plain dense tensors"):
        shard(parallel(fuse(build("Llama"))), FUSED["Llama"].is_unit)


@on_ranks(2)
def test_beside_tensor_parallel_layers(rank: int) -> None:
    """Parameters that no layer declares as split are the same on all ranks of a tp_group."""
    groups = [dist.new_group([each]) for each in range(2)]
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(groups[rank], "cpu"),
        "tp_group": dist.group.WORLD,
    }
    found = []
    for flag in (True, False):
        options["optimize_backward_concat"] = flag
        model = shard(fuse(build("Llama")), FUSED["Llama"].is_unit, **options)
        found.append(train(model, [0], is_sharded=True))
        assert is_packed(model.model.layers[0].self_attn, "qkv_weight")
    for each in (found[1], train(fuse(build("Llama")), [0], is_sharded=False)):
        assert_equal(found[0], each)


@on_ranks(2)
def test_a_hook_on_the_head_sees_logits() -> None:
    model = shard(fuse(build("Llama")), FUSED["Llama"].is_unit)
    shapes = []
    model.lm_head.register_forward_hook(lambda _, args, out: shapes.append(out.shape))
    loss = model(**batch()).loss
    assert shapes == [(2, 9, 64)]
    assert_near([loss], [build("Llama")(**batch()).loss])
