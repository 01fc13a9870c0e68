"""FlatFSDP around layers that add their weight gradients to `main_grad` themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatfsdp import Debug, Precision, by_class, fp8, microbatches, shard
from flatfsdp.engine.storage.main_grad import FEW
from flatfsdp.fp8 import BlockScaling, CurrentScaling, DelayedScaling
from flatfsdp.layers import Embedding, LayerNormLinear, LayerNormMLP, Linear
from tests.support.against_plain import assert_equal
from tests.support.meshes import REPLICATED, placed
from tests.support.models import FLAGS, Trace, grads_of, plain_net, same, same_trace, update, whole_grads
from tests.support.plain_layers import error
from tests.support.ranks import of_all_ranks, on_ranks

VOCAB, WIDTH, FFN = 48, 32, 64
BF16 = Precision(compute=torch.bfloat16)
SHORT = DelayedScaling(amax_history_len=4)
RECIPES = {"high": None, "delayed": SHORT, "current": CurrentScaling(), "block": BlockScaling()}
SCHEDULES: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"reshard_after_forward": False},
    "dp": REPLICATED,
    "every": {"grad_sync": "every"},
    "every, sent in bf16": {
        "grad_sync": "every",
        "precision": Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    },
}


class Block(nn.Module):
    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.up = LayerNormLinear(WIDTH, FFN, fuse_wgrad_accumulation=fused)
        self.down = Linear(FFN, WIDTH, bias=False, fuse_wgrad_accumulation=fused)
        self.mlp = LayerNormMLP(WIDTH, FFN, activation="swiglu", fuse_wgrad_accumulation=fused)

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        x = x + self.down(self.up(x, is_first_microbatch=first), is_first_microbatch=first)
        return x + self.mlp(x, is_first_microbatch=first)


class Net(nn.Module):
    """Tokens to the loss of predicting them.

    Args:
        fused: of all layers.
        ties: the head and the embedding share a weight.
        freezes: names of parameters without gradients.
        repeats: how often each block is used.
        recomputes: blocks in checkpoints.
        spare: a layer that is never used.
    """

    def __init__(
        self,
        fused: Any = True,
        ties: bool = False,
        freezes: tuple[str, ...] = (),
        repeats: int = 1,
        recomputes: bool | None = None,
        spare: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(VOCAB, WIDTH, fuse_wgrad_accumulation=bool(fused))
        self.blocks = nn.ModuleList(Block(fused) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Linear(WIDTH, VOCAB, bias=False, fuse_wgrad_accumulation=fused)
        if spare:
            self.spare = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)
            self.blocks[0].spare = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)
        if ties:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in freezes)
        self.repeats, self.recomputes = repeats, recomputes

    def forward(self, tokens: Tensor, first: bool | None = None) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.repeats):
            for block in self.blocks:
                if self.recomputes is None:
                    x = block(x, first)
                else:
                    x = fp8.checkpoint(block, x, first, use_reentrant=self.recomputes)
        logits = self.head(self.norm(x), is_first_microbatch=first)
        return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten())


def build(net: dict[str, Any], **options: Any) -> Any:
    return shard(plain_net(partial(Net, **net)), by_class(Block), **placed(options))


def batches_of(rank: int, count: int, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(0, VOCAB, (2, 8), generator=generator) for _ in range(count)]


def backward(model: Any, batches: list[Tensor], recipe: Any = None, caches: bool = False) -> list[Tensor]:
    losses = []
    for index, tokens in enumerate(microbatches(model, batches)):
        with fp8.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(tokens, index == 0 if caches else None)
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: Any, rank: int, recipe: Any, caches: bool = False, steps: int = 3) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], []
    for step in range(steps):
        losses += backward(model, batches_of(rank, 3, step), recipe, caches)
        grads += grads_of(model)
        update(optimizer)
    state = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return Trace(losses, grads, [p.detach().clone() for p in model.parameters()], state)


def fp8_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "fp8" in name]


# ---- the same bits -----------------------------------------------------------------------------------------


def flag_off_and_on(rank: int, recipe: Any, net: dict[str, Any], caches: bool, **options: Any) -> None:
    models = [build(net, optimize_backward_concat=flag, **options) for flag in (False, True)]
    traces = [train(model, rank, recipe, caches, steps=2) for model in models]
    assert same_trace(*traces) == dict.fromkeys(Trace._fields, True)
    assert same(*(fp8_buffers(model) for model in models))
    assert bool(fp8_buffers(models[0])) == isinstance(recipe, DelayedScaling)


NETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"ties": True},
    "repeated": {"repeats": 2},
    "frozen": {"freezes": ("blocks.0.up.weight", "blocks.1.mlp.fc1_weight", "head.weight")},
    "unused": {"spare": True},
    "checkpoint": {"recomputes": False},
    "reentrant": {"recomputes": True},
    "unfused": {"fused": False},
}


@pytest.mark.parametrize(
    ("net", "recipe"),
    # Only delayed scaling leaves anything in a layer from one call to the next.
    [*(("plain", recipe) for recipe in RECIPES), *((net, "delayed") for net in NETS if net != "plain")],
)
@on_ranks(2)
def test_flag_off_is_flag_on(rank: int, net: str, recipe: str) -> None:
    """What is freed, or not written yet, is NaN."""
    options = {"precision": BF16, "debug": Debug(poison_on_free=True)}
    flag_off_and_on(rank, RECIPES[recipe], NETS[net], net == "plain", **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", ["high", "delayed"])
@on_ranks(2)
def test_flag_off_is_flag_on_in_every_schedule(rank: int, schedule: str, recipe: str) -> None:
    flag_off_and_on(rank, RECIPES[recipe], {"ties": True}, recipe == "delayed", **SCHEDULES[schedule])


def fused_and_others(rank: int, recipe: Any, net: dict[str, Any], others: Any, **options: Any) -> None:
    models = (build({**net, "fused": fused}, **options) for fused in (True, *others))
    traces = [train(model, rank, recipe, steps=2) for model in models]
    for other in traces[1:]:
        assert same_trace(traces[0], other) == dict.fromkeys(Trace._fields, True)


@FLAGS
@pytest.mark.parametrize(
    ("net", "recipe"),
    [
        *(("plain", recipe) for recipe in RECIPES),
        *((net, "delayed") for net in ("tied", "repeated", "checkpoint")),
    ],
)
@on_ranks(2)
def test_fused_is_two_passes(rank: int, net: str, recipe: str, flag: bool) -> None:
    options = {"precision": BF16, "optimize_backward_concat": flag}
    fused_and_others(rank, RECIPES[recipe], NETS[net], ("two_pass",), **options)


@FLAGS
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_gradients_that_are_sent_at_once_are_rounded_once(rank: int, recipe: str, flag: bool) -> None:
    """FP32 sums are rounded as they are written, with the bits of a cast on their way."""
    options = {**SCHEDULES["every, sent in bf16"], "optimize_backward_concat": flag}
    at_once, later = build({}, **options), build({}, **{**options, "grad_sync": "last"})
    for model in (at_once, later):
        backward(model, batches_of(rank, 1), RECIPES[recipe])
    assert same(grads_of(at_once), grads_of(later))
    dtypes = {row.dtype for row in at_once.memory_report().rows if row.buffer == "main_grad"}
    assert dtypes == {torch.bfloat16}


@FLAGS
@pytest.mark.parametrize("recipe", ["high", "delayed"])
@pytest.mark.parametrize("schedule", ["zero3", "zero2", "every"])
@on_ranks(2)
def test_fused_is_not_fused_with_fp32_parameters(rank: int, schedule: str, recipe: str, flag: bool) -> None:
    """Gradients that autograd gets are FP32 sums, too, and the engine adds them up."""
    options = {**SCHEDULES[schedule], "optimize_backward_concat": flag}
    fused_and_others(rank, RECIPES[recipe], {}, ("two_pass", False), **options)


@on_ranks(4)
def test_replicated_and_sharded(rank: int, world_size: int) -> None:
    """Sharded over two ranks, replicated over two: scales are those of all four."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    traces = []
    for flag, fused in ((True, True), (False, True), (True, "two_pass")):
        model = build({"fused": fused}, mesh=mesh, optimize_backward_concat=flag)
        traces.append(train(model, rank, SHORT, caches=True, steps=2))
        for buffer in fp8_buffers(model):
            assert all(torch.equal(each, buffer) for each in of_all_ranks(buffer))
    for other in traces[1:]:
        assert same_trace(traces[0], other) == dict.fromkeys(Trace._fields, True)


# ---- what the engine does not do any more ------------------------------------------------------------------


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 4])
@on_ranks(2)
def test_the_engine_adds_only_what_layers_do_not(rank: int, compute: torch.dtype, count: int) -> None:
    """Only norms and biases cost bytes; most of a unit's are added in one launch."""
    model = build({}, precision=Precision(compute=compute))
    plain = Net()
    backward(model, batches_of(rank, count), SHORT)
    others = [p.numel() for name, p in plain.named_parameters() if p.dim() == 1]
    size = compute.itemsize
    expected = sum(n * (4 + size) + (count - 1) * n * (8 + size) for n in others)
    groups = [group for unit in model.fsdp_state.root.units for group in unit.groups if group.trains]
    vectors = [sum(len(slot.shape) == 1 for slot in group.layout.slots) for group in groups]
    assert min(vectors) <= FEW < max(vectors)
    launches = count * sum(number if number <= FEW else 1 for number in vectors)
    ledger = model.fsdp_state.shared.ledger
    assert (ledger.bytes["accumulate"], ledger.calls["accumulate"]) == (expected, launches)
    assert ledger.bytes["concat"] == 0


class Ones(nn.Module):
    """A linear layer whose weight gradient is its input, 16 times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(16, 16, bias=False, fuse_wgrad_accumulation=True)

    def forward(self, value: float) -> Tensor:
        x = torch.zeros(16, 16, dtype=self.linear.weight.dtype)
        x[0] = 1
        return (self.linear(x) * value).sum()


@FLAGS
@pytest.mark.parametrize("recipe", RECIPES)
def test_256_and_1_are_257(flag: bool, recipe: str) -> None:
    model = shard(Ones(), optimize_backward_concat=flag, precision=BF16)
    for value in microbatches(model, [256.0, 1.0]):
        with fp8.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            loss = model(value)
        loss.backward()
    assert (next(model.parameters()).grad == 257).all()


# ---- corner cases ------------------------------------------------------------------------------------------


@FLAGS
@on_ranks(2)
def test_a_layer_that_is_not_used_gets_no_gradient(rank: int, flag: bool) -> None:
    model = build({"spare": True}, optimize_backward_concat=flag)
    plain = build({}, optimize_backward_concat=flag)
    plain.load_state_dict(model.state_dict(), strict=False)
    for each in (model, plain):
        backward(each, batches_of(rank, 2), SHORT)
    assert all(p.grad is None for name, p in model.named_parameters() if "spare" in name)
    grads, expected = whole_grads(model), whole_grads(plain)
    assert_equal({name: grads[name] for name in expected}, expected)


@FLAGS
@on_ranks(2)
def test_a_layer_that_is_used_on_one_rank_only(rank: int, flag: bool) -> None:
    """ZeRO-2: the other rank's gradient counts, halved by the mean."""
    model = build({}, optimize_backward_concat=flag, reshard_after_forward=False)
    weight = "blocks.1.down.weight"
    block = model.blocks[1]
    down = block.down.forward
    if rank == 1:
        block.down.forward = lambda x, **options: x[..., :WIDTH] * 0
    backward(model, batches_of(0, 2))
    ours = whole_grads(model)[weight]
    block.down.forward = down
    model.zero_grad()
    backward(model, batches_of(0, 2))
    assert torch.equal(ours, whole_grads(model)[weight] / 2)


@FLAGS
@on_ranks(2)
def test_frozen_weights_stay_and_the_others_get_the_same_gradients(rank: int, flag: bool) -> None:
    model = build(NETS["frozen"], optimize_backward_concat=flag)
    whole = build({}, optimize_backward_concat=flag)
    before = model.state_dict()
    for each in (model, whole):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        backward(each, batches_of(rank, 2), SHORT)
        optimizer.step()
    after, other = model.state_dict(), whole.state_dict()
    for name, parameter in Net(**NETS["frozen"]).named_parameters():
        assert torch.equal(after[name], other[name] if parameter.requires_grad else before[name]), name


def fail(*_: Any) -> None:
    raise KeyError


def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(fail)


@FLAGS
@pytest.mark.parametrize("hook", [fail, fail_in_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("schedule", ["zero3", "every"])
@on_ranks(2)
def test_a_clean_step_after_an_exception(rank: int, schedule: str, hook: Any, flag: bool) -> None:
    """Fails in the second of three microbatches, on all ranks, when some weights have their gradients."""
    options = SCHEDULES[schedule]
    model = build({}, optimize_backward_concat=flag, **options)
    clean = build({}, optimize_backward_concat=flag, **options)
    batches = microbatches(model, batches_of(rank, 3, step=1))
    model(next(batches)).backward()
    with model.blocks[0].register_forward_hook(hook), pytest.raises(KeyError):
        model(next(batches)).backward()
    batches.close()
    for each in (model, clean):
        each.zero_grad()
        backward(each, batches_of(rank, 3, step=2))
    assert same(grads_of(model), grads_of(clean))


@FLAGS
@on_ranks(2)
def test_fused_and_other_uses_of_one_weight_add_up(rank: int, flag: bool) -> None:
    """The order of the two additions may differ, so not bit for bit.

    One unit with fused and other layers, a tied weight with one fused and one other use.
    """
    traces = []
    for fused in (True, False):
        net = plain_net(partial(Net, fused=fused, ties=True))
        net.embedding = nn.Embedding(VOCAB, WIDTH)
        torch.manual_seed(1)
        nn.init.normal_(net.embedding.weight, 0, 0.02)
        net.head.weight = net.embedding.weight
        net.blocks[0].up.fuse_wgrad_accumulation = False
        model = shard(net, by_class(Block), optimize_backward_concat=flag)
        traces.append(train(model, rank, SHORT))
    assert same(traces[0].losses[:3], traces[1].losses[:3])
    assert all(error(a, b) < 1e-5 for a, b in zip(traces[0].grads, traces[1].grads, strict=True))


@FLAGS
@on_ranks(2)
def test_fp16_accumulation_is_refused_on_every_rank(rank: int, flag: bool) -> None:
    model = build({}, optimize_backward_concat=flag, precision=Precision(accumulate=torch.float16))
    with pytest.raises(TypeError, match=r"Linear\.weight.*Precision\(accumulate=torch\.float32\)"):
        backward(model, batches_of(rank, 1))


@FLAGS
@on_ranks(2)
def test_forwards_may_run_ahead_of_backwards(rank: int, flag: bool) -> None:
    """Forwards of all microbatches first: `first` is decided when gradients land, not in the forward."""
    grads = []
    for ahead in (False, True):
        model = build({}, optimize_backward_concat=flag, reshard_after_forward=False)
        batches = batches_of(rank, 3)
        if not ahead:
            backward(model, batches, SHORT)
        else:
            model.set_is_last_backward(False)
            losses = []
            for tokens in batches:
                with fp8.autocast(recipe=SHORT):
                    losses.append(model(tokens))
            for index, loss in enumerate(losses):
                model.set_is_last_backward(index == 2)
                loss.backward()
        grads.append(grads_of(model))
    assert same(*grads)
