"""The byte ledger: Any's copies and traffic per step match its formulas, to the byte.

Measured by `CopyCounter`, which knows nothing of the engine, and compared with arithmetic on the layout.
Sizes are chosen so that slots need gaps and shards need padding: two 75 x 40 weights a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.copy_counter import CopyCounter, Kind
from flatfsdp import Precision, by_class, microbatches, shard
from flatfsdp.flat.layout import FlatLayout, ParamSpec
from flatfsdp.kernels.cast.shard_cast import cast_many, max_abs_many
from flatfsdp.kernels.cast.transpose import transpose_many
from tests.support.ranks import run_ranks

BLOCKS, WIDTH, HIDDEN = 3, 40, 75
MIN_NUMEL = 256
"""Above every activation (75 elements) and alignment gap (8), below a quarter of a weight (750)."""
MASTER = 4
"""Bytes of FP32: master shards, accumulation, reduction."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Case(NamedTuple):
    ranks: int
    microbatches: int
    compute: torch.dtype
    zero: int
    concat_free: bool
    sync: str


@dataclass(frozen=True)
class Unit:
    """Sizes of one unit in elements, for one number of ranks."""

    is_root: bool
    numel: int
    padded: int
    shard: int


@dataclass(frozen=True)
class Step:
    """Counts of one rank in its second step: bytes by kind of copy, payloads of collectives in order."""

    copies: dict[str, int]
    gathers: list[int]
    reduces: list[int]
    wire: dict[str, float]
    other_collectives: list[str]
    unclassified: dict[str, int]
    ledger: dict[str, float]


def units(ranks: int) -> list[Unit]:
    block = [ParamSpec("up.weight", (HIDDEN, WIDTH)), ParamSpec("down.weight", (WIDTH, HIDDEN))]
    head = [ParamSpec("head.weight", (HIDDEN, WIDTH))]
    found = []
    for is_root, specs in [*[(False, block)] * BLOCKS, (True, head)]:
        layout = FlatLayout.pack(specs)
        numel = sum(slot.numel for slot in layout.slots)
        found.append(Unit(is_root, numel, layout.padded_numel(ranks), layout.shard_numel(ranks)))
    assert all(unit.padded > unit.numel for unit in found), "the sizes are meant to need padding"
    return found


def count_one_step(rank: int, world_size: int, case: Case) -> Step:
    torch.manual_seed(0)
    model = shard(
        Net(),
        by_class(Block),
        precision=Precision(compute=case.compute),
        reshard_after_forward=case.zero == 3,
        optimize_backward_concat=case.concat_free,
        grad_sync=case.sync,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    counter = CopyCounter(MIN_NUMEL)
    _train_step(model, optimizer, case.microbatches)
    model.fsdp_state.shared.ledger.reset()
    with counter:
        _train_step(model, optimizer, case.microbatches)
    names = ("all_gather", "reduce_scatter")
    return Step(
        copies={kind.value: counter.bytes(kind) for kind in Kind},
        gathers=[c.payload for c in counter.collectives if c.name == "all_gather"],
        reduces=[c.payload for c in counter.collectives if c.name == "reduce_scatter"],
        wire={name: counter.wire(name) for name in names},
        other_collectives=[c.name for c in counter.collectives if c.name not in names],
        unclassified=dict(counter.unclassified),
        ledger=dict(model.fsdp_state.shared.ledger.bytes_per_parameter()),
    )


def _train_step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for x in microbatches(model, [torch.randn(1, WIDTH) for _ in range(steps)]):
        model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("zero", [3, 2])
@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_step_moves_the_bytes_of_the_formula(
    ranks: int, steps: int, dtype: torch.dtype, zero: int, flag: bool, sync: str
) -> None:
    results = run_ranks(ranks, count_one_step, Case(ranks, steps, dtype, zero, flag, sync))
    step = results[0]
    assert all(other == step for other in results), "ranks disagree about what they moved"
    assert not step.unclassified, f"operators that the counter cannot account for: {step.unclassified}"
    assert not step.other_collectives

    sizes, compute = units(ranks), dtype.itemsize
    reduces = steps if sync == "every" else 1
    shards = sum(u.shard for u in sizes)

    # Parameters: one cast a step, straight into the shard that is gathered; no copy in, no copy out.
    is_low_precision = compute < MASTER
    assert step.copies["cast"] == shards * (MASTER + compute) * is_low_precision

    # Gradients: no concat with the flag; one copy, then one add per microbatch, straight into the buffer that
    # is reduced.  Without the flag autograd concatenates whole buffers, gaps and padding included.  Where
    # every microbatch reduces, each starts with a copy, and reduced shards are added up instead.
    landed = sum(u.numel if flag else u.padded for u in sizes)
    concat = 0 if flag else 2 * compute * landed * steps
    first = landed * reduces * (compute + MASTER)
    adds = landed * (steps - reduces) * (compute + 2 * MASTER) + (reduces - 1) * shards * 3 * MASTER
    assert step.copies["concat"] == concat
    assert step.copies["add"] == adds
    assert step.copies["widen" if is_low_precision else "copy"] == first
    assert step.copies["copy" if is_low_precision else "widen"] == 0
    assert step.copies["fill"] == 0, "a buffer was zeroed"

    assert step.copies["scale"] == 0, "the reduction averages by itself"

    # Collectives, unit by unit.
    gathers = [
        unit.padded * compute
        for unit in sizes
        for _ in range(1 if zero == 2 else steps if unit.is_root else 2 * steps)
    ]
    assert sorted(step.gathers) == sorted(gathers)
    assert sorted(step.reduces) == sorted([unit.padded * MASTER for unit in sizes] * reduces)

    # The engine's own account says the same.
    parameters = sum(u.numel for u in sizes)
    measured = {
        "cast": step.copies["cast"],
        "concat": concat,
        "accumulate": first + adds,
        "gather": step.wire["all_gather"],
        "reduce": step.wire["reduce_scatter"],
    }
    for kind, nbytes in measured.items():
        assert step.ledger.get(kind, 0) == pytest.approx(nbytes / parameters, rel=1e-9), f"ledger[{kind!r}]"


# -- the counter itself ----------------------------------------------------------------------------------


def test_counter_sees_nothing_in_a_model_without_an_engine() -> None:
    """The model's own arithmetic is not mistaken for an engine's copies."""
    model = Net()
    with CopyCounter(MIN_NUMEL) as counter:
        model(torch.randn(1, WIDTH)).sum().backward()
    assert counter.copies == []
    assert not counter.unclassified
    assert counter.ignored_bytes > 0  # the residual additions, at least


def test_counter_is_active_inside_backward() -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    buffer = torch.empty(32 * 32)

    def land(parameter: Tensor) -> None:
        assert parameter.grad is not None
        buffer.copy_(parameter.grad.flatten())

    weight.register_post_accumulate_grad_hook(land)
    with CopyCounter(MIN_NUMEL) as counter:
        (weight @ torch.randn(32, 1)).sum().backward()
    assert [(copy.kind, copy.bytes) for copy in counter.copies] == [(Kind.COPY, 2 * 4 * 32 * 32)]


def test_bytes_of_each_kind_of_copy() -> None:
    """Each argument read once, each result written once."""
    n = 1024
    a, low = torch.ones(n), torch.ones(n, dtype=torch.bfloat16)
    with CopyCounter(MIN_NUMEL) as counter:
        low.copy_(a)
        a.copy_(low)
        a.add_(low)
        a.div_(2)
        torch.cat([a, a])
        a.zero_()
        torch._foreach_add_([a, a[: n // 2]], [a, a[: n // 2]])
        a[0].expand(n).clone()
    assert [(copy.kind, copy.bytes) for copy in counter.copies] == [
        (Kind.CAST, 6 * n),
        (Kind.WIDEN, 6 * n),
        (Kind.ADD, 10 * n),
        (Kind.SCALE, 8 * n),
        (Kind.CONCAT, 16 * n),
        (Kind.FILL, 4 * n),
        (Kind.ADD, 12 * n + 6 * n),
        (Kind.COPY, 4 * n + 4),
    ]


def test_bytes_around_fp8_weights() -> None:
    """Kernels of FlatFSDP move their tensors; scales and numbers are negligible."""
    n, m = 64, 32
    master, shard = torch.randn(n * m), torch.empty(n * m, dtype=torch.float8_e4m3fn)
    amax, scale = torch.zeros(1), torch.ones(1)
    with CopyCounter(MIN_NUMEL) as counter:
        max_abs_many([master], amax, through=torch.bfloat16)
        cast_many([master], [shard], scale, through=torch.bfloat16)
        transpose_many([(shard.view(n, m), torch.empty(m, n, dtype=torch.float8_e4m3fn))])
        # The same by hand, as torchao does.
        torch._foreach_norm([master], torch.inf)
        (master * scale[0]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        shard.view(n, m).t().contiguous()
    assert [(copy.kind, copy.bytes) for copy in counter.copies] == [
        (Kind.MEASURE, 4 * n * m),
        (Kind.CAST, 5 * n * m),
        (Kind.TURN, 2 * n * m),
        (Kind.MEASURE, 4 * n * m),
        (Kind.SCALE, 8 * n * m),
        (Kind.SCALE, 8 * n * m),
        (Kind.CAST, 5 * n * m),
        (Kind.TURN, 2 * n * m),
    ]
    assert not counter.unclassified


def test_unknown_large_operator_is_reported() -> None:
    with CopyCounter(MIN_NUMEL) as counter:
        torch.ones(8, 64).flip(0)
    assert counter.unclassified == {"aten.flip": 1}
