"""Parameters that one GEMM reads as one operand: what a backward that asks for some of them gets."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatfsdp import Debug, FlatFSDP, Precision, auto_wrap, by_class, microbatches
from flatfsdp.comm.ranks import ALONE
from flatfsdp.contract.main_grad import CLAIM_MAIN_GRAD
from flatfsdp.contract.packed import Pack, is_packed, packed_tensor
from flatfsdp.engine.build.build_unit import bindings_of
from flatfsdp.flat.layout import Role
from flatfsdp.options import Policy
from tests.support.joint_layers import QKV, ROWS, WIDTH, Layer, Net, OneWeight, batch, loss_of
from tests.support.models import FLAGS

IN_FP8 = Policy(Precision(fp8_weights="in_layers"))
FUSED = pytest.mark.parametrize("fuse", [False, True, "two_pass"])


def wrapped(flag: bool, fuse: Any = True, **options: Any) -> FlatFSDP:
    return auto_wrap(Net(fuse=fuse), by_class(Layer), optimize_backward_concat=flag, **options)


def plain_grads(x: Tensor, *args: str) -> dict[str, Tensor]:
    net = Net(fuse=False)
    loss_of(net, x, *args).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def assert_plain_grad(x: Tensor) -> None:
    """The gradient of this batch is the plain model's."""
    y = batch(0).requires_grad_()
    loss_of(Net(fuse=False), y).backward()
    assert torch.equal(x.grad, y.grad)


def landed(model: FlatFSDP) -> list[bool]:
    """Whether something has landed in each slot of the layers."""
    groups = (group for layer in model.module.layers for group in layer.fsdp_state.groups)
    return [written for group in groups for written in group.state.written]


# ---- a backward that asks for some gradients --------------------------------------------------------------


@FLAGS
@FUSED
def test_gradients_of_inputs_alone_write_nothing(flag: bool, fuse: Any) -> None:
    model, x = wrapped(flag, fuse), batch(0).requires_grad_()
    with model.no_sync():
        (x.grad,) = torch.autograd.grad(loss_of(model, x), x)
    assert_plain_grad(x)
    assert not any(landed(model))


@FLAGS
@FUSED
def test_a_backward_to_one_part_brings_that_parts_gradient(flag: bool, fuse: Any) -> None:
    """It must not write the pack's gradient into main_grad, where parts that got none would be reduced."""
    model, x = wrapped(flag, fuse, reshard_after_forward=False), batch(0)
    part = model.module.layers[1].module.qkv.parts["k"].weight
    name = "layers.1.qkv.parts.k.weight"
    with model.no_sync():
        loss = loss_of(model, x)
        if flag:
            loss.backward(inputs=[part])
            grad = part.main_grad
        else:
            (grad,) = torch.autograd.grad(loss, part)
    torch.testing.assert_close(grad, plain_grads(x)[name])
    assert sum(landed(model)) == int(flag), "a part that nobody asked for has a gradient"


@FUSED
def test_parts_frozen_between_forward_and_backward_get_nothing(fuse: Any) -> None:
    model, x = wrapped(True, fuse), batch(0).requires_grad_()
    loss = loss_of(model, x)
    for layer in model.module.layers:
        layer.requires_grad_(False)
    loss.backward()
    assert_plain_grad(x)
    grads = [layer.fsdp_state.groups[0].master.flat.grad for layer in model.module.layers]
    assert not any(grad.any() for grad in grads if grad is not None)
    assert not any(landed(model))


@FLAGS
@FUSED
def test_a_part_written_between_forward_and_backward_is_named(flag: bool, fuse: Any) -> None:
    """The pack, which autograd has saved, does not count writes to its parts."""
    model = wrapped(flag, fuse)
    loss = loss_of(model, batch(0))
    with torch.no_grad():
        model.module.layers[0].qkv.parts["q"].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter .*layers.0.qkv.parts.q.weight.* was written to"):
        loss.backward()


# ---- one memory -------------------------------------------------------------------------------------------


@FLAGS
@pytest.mark.parametrize("reshard", [False, True])
def test_joints_are_the_memory_of_their_parts(flag: bool, reshard: bool) -> None:
    model = wrapped(flag, reshard_after_forward=reshard)
    layer = model.module.layers[0].module
    with model.no_sync():
        for seed in range(2):
            loss = loss_of(model, batch(seed))
            weight, bias = layer.qkv.found
            parts = list(layer.qkv.parts.values())
            assert weight.shape == (sum(ROWS.values()), WIDTH) and bias.shape == (sum(ROWS.values()),)
            for pack, kind in ((weight, "weight"), (bias, "bias")):
                rows = pack.split(list(ROWS.values()))
                tensors = [getattr(part, kind) for part in parts]
                assert [r.data_ptr() for r in rows] == [t.data_ptr() for t in tensors]
                assert all(torch.equal(r, t) for r, t in zip(rows, tensors, strict=True))
            loss.backward()
            target, first = CLAIM_MAIN_GRAD.of(weight)()
            assert not first and target.shape == weight.shape and target.is_contiguous()
            grads = [part.weight.get_main_grad() for part in parts]
            assert [r.data_ptr() for r in target.split(list(ROWS.values()))] == [g.data_ptr() for g in grads]
            # The same tensors serve all forwards.
            again = packed_tensor(layer.qkv, layer.qkv.packed_parameters()[0])
            assert again is weight


@FLAGS
def test_while_they_are_sharded_packs_are_nan(flag: bool) -> None:
    params = wrapped(flag).module.layers[0].fsdp_state.groups[0].params
    weight = params.pack(0)
    assert weight.isfinite().all()
    params.conceal()
    assert params.pack(0).isnan().all() and params.pack(0).shape == (sum(ROWS.values()), WIDTH)
    params.show()
    assert params.pack(0) is weight


@FLAGS
def test_a_frozen_group_has_packs_without_gradients(flag: bool) -> None:
    model = wrapped(flag)
    model.requires_grad_(False)
    x = batch(0).requires_grad_()
    loss_of(model, x).backward()
    layer = model.module.layers[0].module.qkv
    assert not any(pack.requires_grad for pack in layer.found)
    assert layer.found[0].data_ptr() == layer.parts["q"].weight.data_ptr()
    assert_plain_grad(x)
    model.requires_grad_(True)
    with model.no_sync():
        loss_of(model, batch(1)).backward()
    assert all(pack.requires_grad for pack in layer.found)
    assert all(landed(model))


# ---- gradients of parts and of packs in one step ---------------------------------------------------------


@FLAGS
@FUSED
@pytest.mark.parametrize("order", [("", "k", ""), ("k", "", ""), ("", "", "k"), ("k", "v", "k")])
def test_a_part_used_by_itself_in_one_microbatch(flag: bool, fuse: Any, order: tuple[str, ...]) -> None:
    """Slots in which nothing has landed yet may hold anything; `poison` makes it NaN."""
    model, net = wrapped(flag, fuse, debug=Debug(poison_on_free=True)), Net(fuse=False)
    inputs = list(zip(map(batch, range(3)), order, strict=True))
    for (x, alone), _ in zip(inputs, microbatches(model, [*order]), strict=True):
        loss_of(model, x, alone).backward()
    for x, alone in inputs:
        loss_of(net, x, alone).backward()
    for mine, plain in zip(model.module.layers, net.layers, strict=True):
        (group,) = mine.fsdp_state.groups
        (joint,) = group.master.grads
        views = group.layout.views(joint)
        for slot, grad in zip(group.layout.slots, views, strict=True):
            expected = plain.get_parameter(slot.name).grad
            expected = torch.zeros(slot.shape) if expected is None else expected
            torch.testing.assert_close(grad, expected, msg=slot.name)


def twice(model: nn.Module, x: Tensor) -> None:
    """A layer that is used twice in one graph."""
    loss_of(model, model(x)).backward()


def retained(model: nn.Module, x: Tensor) -> None:
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def interleaved(model: nn.Module, x: Tensor) -> None:
    """Runs forwards and backwards in a pipeline's order."""
    losses = [loss_of(model, x), loss_of(model, 2 * x)]
    for loss in losses:
        loss.backward()


@FLAGS
@FUSED
@pytest.mark.parametrize("use", [twice, retained, interleaved])
def test_graphs_that_share_a_pack(flag: bool, fuse: Any, use: Any) -> None:
    model, net = wrapped(flag, fuse), Net(fuse=False)
    with model.no_sync():
        use(model, batch(0))
    use(net, batch(0))
    for mine, plain in zip(model.module.layers, net.layers, strict=True):
        for name, part in mine.module.qkv.parts.items():
            torch.testing.assert_close(part.weight.get_main_grad(), plain.qkv.parts[name].weight.grad)


@FLAGS
def test_hooks_of_parts_see_and_change_their_gradients(flag: bool) -> None:
    model, seen = wrapped(flag, False), []
    part = model.module.layers[0].module.qkv.parts["v"].weight
    part.register_hook(lambda grad: seen.append(grad.shape) or 2 * grad)
    with model.no_sync():
        loss_of(model, batch(0)).backward()
    assert seen == [part.shape]
    expected = plain_grads(batch(0))["layers.0.qkv.parts.v.weight"]
    torch.testing.assert_close(part.get_main_grad(), 2 * expected)


def test_joints_land_as_soon_as_they_are_ready() -> None:
    """Not after everything that is younger than their node: the first layer's gradients come last."""
    model = wrapped(True)
    order: list[str] = []
    for index, layer in enumerate(model.module.layers):
        part = layer.module.qkv.parts["q"].weight
        part.register_post_accumulate_grad_hook(lambda _, index=index: order.append(f"pack {index}"))
        layer.module.norm.weight.register_hook(lambda _, index=index: order.append(f"norm {index}"))
    loss_of(model, batch(0)).backward()
    assert order == ["pack 1", "norm 1", "pack 0", "norm 0"]


# ---- what can be one operand ------------------------------------------------------------------------------


def test_models_that_declare_no_packs_are_laid_out_as_they_were() -> None:
    model = wrapped(True)
    with_packs = model.module.layers[0].fsdp_state.groups[0].layout
    plain = auto_wrap(Net(OneWeight), by_class(Layer)).module.layers[0].fsdp_state.groups[0].layout
    assert [pack.name for pack in with_packs.packs] == ["qkv.qkv_weight", "qkv.qkv_bias"]
    assert plain.packs == ()
    assert [run.slots for run in plain.runs] == [range(i, i + 1) for i in range(len(plain.slots))]
    # The same bytes in the same places.
    assert with_packs.numel == plain.numel
    names = [slot.name for slot in with_packs.slots]
    kinds = [f"qkv.parts.{part}.{kind}" for kind in ("weight", "bias") for part in ROWS]
    assert names == ["norm.weight", "norm.bias", *kinds, "out.weight", "out.bias"]


def test_memory_report_knows_no_copy() -> None:
    precision = Precision(compute=torch.bfloat16)
    models = (auto_wrap(Net(kind), by_class(Layer), precision=precision) for kind in (QKV, OneWeight))
    with_packs, plain = (model.memory_report() for model in models)
    assert with_packs == plain


def frozen_beside_trained() -> tuple[Net, type]:
    return Net(freezes=("layers.0.qkv.parts.k",)), Layer


def of_several_dtypes() -> tuple[Net, type]:
    net = Net()
    net.layers[0].qkv.parts["k"].bfloat16()
    return net, Layer


def of_odd_sizes() -> tuple[Net, type]:
    net = Net()
    net.layers[0].qkv = QKV(rows={"q": 48, "k": 17, "v": 15})
    net.layers[0].qkv.parts["k"].weight = nn.Parameter(torch.randn(17, 3))
    return net, Layer


def in_several_units() -> tuple[Net, type]:
    return Net(), nn.Linear


def tied_to_each_other() -> tuple[Net, type]:
    net = Net()
    parts = net.layers[0].qkv.parts
    parts["v"].weight, parts["v"].bias = parts["k"].weight, parts["k"].bias
    return net, Layer


@pytest.mark.parametrize(
    "make", [frozen_beside_trained, of_several_dtypes, of_odd_sizes, in_several_units, tied_to_each_other]
)
def test_what_cannot_be_one_operand_is_none(make: Any) -> None:
    net, unit = make()
    assert all(not is_packed(net.layers[0].qkv, name) for name in ("qkv_weight", "qkv_bias"))
    model = auto_wrap(net, by_class(unit), optimize_backward_concat=True)
    layer = next(m for m in model.modules() if isinstance(m, QKV))
    weight, bias = (packed_tensor(layer, pack) for pack in layer.packed_parameters())
    assert weight is None and not is_packed(layer, "qkv_weight")
    assert bias is None
    if make is not of_odd_sizes:
        loss_of(model, batch(0)).backward()


def in_fp8(layer: Layer) -> set[str]:
    bindings = bindings_of(layer, list(layer.parameters()), ALONE, IN_FP8)
    return {slot.name for b in bindings if b.layout.role is Role.FP8 for slot in b.layout.slots}


def test_parts_are_stored_in_fp8_together_or_not_at_all() -> None:
    names = [f"qkv.parts.{name}.weight" for name in ROWS]
    assert in_fp8(Layer()) == set(names)
    assert in_fp8(frozen_beside_trained()[0].layers[0]) == set()
    # Somebody else reads one of them, in what precision it likes.
    tied = Layer()
    tied.other = nn.Linear(WIDTH, ROWS["v"], bias=False)
    tied.other.weight = tied.qkv.parts["v"].weight
    assert in_fp8(tied) == set()
    bindings = bindings_of(tied, list(tied.parameters()), ALONE, IN_FP8)
    assert [pack.name for b in bindings for pack in b.layout.packs] == ["qkv.qkv_weight", "qkv.qkv_bias"]


def test_a_pack_of_one_part_may_be_stored_in_fp8() -> None:
    layer = Layer(QKV, rows={"q": 64})
    assert in_fp8(layer) == {"qkv.parts.q.weight"}
    assert not is_packed(layer.qkv, "qkv_weight")


def test_a_parameter_is_in_one_pack(caplog: pytest.LogCaptureFixture) -> None:
    """The first layer that asks for it has it; another with the same parts has the same pack."""
    layer = Layer()
    layer.again, layer.swapped = QKV(), QKV()
    layer.again.parts = layer.qkv.parts
    layer.again._of_kind = layer.qkv._of_kind
    layer.swapped._of_kind = {
        kind: Pack("swapped", pack.parts[::-1]) for kind, pack in layer.qkv._of_kind.items()
    }
    model = FlatFSDP(layer)
    found = [
        packed_tensor(each, each.packed_parameters()[0]) for each in (layer.qkv, layer.again, layer.swapped)
    ]
    assert found[0] is found[1] and found[2] is None
    assert "one of its parameters is in another pack" in caplog.text
    assert loss_of(model, batch(0)).isfinite()


def test_without_an_engine_parts_are_concatenated() -> None:
    layer = Net().layers[0].qkv
    pack = layer.packed_parameters()[0]
    weight = packed_tensor(layer, pack)
    assert torch.equal(weight, torch.cat([part.weight for part in layer.parts.values()]))
    weight.sum().backward()
    assert all(torch.equal(p.weight.grad, torch.ones_like(p.weight)) for p in layer.parts.values())


def test_inside_summon_full_params_the_parts_are_concatenated() -> None:
    model = wrapped(True)
    layer = model.module.layers[0].module.qkv
    with model.summon_full_params():
        layer.parts["k"].weight.data.fill_(2.0)
        weight = packed_tensor(layer, layer.packed_parameters()[0])
        assert torch.equal(weight, torch.cat([part.weight for part in layer.parts.values()]))
    loss_of(model, batch(0))
    assert layer.found[0].split(list(ROWS.values()))[1].eq(2.0).all()


@FLAGS
def test_a_group_that_was_built_frozen_can_be_trained(flag: bool) -> None:
    net = Net()
    net.layers.requires_grad_(False)
    model = auto_wrap(net, by_class(Layer), optimize_backward_concat=flag)
    loss_of(model, batch(0).requires_grad_()).backward()
    assert not model.module.layers[0].module.qkv.found[0].requires_grad
    model.requires_grad_(True)
    with model.no_sync():
        loss_of(model, batch(0)).backward()
    expected = plain_grads(batch(0))
    for index, layer in enumerate(model.module.layers):
        for name, part in layer.module.qkv.parts.items():
            wanted = expected[f"layers.{index}.qkv.parts.{name}.weight"]
            torch.testing.assert_close(part.weight.main_grad, wanted)


@FLAGS
def test_a_model_with_packs_is_freed(flag: bool) -> None:
    model = wrapped(flag)
    loss_of(model, batch(0)).backward()
    alive = weakref.ref(model.module.layers[0]), weakref.ref(model.module.layers[0].module.qkv.parts["q"])
    del model
    gc.collect()
    assert [each() for each in alive] == [None, None]
