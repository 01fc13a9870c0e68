"""Packs over several ranks have the bits of one weight, for both flags."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from flatfsdp import Debug, Precision, by_class, checkpoint, microbatches, shard
from flatfsdp.checkpoint.local import consolidate, load_local_state_dict, local_metadata, local_state_dict
from flatfsdp.contract.operand import FP8_OPERAND
from flatfsdp.contract.packed import is_packed
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.engine.whole.units import named_groups
from flatfsdp.flat.layout import Role
from flatfsdp.fp8 import CurrentScaling
from flatfsdp.optim import AdamW
from tests.support.against_plain import assert_equal
from tests.support.joint_layers import QKV, ROWS, Layer, Net, OneWeight, batch, loss_of
from tests.support.models import update
from tests.support.ranks import of_all_ranks, on_ranks

RECIPE = CurrentScaling()
TOGETHER = ("", "", "")
"""Three microbatches, in which the parts are one operand."""
Record = tuple[list[Tensor], dict[str, Tensor]]


def build(
    kind: type[QKV] = QKV, fuse: Any = True, freezes: tuple[str, ...] = (), bias: bool = True, **options: Any
) -> Any:
    net = Net(kind, fuse, freezes, bias=bias)
    return shard(net, by_class(Layer), **{"debug": Debug(poison_on_free=True), **options})


def train(
    model: Any,
    rank: int,
    alone: tuple[str, ...] = TOGETHER,
    recipe: Any = None,
    frozen_in: int = -1,
    optimizer_class: Any = torch.optim.AdamW,
) -> Record:
    """Losses, norms of the inputs' gradients, and parameters, of three steps.

    Args:
        alone: of each microbatch: the part that is used by itself, or "".
        frozen_in: the step in which nothing is trained.
    """
    optimizer = optimizer_class(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        if frozen_in >= 0:
            model.requires_grad_(step != frozen_in)
        for index, part in enumerate(microbatches(model, alone)):
            x = batch(100 * rank + 10 * step + index).requires_grad_()
            loss = loss_of(model, x, part, recipe=recipe)
            loss.backward()
            losses += [loss.detach(), x.grad.norm()]
        update(optimizer)
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def in_one_weight(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a model of `OneWeight` that correspond to these parts."""
    pack = {}
    for layer, kind in itertools.product(range(2), ("weight", "bias")):
        parts = [state.pop(f"layers.{layer}.qkv.parts.{name}.{kind}") for name in ROWS]
        pack[f"layers.{layer}.qkv.qkv_{kind}"] = torch.cat(parts)
    return state | pack


def assert_same(one: Record, other: Record) -> None:
    assert all(loss.isfinite() for loss in one[0])
    assert [a.item() for a in one[0]] == [b.item() for b in other[0]]
    assert_equal(one[1], other[1])


# ---- the same bits ------------------------------------------------------------------------------------


SETTINGS: list[dict[str, Any]] = [
    {"optimize_backward_concat": flag, "reshard_after_forward": reshard}
    for flag, reshard in itertools.product((True, False), repeat=2)
]


def stored_in_fp8(compute: torch.dtype = torch.float32) -> Precision:
    return Precision(compute=compute, fp8_weights=RECIPE)


BF16 = torch.bfloat16
FROZEN = tuple(f"layers.{layer}.qkv" for layer in range(2))
"""All but norms and outputs, which are trained like adapters."""
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fp32": (2, {"fuse": False}, {}),
    "fused": (2, {"precision": Precision(compute=BF16)}, {}),
    # On four ranks shard boundaries may cut packs anywhere.
    "fused, 4 ranks": (4, {"precision": Precision(compute=BF16)}, {}),
    "nothing is trained in one step": (2, {}, {"frozen_in": 1}),
    "stored in FP8": (2, {"fuse": False, "precision": stored_in_fp8()}, {"recipe": RECIPE}),
    "stored in FP8, fused, 4 ranks": (4, {"precision": stored_in_fp8()}, {"recipe": RECIPE}),
    "an optimizer that takes the amaxes": (
        *(2, {"precision": stored_in_fp8(BF16)}),
        {"recipe": RECIPE, "optimizer_class": AdamW},
    ),
    "stored in FP8, frozen": (2, {"freezes": FROZEN, "precision": stored_in_fp8(BF16)}, {"recipe": RECIPE}),
}
"""Number of ranks; options of the model, and of its training."""


@pytest.mark.parametrize(("world_size", "options", "training"), CASES.values(), ids=CASES)
@on_ranks()
def test_the_same_bits_as_one_weight(rank: int, options: dict[str, Any], training: dict[str, Any]) -> None:
    """Weights that are stored in FP8 have one scale a pack."""
    expected = train(build(OneWeight, **options), rank, **training)
    for setting in SETTINGS:
        model = build(**options, **setting)
        losses, state = train(model, rank, **training)
        assert_same((losses, in_one_weight(state)), expected)
        assert all(is_packed(m, "qkv_weight") for m in model.modules() if isinstance(m, QKV))
        stored = [group for _, group in named_groups(model) if group.layout.role is Role.FP8]
        assert [len(group.layout.slots) for group in stored] == ([3, 3] if "recipe" in training else [])
        for group in stored:
            scale = group.compute_shard.scales.scale
            assert len(scale) == 3 and len(scale.unique()) == 1


@pytest.mark.parametrize("fuse", [False, True])
@on_ranks(2)
def test_parts_used_alone_in_one_microbatch(rank: int, fuse: Any) -> None:
    first, *others = SETTINGS
    programs = (("k", "", ""), ("", "k", ""), ("", "", "v"), ("q", "k", "v"))
    for alone, other in zip(programs, itertools.cycle(others)):
        run, expected = (train(build(fuse=fuse, **each), rank, alone) for each in (other, first))
        assert_same(run, expected)


@on_ranks(2)
def test_a_frozen_part_is_multiplied_apart(rank: int) -> None:
    freezes = tuple(f"layers.{layer}.qkv.parts.k" for layer in range(2))
    runs = []
    for options in SETTINGS:
        model = build(freezes=freezes, **options)
        runs.append(train(model, rank))
        layer = next(m for m in model.modules() if isinstance(m, QKV))
        assert layer.found == (None, None)
    for run in runs[1:]:
        assert_same(run, runs[0])
    assert torch.equal(runs[0][1]["layers.0.qkv.parts.k.weight"], Net().layers[0].qkv.parts["k"].weight)


def sum_of_squares(layer: Any) -> Tensor:
    """The sum of squares of this rank's part of the gradients."""
    return sum(plain(parameter.grad).square().sum() for parameter in layer.parameters())


def two_microbatches(model: Any, layers: Any, rank: int, batches: Any) -> None:
    """Freezes `layers` between the last forward and its backward."""
    for index, _ in enumerate(batches):
        # The input requires no gradient: nothing but gradients of parameters is awaited.
        loss = loss_of(model, batch(10 * rank + index))
        for layer in layers if index else ():
            layer.requires_grad_(False)
        loss.backward()


@on_ranks(2)
def test_layers_frozen_between_forward_and_backward_get_nothing_more(rank: int) -> None:
    """Layers keep the gradients of the microbatch before, as in PyTorch."""
    for frozen in (1, 2):
        net = Net(fuse=False)
        two_microbatches(net, net.layers[:frozen], rank, range(2))
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad.div_(2))
        expected = torch.stack([sum_of_squares(layer) for layer in net.layers])
        for kind, fuse, options in itertools.product((QKV, OneWeight), (False, True), SETTINGS):
            # Not poisoned: what is freed too early has no memory, and raises.
            model = build(kind=kind, fuse=fuse, debug=Debug(), **options)
            two_microbatches(model, model.layers[:frozen], rank, microbatches(model, range(2)))
            found = torch.stack([sum_of_squares(layer) for layer in model.layers])
            dist.all_reduce(found)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputation(rank: int, reentrant: bool) -> None:
    expected = train(build(), rank)
    for options in SETTINGS:
        model = build(**options)
        model.call = partial(recomputed, use_reentrant=reentrant)
        assert_same(train(model, rank), expected)


# ---- stored in FP8 ------------------------------------------------------------------------------------


@on_ranks(2)
def test_operands_are_views_of_the_flat_buffer(rank: int) -> None:
    model = build(precision=stored_in_fp8(), reshard_after_forward=False)
    seen = []

    def look(layer: QKV, *_: Any) -> None:
        (weight, _) = layer.found
        stored = next(g for p, g in named_groups(model) if p == "layers.1." and g.layout.role is Role.FP8)
        operand = FP8_OPERAND.of(weight)()
        parts = [FP8_OPERAND.of(part.weight)() for part in layer.parts.values()]
        rows = operand.rowwise.split(list(ROWS.values()))
        assert [r.data_ptr() for r in rows] == [part.rowwise.data_ptr() for part in parts]
        assert all(part.rowwise_inv.data_ptr() == operand.rowwise_inv.data_ptr() for part in parts)
        assert operand.columnwise.data_ptr() == stored.operands.columnwise.tensor.data_ptr()
        as_bytes = operand.rowwise.view(torch.uint8)
        assert torch.equal(operand.columnwise.view(torch.uint8), as_bytes.t())
        for part in parts:
            turned = part.rowwise.view(torch.uint8).t()
            assert part.columnwise.is_contiguous() and torch.equal(part.columnwise.view(torch.uint8), turned)
        seen.append(True)

    layer = [m for m in model.modules() if isinstance(m, QKV)][1]
    layer.register_forward_hook(lambda module, args, out: out.register_hook(lambda _: look(module)) and None)
    loss_of(model, batch(rank), recipe=RECIPE).backward()
    assert seen


@on_ranks(2)
def test_nan_in_one_part_is_not_hidden_by_its_partners(rank: int) -> None:
    model = build(precision=stored_in_fp8())
    with model.summon_full_params():
        next(m for m in model.modules() if isinstance(m, QKV)).parts["k"].weight.data[0, 0] = torch.nan
    assert loss_of(model, batch(rank), recipe=RECIPE).isnan()
    scales = [
        group.compute_shard.scales.scale for _, group in named_groups(model) if group.layout.role is Role.FP8
    ]
    assert scales[0].tolist() == [1.0] * 3 != scales[1].tolist()


# ---- checkpoints, and ranks that differ ---------------------------------------------------------------


class Undeclared(QKV):
    """The same parameters, which are not asked for as one operand."""

    def packed_parameters(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("in_fp8", [False, True])
@on_ranks(2)
def test_checkpoints_go_by_the_original_names(rank: int, tmp_path: Path, in_fp8: bool) -> None:
    """Biases lie behind each other in the flat parameter, and come back to where they belong."""
    options = {"precision": stored_in_fp8()} if in_fp8 else {}
    saved = build(**options)
    _, state = train(saved, rank, recipe=RECIPE if in_fp8 else None)
    assert list(state) == list(Net().state_dict())
    checkpoint.save(tmp_path, saved)
    for kind in (QKV, Undeclared):
        loaded = build(kind=kind, **(options if kind is QKV else {}))
        checkpoint.load(tmp_path, loaded)
        assert_same(([], loaded.state_dict()), ([], state))


@on_ranks(2)
def test_local_files_from_before_parameters_were_moved_are_refused(rank: int) -> None:
    """Both have equal lengths, and different orders."""
    with_packs, without = build(), build(kind=Undeclared)
    before = local_state_dict(without)
    assert {t.shape for t in before.values()} == {t.shape for t in local_state_dict(with_packs).values()}
    with pytest.raises(RuntimeError, match=r"Missing key: \S*packed_flat_param"):
        load_local_state_dict(with_packs, before)
    load_local_state_dict(with_packs, local_state_dict(build()))
    files = of_all_ranks((local_state_dict(with_packs), local_metadata(with_packs)))
    full = consolidate(*zip(*files, strict=True))
    assert_same(([], full), ([], with_packs.state_dict()))
    # Without biases nothing is moved.
    load_local_state_dict(build(bias=False), local_state_dict(build(kind=Undeclared, bias=False)))


@on_ranks(2)
def test_ranks_that_differ_are_named(rank: int) -> None:
    model = build(kind=QKV if rank == 0 else Undeclared, bias=False)
    with pytest.raises(RuntimeError, match=r"rank 0 has .*one operand qkv\.qkv_weight"):
        model(batch(rank))
