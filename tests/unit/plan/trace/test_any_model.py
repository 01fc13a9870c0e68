"""Plans of any model: the step that is counted, against PyTorch's own counts, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flatfsdp import Precision, by_class
from flatfsdp.fp8 import CurrentScaling, DelayedScaling, Recipe
from flatfsdp.layers import TransformerLayer
from flatfsdp.models import LlamaConfig
from flatfsdp.models.llama import Llama
from flatfsdp.optim import AdamW
from flatfsdp.plan import Job, Model, Parallelism, Plan, plan
from tests.support.assertions import assert_raises

BF16 = Precision(compute=torch.bfloat16)
FP8 = replace(BF16, fp8_weights=CurrentScaling())
MIB = 2**20


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch)
    assert isinstance(out, Tensor)
    return out.float().square().mean()


OF_A_JOB = ("precision", "recipe", "reshard_after_forward", "grad_sync", "checkpoint_layers")


def plan_model(build: Any, batches: Any, *, gpus: int = 1, **options: Any) -> Plan:
    of_job = {name: options.pop(name) for name in OF_A_JOB if name in options}
    return plan(Job(Model(build, batches, **options), Parallelism(dp_shard=gpus), **of_job))


def planned(model: nn.Module, batch: Tensor, times: int = 1, **options: Any) -> Plan:
    return plan_model(lambda: model, [batch] * times, loss=mean_square, **options)


def lines(plan: Plan) -> dict[str, int]:
    return {line.name: line.nbytes for line in (*plan.memory.static, *plan.memory.passing)}


# -- a second opinion: our own Llama, as a job and as anybody's model -------------------------------------

LLAMA = LlamaConfig(8, 512, 1024, heads=8, kv_heads=4, vocab=8192, seq=1024)


@pytest.mark.parametrize(
    ("precision", "recipe"), [(BF16, None), (FP8, DelayedScaling())], ids=["bf16", "fp8"]
)
def test_a_llama_is_planned_as_any_model(precision: Precision, recipe: Recipe | None) -> None:
    own = plan(Job(LLAMA, Parallelism(dp_shard=4), 4, 3, precision, recipe))
    ids = torch.zeros(4, LLAMA.seq, dtype=torch.long)
    other = plan_model(
        lambda: Llama(LLAMA, recipe=recipe, fuse_wgrad_accumulation=True),
        [(ids, ids)] * 3,
        gpus=4,
        policy=by_class(TransformerLayer),
        precision=precision,
    )
    # Scales of FP8 layers that are not traced are in blocks of their own.
    assert other.memory.peak == pytest.approx(own.memory.peak, abs=8192)
    assert other.sent == own.sent and other.units == own.units
    assert other.time.flops == own.time.flops
    # The rate of FP8 products is that of the recipe, which any model has around it.
    assert other.time.lines == own.time.lines


# -- by hand ---------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Each layer keeps its input; ReLU keeps its output, which is the next one's input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_activations_and_operations_are_those_of_a_small_network() -> None:
    width, rows, depth = 512, 4096, 4
    plan = planned(MLP(width, depth), torch.zeros(rows, width), times=3)
    one = 4 * rows * width
    # The first layer's input is the batch, which is there between steps, too.
    assert lines(plan)["activations"] == pytest.approx(depth * one, rel=1e-3)
    assert lines(plan)["everything else"] == pytest.approx(3 * one, rel=1e-3)
    assert lines(plan)["main_grad"] == 4 * depth * width**2
    products = 2 * rows * width**2
    # The input needs no gradient.
    assert plan.time.flops == 3 * products * (3 * depth - 1)
    assert [unit.parameters for unit in plan.units] == [0, *[width**2] * depth]
    assert plan.parameters == depth * width**2
    assert [unit.name for unit in plan.units] == ["", *(f"layers.{index}" for index in range(depth))]
    busy = sum(plan.time.lines[name] for name in ("gemms", "memory-bound"))
    assert 3 * sum(unit.forward + unit.backward for unit in plan.units) == pytest.approx(busy)


def test_operations_are_those_that_pytorch_counts() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv1d(16, 32, 3), nn.GELU(), nn.Flatten(), nn.Linear(32 * 30, 8))

    batch, real = torch.randn(4, 16, 32), network()
    with FlopCounterMode(display=False) as counter:
        mean_square(real, batch).backward()
    assert planned(network(), batch).time.flops == counter.get_total_flops()


def test_gradients_and_state_of_frozen_parameters_need_nothing() -> None:
    def half_frozen() -> nn.Module:
        model = MLP(1024, 4)
        model.layers[0].requires_grad_(False)
        model.layers[1].requires_grad_(False)
        return model

    batch, one = torch.zeros(64, 1024), 4 * 1024**2
    found = lines(plan_model(half_frozen, [batch] * 2, gpus=1, loss=mean_square))
    assert found["main_grad"] == 2 * one
    assert found["optimizer state, float32"] == pytest.approx(2 * 2 * one, rel=0.01)
    assert found["master shard, float32"] == 4 * one


def test_another_optimizer_has_its_own_state() -> None:
    batch, one = torch.zeros(64, 256), 4 * 256**2
    sgd = planned(MLP(256, 4), batch, build_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    assert "optimizer state, float32" not in lines(sgd)
    momentum = planned(
        MLP(256, 4), batch, build_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)
    )
    assert lines(momentum)["optimizer state, float32"] == 4 * one


class Blocks(nn.Module):
    """Layers with more inside than they are given."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(256, 4) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def test_checkpoints_save_activations_and_compute_forwards_twice() -> None:
    batch = torch.zeros(4096, 256)
    policy = lambda name, module, numel: isinstance(module, MLP)  # noqa: E731
    whole, saving = (
        planned(Blocks(checkpointed=checkpointed), batch, policy=policy) for checkpointed in (False, True)
    )
    one, layer = 4 * 4096 * 256, 2 * 4096 * 256**2
    # Of 16 activations the inputs of 4 blocks stay, and those inside of one.
    assert 9 * one <= whole.memory.peak - saving.memory.peak <= 12 * one
    assert saving.time.flops - whole.time.flops == 16 * layer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.dropout(out.transpose(1, 2).flatten(2), 0.1)


def test_attention_and_dropout_keep_what_a_gpu_keeps() -> None:
    tokens = 4096
    plan = planned(nn.Sequential(Attention()), torch.zeros(1, tokens, 64), precision=BF16)
    row = 2 * tokens * 64
    held = {line.name: line.nbytes for line in plan.memory.passing}
    # A matrix of all queries and keys would be 128 MiB: 4 heads, bf16.
    assert sum(held.values()) < 24 * row < 16 * MIB
    assert plan.time.flops == 3 * (4 * tokens**2 * 64 // 2) + 2 * 2 * tokens * 64 * 192
    assert plan.time.lines["attention"] > 0


def test_microbatches_that_are_alike_are_not_all_run() -> None:
    """One stands for those in the middle, unless they differ in more than values; the plan is the same."""
    calls = 0

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_square(model, batch["x"])

    plans, counts = [], []
    for marks in ([0] * 6, [0, 0, 1, 0, 0, 0]):
        calls = 0
        batches = [{"x": torch.zeros(8, 64), "mark": mark} for mark in marks]
        plans.append(
            plan_model(build, batches, gpus=4, loss=loss, policy=by_class(nn.Linear), precision=BF16)
        )
        counts.append(calls)
    assert counts == [1 + 3, 1 + 6]
    alike, different = plans
    assert alike.job.microbatches == 6 and alike.memory == different.memory and alike.sent == different.sent
    assert alike.time.flops == pytest.approx(different.time.flops, rel=1e-12)
    assert alike.time.lines == pytest.approx(different.time.lines, rel=1e-12)


def test_more_gpus_share_what_is_sharded_and_send_more() -> None:
    batch = torch.zeros(64, 256)
    one, four = (planned(MLP(256, 8), batch, gpus=gpus) for gpus in (1, 4))
    assert lines(four)["master shard, float32"] * 4 == lines(one)["master shard, float32"]
    assert one.sent.total == 0 and one.time.hidden_share is None
    # Gathered in forward and backward, and reduced: three quarters each time.
    assert four.sent.total == 3 * (3 * 8 * 4 * 256**2 // 4)


def test_a_model_that_was_built_with_memory_is_planned_as_well() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(2)])
            self.head = nn.Linear(1024, 1024, bias=False)
            self.embedding = nn.Embedding(1024, 1024)
            self.embedding.weight = self.head.weight
            self.register_buffer("scale", torch.ones(1024))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x)
            out: Tensor = self.head(x * self.scale)
            return out

    ids = torch.zeros(4, 16, dtype=torch.long)
    there = Tied()
    plans = [plan_model(build, [ids], gpus=2, loss=mean_square) for build in (Tied, lambda: there)]
    assert plans[0].memory == plans[1].memory
    assert plans[0].parameters == 3 * 1024**2


# -- conditions and refusals -----------------------------------------------------------------------------


class Asks(nn.Module):
    """Does what a condition on values says."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if self.ask(x) else self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("ask", "holds"),
    [(lambda x: (x == 0).all(), True), (lambda x: x.isnan().any(), False)],
    ids=["all", "any"],
)
def test_a_plain_batch_answers_conditions(ask: Any, holds: bool) -> None:
    plan = planned(Asks(ask), torch.full((8, 64), 3.0))
    assert plan.time.flops == 2 * 8 * 64 * 64 * (2 if holds else 5)


@pytest.mark.parametrize(
    "ask", [lambda x: x.sum() > 0, lambda x: x.nonzero().numel()], ids=["item", "nonzero"]
)
def test_values_that_a_plan_has_not_are_named(ask: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"reads values while it runs \(aten"):
        planned(Asks(ask), torch.zeros(8, 64))
    assert not dist.is_initialized()


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    assert_raises(ValueError, "there is no batch", plan_model, lambda: MLP(8, 1), [], gpus=1)
    assert_raises(ValueError, "without a loss", plan_model, lambda: MLP(8, 1), [torch.zeros(2, 8)], gpus=1)
    for wrong, words in (
        ({"gpus": 0}, "dp_shard is 0"),
        ({"options": {"cpu_offload": True}}, "leave cpu_offload out"),
        ({"options": {"device": "cpu"}}, "leave device out"),
    ):
        assert_raises(ValueError, words, planned, MLP(8, 1), torch.zeros(2, 8), **wrong)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert_raises(RuntimeError, "has a process group already", planned, MLP(8, 1), torch.zeros(2, 8))
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_nothing_gets_memory_and_nothing_is_left() -> None:
    width = 2**17
    before = torch.get_default_device()

    def huge() -> nn.Module:
        return MLP(width, 8)

    plan = plan_model(huge, [torch.zeros(4, 1).expand(4, width)], gpus=1024, loss=mean_square)
    assert plan.parameters == 8 * width**2
    assert not plan.fits
    assert torch.get_default_device() == before
    assert not dist.is_initialized()
    # And once more, with FlatFSDP's optimizer by itself.
    again = plan_model(
        huge,
        [torch.zeros(4, 1).expand(4, width)],
        gpus=1024,
        loss=mean_square,
        build_optimizer=lambda parameters: AdamW(parameters, nonfinite="skip"),
    )
    assert again.memory == plan.memory
