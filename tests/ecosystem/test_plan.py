"""Plans of Hugging Face models: from configurations, on the command line, and beside what H200s did."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flatfsdp.compat.transformers.from_config import FromConfig
from flatfsdp.engine.whole.memory import GIB
from flatfsdp.options import Precision
from flatfsdp.plan import Job, Machine, Model, Parallelism, plan
from tests.support.assertions import assert_raises
from tests.support.plan_command import check_refused, run
from tests.support.programs import run_benchmark
from tests.support.published import PAGES, results, rows

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
DECODER = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 32}
CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig(**DECODER, dtype="bfloat16"),
    "Qwen2ForCausalLM": transformers.Qwen2Config(**DECODER),
    "MixtralForCausalLM": transformers.MixtralConfig(**DECODER, num_local_experts=4),
    "BertForMaskedLM": transformers.BertConfig(**SIZES, intermediate_size=128, max_position_embeddings=32),
    "GPT2LMHeadModel": transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=96, n_positions=32),
    "T5ForConditionalGeneration": transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, vocab_size=96, decoder_start_token_id=0
    ),
}
BF16 = Precision(compute=torch.bfloat16)


def folder_of(architecture: str, tmp_path: Path) -> Path:
    config = CONFIGS[architecture]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    return tmp_path


# -- from a configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", CONFIGS)
def test_families_are_planned_from_their_configuration(architecture: str, tmp_path: Path) -> None:
    source = FromConfig.load(folder_of(architecture, tmp_path))
    batches = list(source.batches(2, 3, 16))
    found = plan(Job(Model(source.build, batches), Parallelism(dp_shard=2), precision=BF16))
    built = source.build()
    assert type(built).__name__ == architecture
    assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
    assert found.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert built(**batches[0]).loss.isfinite()


def test_layers_that_are_checkpointed_or_fused_are_planned_so(tmp_path: Path) -> None:
    transformers.LlamaConfig(
        **{**DECODER, "num_hidden_layers": 8}, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    folder = tmp_path
    plain, checkpointed, fused = (
        plan(Job(Model(source.build, list(source.batches(1, 64, 32))), Parallelism(), precision=BF16))
        for source in (
            FromConfig.load(folder),
            FromConfig.load(folder / "config.json", checkpointed=True),
            FromConfig.load(folder, fused=True),
        )
    )
    assert checkpointed.memory.peak < plain.memory.peak
    assert checkpointed.time.flops > plain.time.flops == fused.time.flops
    assert fused.time.lines["memory-bound"] < plain.time.lines["memory-bound"]


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    assert_raises(ValueError, r"there is no file .*config\.json", FromConfig.load, tmp_path)
    with pytest.raises(ValueError, match="configuration without architectures"):
        FromConfig(transformers.LlamaConfig(**DECODER))
    config = transformers.ViTConfig(architectures=["ViTForImageClassification"])
    assert_raises(ValueError, "ViTForImageClassification is not known to learn", FromConfig, config)
    config = transformers.LlamaConfig(**DECODER, architectures=["NobodyForCausalLM"])
    assert_raises(ValueError, "has no NobodyForCausalLM", FromConfig, config)
    source = FromConfig(transformers.LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"]))
    assert_raises(ValueError, "64 tokens are longer than the 32 positions", list, source.batches(1, 1, 64))


# -- on the command line ---------------------------------------------------------------------------------


def test_a_configuration_on_the_command_line(tmp_path: Path) -> None:
    folder = folder_of("LlamaForCausalLM", tmp_path)
    options = ("--hugging-face", folder, "--gpus", "2", "--microbatches", "3", "--batch", "2", "--fuse")
    options = (*options, "--precision", "fp8-delayed", "--fp8-weights")
    result = run(*options)
    assert result.exit_code == 0, result.output
    for words in (
        "LlamaForCausalLM, 2 x 32 tokens",
        "model.layers.0",
        "gradients reduced over shards",
        "compute shard, float8_e4m3fn",
        "It fits",
    ):
        assert words in result.output
    small = run(*options, "--json", "--gpu-memory", "0.1")
    assert small.exit_code == 1
    report = json.loads(small.stdout)
    memory = report["memory"]
    assert sum(memory["static"].values()) == memory["between_steps"]
    assert sum(memory["passing"].values()) + memory["between_steps"] == memory["peak"]
    assert sum(report["seconds"].values()) * 1e3 == pytest.approx(report["ms"])
    assert [unit["name"] for unit in report["units"]] == ["", "model.layers.0", "model.layers.1"]


USERS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


def build():
    return Net()


def batches(rank, world):
    while True:
        yield torch.zeros(8, 256)


class Reading(Net):
    def forward(self, x):
        return super().forward(x) * float(x.sum())
"""


def test_functions_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "users.py"
    file.write_text(USERS)
    own = ("--model", f"{file}:build", "--batches", f"{file}:batches", "--gpus", "4")
    result = run(*own, "--microbatches", "2", "--precision", "fp8-current")
    assert result.exit_code == 0, result.output
    assert "0.2 million parameters" in result.output and "blocks.2" in result.output
    refused = {
        ("--model", f"{file}:build"): "--model and --batches go together",
        (*own, "--tp", "2"): "--tp does not apply with --model",
        (*own, "--seq", "8"): "--seq does not apply with --model",
        ("--hugging-face", tmp_path, "--preset", "1b"): "--preset does not apply with --hugging-face",
        ("--fuse",): "--fuse needs --hugging-face",
        ("--hugging-face", tmp_path): "there is no file",
        ("--model", f"{file}:Reading", "--batches", f"{file}:batches"): "reads values while it runs",
        ("--model", f"{file}:missing", "--batches", f"{file}:batches"): "has no function 'missing'",
    }
    for options, words in refused.items():
        check_refused(words, *options)


# -- beside what was measured ----------------------------------------------------------------------------

MODELS = [row["name"] for row in results("plan-models-1.json")["rows"]]


@pytest.mark.parametrize("name", MODELS)
def test_models_on_one_gpu(name: str, benchmarks: Callable[[str], Any]) -> None:
    cases = benchmarks("lib.plan_cases").CASES
    found, measured = cases[name].plan(1), rows("plan-models-1.json")[name]
    peak, ms = found.memory.peak / GIB, 1e3 * found.time.seconds
    # Other versions of transformers may keep a little more or less.
    assert peak == pytest.approx(measured["peak_gib"], rel=0.03)
    if name.startswith("llama-8b"):
        assert ms == pytest.approx(measured["ms"], rel=0.1)
    row = (
        rf"^\| .* \| [\d.]+ \| {measured['peak_gib']:.2f} \| .* % \| \d+ \| {measured['ms']:.0f} \| .* % \|$"
    )
    assert re.search(row, PAGES, re.MULTILINE), row


def test_the_benchmark_runs_and_draws(tmp_path: Path) -> None:
    options = ("--only", "gpt2-tiny", "--ranks", "1", "--steps", "1", "--warmup", "1")
    name, payload, _ = run_benchmark("plan_models", tmp_path, *options, "--json")
    (row,) = payload["rows"]
    assert row["ms"] > 0 and row["loss"] > 0 and not row["failed"] and name == "plan-models-1"


def test_a_machine_that_is_twice_as_fast_needs_half_the_time() -> None:
    source = FromConfig(transformers.LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"]))
    own = Machine()
    fast = Machine(bf16_flops=2 * own.bf16_flops, fp32_flops=2 * own.fp32_flops)
    batches = list(source.batches(1, 1, 32))
    job = Job(Model(source.build, batches), Parallelism())
    slow, quick = (plan(job, each) for each in (own, fast))
    assert quick.time.lines["gemms"] == pytest.approx(slow.time.lines["gemms"] / 2)
    assert quick.memory == slow.memory
