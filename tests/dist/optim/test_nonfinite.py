"""A NaN on one rank at some step: all ranks refuse that step, or leave it out, or all of them take it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatfsdp import Precision, by_class, checkpoint, microbatches, param_groups, shard
from flatfsdp.contract.tensor_parallel import declare_split
from flatfsdp.engine.storage.shard_grad import plain
from flatfsdp.fp8 import autocast
from flatfsdp.layers import Linear
from flatfsdp.optim import SGD, AdamW, NonFiniteGradientError
from flatfsdp.optim.clip import Awaited, Verdict
from tests.support import stored_weights
from tests.support.checkpoints import equal
from tests.support.fp8_layers import SHORT, Block, Stack, seeded
from tests.support.fp8_training import batch
from tests.support.llamas import BATCH, CONFIG, MICROBATCHES, SmallPipeline, mesh_of, microbatches_of
from tests.support.meshes import replicating
from tests.support.models import same, update
from tests.support.ranks import on_ranks
from tests.support.tp_models import build_tp, data_rank, tp_mesh

BF16 = torch.bfloat16
STEPS = 4
MODES = pytest.mark.parametrize("mode", ["skip", "raise"])


@dataclass
class Training:
    """A model on this rank, and how it is trained.

    Attributes:
        models: each a root.
        run: forward and backward of a step's microbatches; one loss is multiplied by the factor.
    """

    models: Sequence[nn.Module]
    optimizer: Any
    run: Callable[[int, float], list[Tensor]]

    def steps(self, steps: Sequence[int], bad: Bad | None = None) -> list[Tensor]:
        """Losses of the steps that are taken."""
        losses = []
        for step in steps:
            is_bad = bad is not None and step == bad.step
            is_here = is_bad and dist.get_rank() == bad.rank
            found = self.run(step, torch.nan if is_here and bad.how == "loss" else 1.0)
            if is_here and bad.how != "loss":
                grads = (p.grad for group in self.optimizer.param_groups for p in group["params"])
                next(grad for grad in grads if grad is not None and grad.numel()).view(-1)[0] = float(bad.how)
            if is_bad and self.optimizer.nonfinite == "raise":
                with pytest.raises(NonFiniteGradientError):
                    self.optimizer.step()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            losses += [] if is_bad else found
        return losses

    def state(self) -> list[Any]:
        """All that a checkpoint has, with FP8 scales; whole, so that equal states are equal on all ranks."""
        found: list[Any] = []
        for model in self.models:
            found += [dict(checkpoint.full_state_dict(model)), dict(model.named_buffers())]
        of_optimizer = self.optimizer.state_dict()["state"]
        return [*found, of_optimizer]


@dataclass(frozen=True)
class Bad:
    """A number that is not finite: its step, its rank, and its place.

    The place is the "loss", or "inf" or "nan" in reduced gradients."""

    step: int
    rank: int
    how: str


def random_bad(world_size: int, seed: str, hows: Sequence[str] = ("loss", "inf", "nan")) -> Bad:
    """A random bad number, the same on all ranks."""
    chosen = random.Random(seed)
    return Bad(chosen.randrange(STEPS - 1), chosen.randrange(world_size), chosen.choice(hows))


def check(make: Callable[[str], Training], bad: Bad, mode: str) -> None:
    """A run with a bad step against one without that step: after it, and after those that follow."""
    ours, theirs = make(mode), make(mode)
    before, later = list(range(bad.step)), list(range(bad.step + 1, STEPS))
    assert same(ours.steps([*before, bad.step], bad), theirs.steps(before))
    if bad.step > 0:
        assert equal(ours.state(), theirs.state()), "right after the step"
    assert same(ours.steps(later), theirs.steps(later))
    assert equal(ours.state(), theirs.state())
    assert ours.optimizer.skipped_steps == 1 and theirs.optimizer.skipped_steps == 0


# ---- precisions and policies ------------------------------------------------------------------------------


def of_stack(rank: int, kind: str, mode: str, optimizer: Any = None, **options: Any) -> Training:
    """FP8 layers, or the same layers without FP8; two microbatches a step."""
    recipe = {"delayed": SHORT, "stored": stored_weights.RECIPE}.get(kind)
    if kind == "stored":
        model = stored_weights.build(True, BF16, **options)
    else:
        precision = Precision(compute=torch.float32 if kind == "fp32" else BF16)
        model = shard(seeded(Stack), by_class(Block), precision=precision, **options)

    def run(step: int, factor: float) -> list[Tensor]:
        losses = []
        for index, x in enumerate(microbatches(model, [batch(rank, 7 * step + m) for m in range(2)])):
            with autocast(enabled=recipe is not None, recipe=recipe):
                loss = model(2.0**step * x, index == 0).float().square().mean()
            (loss * (factor if index == 0 else 1.0)).backward()
            losses.append(loss.detach())
        return losses

    groups = param_groups(model, [{"params": lambda name, shape: len(shape) < 2, "weight_decay": 0.0}])
    make = optimizer or (lambda p, **own: AdamW(p, lr=1e-2, **own))
    return Training([model], make(groups, nonfinite=mode), run)


@MODES
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "delayed", "stored"])
@on_ranks(2)
def test_as_if_the_step_had_not_been(rank: int, kind: str, reshard: bool, mode: str) -> None:
    options = {"reshard_after_forward": reshard, "optimize_backward_concat": reshard}
    bad = random_bad(2, f"{kind} {reshard} {mode}")
    check(lambda own: of_stack(rank, kind, own, **options), bad, mode)


@pytest.mark.parametrize("kind", ["bf16", "delayed"])
@on_ranks(2)
def test_with_clipping_bf16_moments_and_momentum(rank: int, kind: str) -> None:
    makes = [
        lambda p, **own: AdamW(p, lr=1e-2, betas=(0.9, 0.95), max_grad_norm=0.1, moment_dtype=BF16, **own),
        lambda p, **own: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, **own),
    ]
    for number, make in enumerate(makes):
        # A first step, and a later one.
        bad = Bad(number, number, "loss")
        check(lambda own, make=make: of_stack(rank, kind, own, make), bad, "skip")


@pytest.mark.parametrize(("how", "mode"), [("loss", "raise"), ("inf", "skip"), ("inf", "raise")])
@on_ranks(2)
def test_replicas(rank: int, how: str, mode: str) -> None:
    """A reduced gradient that is bad on one replica only, which nothing but the verdict tells the other."""
    check(lambda own: of_stack(rank, "delayed", own, mesh=replicating()), Bad(2, 1, how), mode)


@pytest.mark.parametrize(("how", "mode"), [("loss", "skip"), ("nan", "raise")])
@on_ranks(4)
def test_hybrid_sharding(rank: int, how: str, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    check(lambda own: of_stack(rank, "bf16", own, mesh=mesh), Bad(1, 3, how), mode)


@on_ranks(2)
def test_offloaded_shards(rank: int) -> None:
    check(lambda own: of_stack(rank, "bf16", own, cpu_offload=True), Bad(1, 0, "loss"), "skip")


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@on_ranks(2)
def test_a_step_that_goes_on_anyway(rank: int, max_grad_norm: float | None) -> None:
    """The norm of all weights of all ranks is NaN; without a norm, the NaN stays where it is."""
    training = of_stack(rank, "bf16", "step", lambda p, **own: AdamW(p, max_grad_norm=max_grad_norm, **own))
    training.steps([0, 1], Bad(1, 1, "nan"))
    (model,) = training.models
    nans = [int(p.isnan().sum()) for p in model.parameters()]
    if max_grad_norm is None:
        assert sum(nans) == rank
    else:
        assert nans == [p.numel() for p in model.parameters()]
    assert training.optimizer.skipped_steps == 0


@pytest.mark.parametrize("kind", ["bf16", "delayed"])
@on_ranks(2)
def test_a_late_refusal_comes_on_all_ranks(rank: int, kind: str) -> None:
    """The host hears of a step in the next one, as on a GPU."""
    waits = []

    class Arrived:
        def synchronize(self) -> None:
            waits.append(step)

    def sent(verdict: Verdict) -> Awaited:
        event: Any = Arrived()
        return Awaited(verdict.worst.clone(), verdict.is_norm, event)

    bad, losses = Bad(2, 1, "loss"), []
    ours, theirs = of_stack(rank, kind, "raise"), of_stack(rank, kind, "raise")
    with patch.object(Awaited, "of", staticmethod(sent)):
        for step in range(STEPS):
            is_bad = step == bad.step
            found = ours.run(step, torch.nan if is_bad and rank == bad.rank else 1.0)
            losses += [] if is_bad else found
            if step == bad.step + 1:
                with pytest.raises(NonFiniteGradientError, match="norm was nan"):
                    ours.optimizer.step()
            update(ours.optimizer)
    assert waits == list(range(1, STEPS)), "each step waits for the one before, and for nothing else"
    assert same(losses, theirs.steps([step for step in range(STEPS) if step != bad.step]))
    assert equal(ours.state(), theirs.state())


# ---- other dimensions -------------------------------------------------------------------------------------


def of_llama(pp: int, tp: int, mode: str, **options: Any) -> Training:
    mesh = mesh_of(pp=pp, tp=tp)
    pipeline = SmallPipeline("1f1b", mesh, recipe=SHORT, precision=Precision(compute=BF16), **options)

    def run(step: int, _factor: float) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + mesh.dp_rank)
        shape = (2, BATCH * MICROBATCHES, CONFIG.seq)
        tokens, targets = torch.randint(0, CONFIG.vocab, shape, generator=generator)
        return list(pipeline.forward_backward(microbatches_of((tokens, targets))))

    optimizer = AdamW(pipeline.parameters(), lr=1e-2, nonfinite=mode)
    return Training(pipeline.stages, optimizer, run)


@pytest.mark.parametrize(
    ("pp", "tp", "options", "mode"),
    [(1, 2, {"sequence_parallel": True}, "skip"), (2, 1, {}, "raise")],
    ids=["tp2", "pp2"],
)
@on_ranks(2)
def test_tensor_parallel_and_pipelines_in_fp8(pp: int, tp: int, options: Any, mode: str) -> None:
    bad = random_bad(2, f"{pp} {tp} {mode}", ["inf", "nan"])
    check(lambda own: of_llama(pp, tp, own, **options), bad, mode)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)], ids=["dp2-tp2", "hybrid"])
@on_ranks(4)
def test_a_gradient_that_counts_on_another_rank(rank: int, sizes: tuple[int, ...]) -> None:
    """What all tensor-parallel ranks have counts once; a NaN in it counts wherever it is."""
    mesh = tp_mesh(*sizes)
    model = build_tp(mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2, nonfinite="skip")
    for bad_rank in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
            if "blocks" not in name and parameter.numel() and rank == bad_rank:
                parameter.grad[0] = torch.nan
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
        assert same(before, [parameter.detach() for parameter in model.parameters()])
        assert optimizer.skipped_steps == bad_rank + 1 and optimizer.grad_norm.isnan()
    assert data_rank(mesh) in (0, 1)


@on_ranks(4)
def test_experts(rank: int) -> None:
    """No rank knows the norm of all experts, and all know whether there is a NaN in one."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    expert = shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(pairs[rank // 2], "cpu"))
    model = shard(nn.Sequential(nn.Linear(8, 8), expert))
    optimizer = AdamW(model.parameters(), lr=1e-2, nonfinite="skip")

    def values() -> list[Tensor]:
        return [parameter.detach().clone() for parameter in model.parameters()]

    for bad_rank in (None, 0, 3):
        model(torch.ones(2, 8)).sum().backward()
        if rank == bad_rank:
            next(iter(expert.parameters())).grad[0] = torch.nan
        before = values()
        update(optimizer)
        assert same(before, values()) == (bad_rank is not None)
        assert optimizer.grad_norm is None
    assert optimizer.skipped_steps == 2
    optimizer.nonfinite = "raise"
    model(torch.ones(2, 8)).sum().backward()
    if rank == 2:
        next(iter(expert.parameters())).grad[0] = torch.nan
    with pytest.raises(NonFiniteGradientError, match="gradients were not finite"):
        optimizer.step()


# ---- parameters outside of FlatFSDP, and ranks without gradients ------------------------------------------


@on_ranks(2)
def test_ordinary_parameters_beside_shards(rank: int) -> None:
    model = shard(nn.Linear(8, 8))
    extra = nn.Parameter(torch.ones(5))
    optimizer = SGD([extra, *model.parameters()], lr=0.1, nonfinite="skip")
    for bad_rank in range(2):
        model(torch.ones(2, 8)).sum().backward()
        extra.grad = torch.full((5,), torch.inf if rank == bad_rank else 1.0)
        before = [p.detach().clone() for p in (extra, *model.parameters())]
        optimizer.step()
        assert same(before, [p.detach() for p in (extra, *model.parameters())])
        assert optimizer.skipped_steps == bad_rank + 1
        optimizer.zero_grad()


@pytest.mark.parametrize("bad_rank", [0, 1])
@on_ranks(2)
def test_ordinary_layers_that_ranks_share(rank: int, bad_rank: int) -> None:
    layer = Linear(4, 8, parallel_mode="column", tp_group=dist.group.WORLD)
    optimizer = SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm is None
    before = [p.detach().clone() for p in layer.parameters()]
    if rank == bad_rank:
        layer.weight.grad[0, 0] = torch.nan
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert same(before, [p.detach() for p in layer.parameters()])
    layer.zero_grad()
    unknown = nn.Parameter(torch.ones(4, 4))
    declare_split(unknown, 0, (8,))
    unknown.grad = torch.ones(4, 4)
    optimizer = SGD([unknown], lr=0.1)
    with pytest.raises(ValueError, match=r'without tensor_parallel_ranks; .* nonfinite="step"'):
        optimizer.step()
    optimizer.nonfinite = "step"
    optimizer.step()
    assert torch.equal(unknown.detach(), torch.full((4, 4), 0.9))


@pytest.mark.parametrize("is_shared", [False, True], ids=["sharded", "a layer that ranks share"])
@on_ranks(2)
def test_a_rank_without_gradients_takes_part(rank: int, is_shared: bool) -> None:
    if is_shared:
        layer: nn.Module = Linear(4, 8, parallel_mode="column", tp_group=dist.group.WORLD)
    else:
        layer = shard(nn.Linear(4, 8))
    optimizer = AdamW(layer.parameters(), nonfinite="skip")
    layer(torch.ones(2, 4)).sum().backward()
    for parameter in layer.parameters():
        if rank == 0:
            parameter.grad = None
        else:
            plain(parameter.grad).fill_(torch.nan)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer.step()
    assert same(before, list(layer.parameters()))
    assert optimizer.skipped_steps == 1 and (is_shared or optimizer.grad_norm.isnan())


@on_ranks(2)
def test_units_with_and_without_tensor_parallel_ranks(rank: int) -> None:
    """Several roots: the ranks of one unit hear of a NaN in a unit that they do not share."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    split = Linear(4, 8, parallel_mode="column", tp_group=dist.group.WORLD)
    plain = shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(alone, "cpu"))
    model = nn.Sequential(
        plain, shard(split, mesh=DeviceMesh.from_group(alone, "cpu"), tp_group=dist.group.WORLD)
    )
    optimizer = SGD(model.parameters(), lr=0.1, nonfinite="skip")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.skipped_steps == 0 and optimizer.grad_norm.isfinite()
    if rank == 1:
        next(plain.parameters()).grad[0] = torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1


@on_ranks(4)
def test_experts_beside_two_grids_of_all_ranks(rank: int) -> None:
    """All ranks ask the same grid, whatever the addresses of their groups are."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = dist.new_group([0, 1, 2, 3])
    mesh = init_device_mesh("cpu", (2, 2))
    units = [
        shard(nn.Linear(8, 8), mesh=mesh),
        shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(everyone, "cpu")),
        shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(pairs[rank // 2], "cpu")),
    ]
    model = shard(nn.Sequential(nn.Linear(8, 8), *units))
    optimizer = AdamW(model.parameters(), nonfinite="skip")
    for number, skipped in ((1.0, 0), (torch.nan if rank == 3 else 1.0, 1)):
        (model(torch.ones(2, 8)).sum() * number).backward()
        update(optimizer)
        assert optimizer.skipped_steps == skipped
