"""Every Python block of README.md and docs/ runs as written, in small sizes."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import flatfsdp
from flatfsdp import checkpoint
from flatfsdp.compat.fairscale import FullyShardedDataParallel
from flatfsdp.contract.claimed import is_unit
from flatfsdp.fp8 import DelayedScaling
from flatfsdp.layers import Embedding, LayerNormLinear, Linear, LinearCrossEntropy, TransformerLayer
from flatfsdp.layers.base import MatmulLayer
from flatfsdp.models import PRESETS
from flatfsdp.models.gpt import GPT, Block, GPTConfig
from tests.support.checkpoints import names_in
from tests.support.ecosystem.launched import launched
from tests.support.programs import run_program
from tests.support.ranks import run_ranks
from tests.unit.docs.pages import PAGES

LARGE = {"4096, 16384, 32": "32, 64, 4", "range(24)": "range(3)"}


PROGRAMS = {f"docs/{name}.md" for name in ("huggingface", "lightning", "peft", "trl", "tutorial")}
"""Pages whose blocks are one program."""


def blocks() -> dict[str, str]:
    """By page and position."""
    found = {}
    for name, page in PAGES.items():
        texts = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for index, block in enumerate(["".join(texts)] if name in PROGRAMS else texts):
            for large, small in LARGE.items():
                block = block.replace(large, small)
            found[f"{name} {index}"] = block
    return found


BLOCKS = blocks()


def run(block: str, **names: Any) -> dict[str, Any]:
    """What the block has defined, which sees what the package exports and `names`."""
    return run_alone(block, **{**vars(flatfsdp), "torch": torch, **names})


def run_alone(block: str, **names: Any) -> dict[str, Any]:
    """What the block has defined, which sees `names` only."""
    exec(compile(block, "a block of Python in the documentation", "exec"), names)
    return names


class FP8GPT(nn.Module):
    """A GPT of layers that can compute in FP8; gives the mean loss of (tokens, targets), sequence first."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocab, 32)
        self.layers = nn.ModuleList(TransformerLayer(32, 64, 4, fuse_qkv_params=True) for _ in range(2))
        self.head = LinearCrossEntropy(32, vocab)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x, targets)
        return loss


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, 64, shape)


CONFIG = GPTConfig(vocab=64, layers=2, hidden=32, heads=4, seq=16)


def an_own_hugging_face_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of README.md and of the site's first page, with a tiny Llama as the reader's model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    batches = [{"input_ids": rows, "labels": rows} for rows in (tokens_of(2, 16), tokens_of(2, 16))]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        block = BLOCKS[name].replace("path/to/model", folder)
        found = run_alone(block, torch=torch, model=model, batches=batches)
    assert is_unit(found["model"]) and type(found["model"]).__name__ == "LlamaForCausalLM"
    after = found["model"].state_dict()
    before = model.state_dict() if name.startswith("README.md") else None
    assert before is None or any(not torch.equal(before[key], after[key]) for key in before)
    assert name.startswith("README.md") or capsys.readouterr().out.startswith("loss ")


def accumulated(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = flatfsdp.shard(GPT(CONFIG), flatfsdp.by_class(Block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches = [(tokens_of(2, 16), tokens_of(2, 16)) for _ in range(3)]
    run(BLOCKS[name], model=model, optimizer=optimizer, batches=batches)
    assert capsys.readouterr().out.startswith("loss ")
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def a_wrapped_model(name: str, _: pytest.CaptureFixture[str]) -> None:
    batches = [(tokens_of(2, 16), tokens_of(2, 16)) for _ in range(3)]
    found = run(BLOCKS[name], GPT=GPT, Block=Block, config=CONFIG, batches=batches)
    assert all(parameter.grad is not None for parameter in found["model"].parameters())


def in_place(name: str, _: pytest.CaptureFixture[str]) -> None:
    batches = [(tokens_of(2, 16), tokens_of(2, 16)) for _ in range(3)]
    found = run(BLOCKS[name], GPT=GPT, Block=Block, config=CONFIG, batches=batches)
    plain = GPT(CONFIG)
    assert isinstance(found["model"], GPT) and found["state"].keys() == plain.state_dict().keys()
    assert len(found["decayed"]) + len(found["others"]) == len(list(plain.parameters()))
    assert {name for name, p in plain.named_parameters() if p.dim() > 1} == {
        name for name, p in found["model"].named_parameters() if any(p is each for each in found["decayed"])
    }


def fp8_layers(name: str, _: pytest.CaptureFixture[str]) -> None:
    batches = [(torch.randn(16, 2, 32), torch.randn(16, 2, 32)) for _ in range(3)]
    found = run(BLOCKS[name], batches=batches)
    assert found["model"].fsdp_state.shared.microbatch.is_last
    assert all(parameter.grad is not None for parameter in found["model"].parameters())


def fp8_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [(tokens_of(16, 2), tokens_of(16, 2)) for _ in range(3)]
    run(BLOCKS[name], GPT=FP8GPT, TransformerLayer=TransformerLayer, config=64, batches=batches)
    assert "fp8" in capsys.readouterr().out.lower()


def fp8_overflows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The block prints what the page shows below: ones, then thousands, then infinities."""
    model = flatfsdp.FlatFSDP(nn.Sequential(Linear(32, 32), LayerNormLinear(32, 32)))
    batches = [(torch.full((16, 32), value), torch.ones(16, 32)) for value in (1.0, 1e3, float("inf"))]
    run(BLOCKS[name], model=model, batches=batches)
    printed = capsys.readouterr().out
    assert printed.startswith("FP8 overflows") and f"```\n{printed}```" in PAGES["docs/fp8.md"].read_text()


def replayed_microbatches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs all microbatches are eager."""
    config = GPTConfig(layers=1, hidden=32, heads=2, seq=8, vocab=32)
    model = flatfsdp.shard(GPT(config), flatfsdp.by_class(Block))
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    batches = list(torch.randint(0, 32, (2, 2, 2, 8)))
    run(BLOCKS[name], model=model, optimizer=optimizer, batches=batches)
    assert capsys.readouterr().out == "0 microbatches were replayed\n"
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def parallel_ranks(name: str, _: pytest.CaptureFixture[str]) -> None:
    norms = run_ranks(4, norms_of_one_rank, BLOCKS[name])
    assert all(0 < norm < float("inf") for of_rank in norms for norm in of_rank)


def norms_of_one_rank(rank: int, world_size: int, block: str) -> list[float]:
    large, PRESETS["8b"] = PRESETS["8b"], PRESETS["tiny"]
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, PRESETS["tiny"].vocab, (2, 8, 16))
    try:
        found = run(
            block, Schedule1F1B=Schedule1F1B, DelayedScaling=DelayedScaling, tokens=tokens, targets=targets
        )
    finally:
        PRESETS["8b"] = large
    return [float(parameter.grad.as_subclass(Tensor).norm()) for parameter in found["model"].parameters()]


def async_save(name: str, _: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(2, saved_and_loaded, BLOCKS[name], f"{folder}/step-7") == [{"step": 7}] * 2


def saved_in_background(name: str, _: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model = flatfsdp.FlatFSDP(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())

        def train_one_step() -> None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        names = {"model": model, "optimizer": optimizer, "train_one_step": train_one_step, "steps": 25}
        run(BLOCKS[name], CheckpointManager=checkpoint.CheckpointManager, **names)
        assert names_in(Path("out/run")) == ["step-00000010", "step-00000020"]


def kept_by_a_path_of_its_own(name: str, _: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model = flatfsdp.FlatFSDP(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        run(BLOCKS[name], checkpoint=checkpoint, model=model, optimizer=optimizer, step=999)
        assert checkpoint.load("out/kept/1000", model, optimizer) == {}


def saved_and_loaded(rank: int, world_size: int, block: str, path: str) -> dict[str, int]:
    model = flatfsdp.FlatFSDP(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    names = {"checkpoint": checkpoint, "dcp": dcp, "model": model, "optimizer": optimizer}
    found = run(block, **names, path=path, step=7, gloo_group=dist.new_group(backend="gloo"))
    found["saved"].result()
    return checkpoint.load(path, model, optimizer)


def fairscale_imports(name: str, _: pytest.CaptureFixture[str]) -> None:
    found = run_alone(BLOCKS[name])
    imported = re.search(r"^from flatfsdp.*?\((.*?)\)", BLOCKS[name], re.DOTALL | re.MULTILINE)
    assert imported is not None
    assert all(each in found for each in re.findall(r"\w+", imported[1]))


def fairscale_shards(name: str, _: pytest.CaptureFixture[str]) -> None:
    saved, model = (FullyShardedDataParallel(nn.Linear(4, 4)) for _ in range(2))
    weights, metadata = [saved.local_state_dict()], [saved.local_metadata_dict()]
    run(
        BLOCKS[name],
        FullyShardedDataParallel=FullyShardedDataParallel,
        model=model,
        weights_of_all_ranks=weights,
        metadata_of_all_ranks=metadata,
    )
    for key, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


def huggingface_guide(name: str, _: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, huggingface_of_one_rank, BLOCKS[name].replace('"out/', f'"{folder}/'))


def huggingface_of_one_rank(rank: int, world_size: int, block: str) -> None:
    with launched(rank, world_size):
        found = run_alone(block)
    assert found["same"] and len(found["trainer"].state.log_history) == 5
    assert found["metrics"]["eval_loss"] < 10 and found["text"].shape == (1, 12)


def trl_guide(name: str, _: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, trl_of_one_rank, BLOCKS[name].replace('"out/', f'"{folder}/'))


def trl_of_one_rank(rank: int, world_size: int, block: str) -> None:
    with launched(rank, world_size):
        found = run_alone(block)
    histories = [found[name].state.log_history for name in ("tuned", "preferring", "reinforced")]
    assert [len(history) for history in histories] == [5, 5, 5]
    assert histories[1][3]["loss"] < histories[1][0]["loss"]
    assert is_unit(found["preferring"].ref_model) and not is_unit(found["reinforced"].ref_model)


def peft_guide(name: str, _: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = run_alone(BLOCKS[name])
    assert found["merged"] != found["reference"]
    trained, whole = found["model"].state_dict(), found["full"].state_dict()
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(trained[f"base_model.model.{weight}"], whole[weight])


def lightning_guide(name: str, _: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, lightning_of_one_rank, BLOCKS[name].replace('"out/', f'"{folder}/'))


def lightning_of_one_rank(rank: int, world_size: int, block: str) -> None:
    """Runs the page as Lightning starts a rank."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("LOCAL_RANK", str(rank))
        patch.chdir(folder)
        found = run_alone(block)
        assert found["weights"]["head.weight"].isfinite().all()
        assert found["further"].current_epoch == 4
        assert [ema.updates for ema in (found["trainer"].strategy.ema, found["ema"])] == [4, 3]


def a_model_of_ones_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the page alone, as `python train.py` does, and on two ranks."""
    found = run_alone(BLOCKS[name])
    assert found["losses"][-1] < found["losses"][0]
    assert capsys.readouterr().out.startswith("step ")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(BLOCKS[name])
        done = run_program(program, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    # The first rank alone prints, what the page shows.
    shown = re.search(r"```\n(step .*?)```", PAGES[name.split()[0]].read_text(), re.DOTALL)
    assert shown is not None
    expected, losses = (
        [float(line.split()[-1]) for line in text.splitlines()] for text in (shown[1], done.stdout)
    )
    assert losses == pytest.approx(expected, rel=0.1)


def a_program_that_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what the page shows below it, with numbers near those."""
    page = PAGES[name.split()[0]].read_text()
    with tempfile.TemporaryDirectory() as folder:
        run_alone(BLOCKS[name].replace('"out/', f'"{folder}/'), __name__="__main__")
    shown = re.search(r"```\n(.*?)```", page[page.index(BLOCKS[name]) + len(BLOCKS[name]) + 3 :], re.DOTALL)
    assert shown is not None
    number = r"\d+\.\d+"
    expected, printed = (
        [line.rstrip() for line in text.splitlines()] for text in (shown[1], capsys.readouterr().out)
    )
    assert [re.sub(number, "#", line) for line in printed] == [re.sub(number, "#", line) for line in expected]
    values, shown_values = (
        [float(each) for each in re.findall(number, "\n".join(lines))] for lines in (printed, expected)
    )
    assert values == pytest.approx(shown_values, rel=0.1)


def tutorial(name: str, _: pytest.CaptureFixture[str]) -> None:
    """Each line that the page shows, with losses near those."""
    pytest.importorskip("transformers")
    page = PAGES[name.split()[0]].read_text()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "tutorial.py")
        program.write_text(BLOCKS[name].replace("out/", f"{folder}/out/"))
        done = run_program(program, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.search(r"```\n([\d,]+ tokens.*?)```", page, re.DOTALL)
    assert shown is not None
    expected, losses = (re.findall(r"loss (\d\.\d+)", text) for text in (shown[1], done.stdout))
    assert len(losses) == 4 and losses[-1] == losses[-2]
    assert [float(loss) for loss in losses] == pytest.approx([float(loss) for loss in expected], rel=0.1)
    # The rows of a step, over the end of an epoch, on one rank and on three.
    functions = re.search(r"def row\(.*?world\)\]\)\n", BLOCKS[name], re.DOTALL)
    assert functions is not None
    training = torch.arange(244)
    (whole,), parts = (
        [
            run_alone(functions[0], torch=torch, training=training, rank=rank, world=world)["rows_after"](230)
            for rank in range(world)
        ]
        for world in (1, 3)
    )
    assert torch.equal(torch.cat(parts).sort().values, whole.sort().values)
    assert len({*whole[:14].tolist()}) == 14 and len({*whole[14:].tolist()}) == 18


def a_resumed_loader(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads on where it was, in the second epoch."""
    pytest.importorskip("torchdata")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = run_alone(BLOCKS[name])
        shutil.rmtree("out")
        whole = found["train"](40)
    assert capsys.readouterr().out == f"batches {whole}\n" and len({*whole}) == 40


def a_model_in_fp8(name: str, _: pytest.CaptureFixture[str]) -> None:
    found = run_alone(BLOCKS[name])
    assert sum(isinstance(layer, MatmulLayer) for layer in found["model"].modules()) == 4
    assert found["losses"][-1] < found["losses"][0]


def a_program_moved_from_fsdp2(name: str, _: pytest.CaptureFixture[str]) -> None:
    first, second = (BLOCKS[f"docs/from_fsdp2.md {index}"] for index in range(2))
    for of_fsdp2, of_flatfsdp in run_ranks(2, losses_of_both, first, second):
        assert of_flatfsdp == pytest.approx(of_fsdp2, abs=2e-6)


def losses_of_both(rank: int, world_size: int, *programs: str) -> list[float]:
    torch.manual_seed(1 + rank)
    batches = [(tokens_of(2, 16), tokens_of(2, 16)) for _ in range(4)]
    losses = []
    for program in programs:
        torch.manual_seed(0)
        names = {"torch": torch, "model": GPT(CONFIG), "Block": Block, "batches": batches}
        losses.append(float(run_alone(program, **names)["loss"]))
    return losses


def transformer_engines_layers(name: str, _: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine needs a GPU")
    found = run_alone(BLOCKS[name])
    assert len(found["losses"]) == 2 and found["losses"][1] < found["losses"][0]


def an_optimizer_of_ones_own(name: str, _: pytest.CaptureFixture[str]) -> None:
    found = run_alone(BLOCKS[name])
    torch.testing.assert_close((found["after"] - found["before"]).abs(), torch.full((8, 32), 0.5))


def a_layer_of_ones_own(name: str, _: pytest.CaptureFixture[str]) -> None:
    """The block's gradients are those of autograd."""
    found = run_alone(BLOCKS[name])
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    torch.manual_seed(0)
    for linear in plain:
        linear.weight = nn.Parameter(torch.randn(16, 16) / 4)
    for x in found["batches"]:
        plain[1](plain[0](x).relu()).square().mean().backward()
    assert len(found["gradients"]) == 2
    for parameter, gradient in zip(plain.parameters(), found["gradients"], strict=True):
        torch.testing.assert_close(gradient.view(16, 16), parameter.grad)


def a_measured_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = flatfsdp.shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), flatfsdp.by_class(nn.Linear))
    optimizer = torch.optim.AdamW(model.parameters())
    found = run(BLOCKS[name], model=model, optimizer=optimizer, batches=torch.randn(2, 4, 16))
    printed = capsys.readouterr().out
    assert " ms a step" in printed and "main_grad" in printed and printed.endswith("None\n")
    # A copy of 8 bytes in the first microbatch, an addition of 12 in the second.
    assert found["moved"]["accumulate"] == pytest.approx(20, abs=0.1)


def a_watched_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_alone(BLOCKS[name].replace('"out/', f'"{folder}/'))
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    assert re.fullmatch(r"[\d,]+ tokens/s, MFU None\n", capsys.readouterr().out)
    assert [json.loads(line)["step"] for line in lines] == [10, 20]
    assert all(json.loads(line)["grad_norm"] > 0 for line in lines)


def lanes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def batch(step: int, number: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1000 * step + number)
        return tokens_of(2, 16), tokens_of(2, 16)

    model = run(BLOCKS[name], GPT=GPT, Block=Block, config=CONFIG, batch=batch)["model"]
    assert capsys.readouterr().out == "16 of 16 microbatches are run here\n"
    plain = GPT(CONFIG)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(3):
        for number in range(0, 16, 2):
            (plain(*batch(step, number)) / 16).backward()
            (plain(*batch(step, number + 1)) / 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def own_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that stands below the block."""
    lines = PAGES["docs/numerics.md"].read_text().splitlines()
    command = next(line for line in lines if "--model my_model.py" in line)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my_model.py").write_text(BLOCKS[name])
        arguments = command.replace("my_model.py", f"{folder}/my_model.py").split()[1:]
        done = run_program(*arguments, "--device", "cpu", "--out", folder)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(Path(folder, "verify-model.json").read_text())
    assert report["equal"] and [row["switch"] for row in report["rows"]] == ["flag", "reshard"]
    assert report["rows"][0]["on"]["losses"][0] != report["rows"][0]["on"]["losses"][-1]


def planned_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_alone(BLOCKS[name])["found"]
    assert plan.parameters == 3 * sum(
        each.numel() for each in nn.TransformerEncoderLayer(1024, 16).parameters()
    )
    assert plan.fits and plan.sent.total > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(plan.units) == 5


def planned_llama(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_alone(BLOCKS[name])["found"]
    assert found.fits and found.job.ranks.tp == 2
    assert len(capsys.readouterr().out.splitlines()) == 1


RUNS: dict[str, Callable[[str, pytest.CaptureFixture[str]], None]] = {
    "model, policy_of(model), precision": an_own_hugging_face_model,
    "policy_of(model),  # one unit per layer": an_own_hugging_face_model,
    "loss.backward()  # reduced in the last one": accumulated,
    "model = auto_wrap(\n    GPT(config), by_class(Block), precision": a_wrapped_model,
    "is_matrix = name.endswith": in_place,
    "# train.py": a_model_of_ones_own,
    "no_decay = {": a_program_that_prints,
    'CheckpointManager("out/run", keep=2': a_program_that_prints,
    'CheckpointManager("out/run", async_save': saved_in_background,
    "if (step + 1) % 1000 == 0": kept_by_a_path_of_its_own,
    "def batch_of(step": a_program_that_prints,
    'CheckpointManager("out/layout")': a_program_that_prints,
    'CheckpointManager("memory://': a_program_that_prints,
    "dcp_to_torch_save(": a_program_that_prints,
    "convert(model, lambda layer, name: True)": a_model_in_fp8,
    "from torch.distributed.fsdp import fully_shard": a_program_moved_from_fsdp2,
    "shard(model, by_class(Block))  # for fully_shard": a_program_moved_from_fsdp2,
    "te.TransformerLayer(\n": transformer_engines_layers,
    "class SignSGD": an_optimizer_of_ones_own,
    "class InPlaceLinear": a_layer_of_ones_own,
    "def train_one_step": a_measured_step,
    "metrics.report(": a_watched_run,
    "StatefulDataLoader(data": a_resumed_loader,
    "layer = TransformerLayer(": fp8_layers,
    "fp8_weights=CurrentScaling()": fp8_weights,
    "count_overflows(model)": fp8_overflows,
    "step = replayed(model, forward_backward)": replayed_microbatches,
    "make_mesh(pp=2, tp=2)": parallel_ranks,
    "dcp.async_save": async_save,
    "from flatfsdp.compat.fairscale import": fairscale_imports,
    "consolidate_shard_weights": fairscale_shards,
    "# my_model.py": own_model,
    "numbers = model.microbatch_numbers(": lanes,
    "found = plan(Job(model": planned_model,
    "advise(found)": planned_llama,
    "docs/huggingface.md": huggingface_guide,
    "docs/tutorial.md": tutorial,
    "docs/peft.md": peft_guide,
    "docs/trl.md": trl_guide,
    "docs/lightning.md": lightning_guide,
}
"""What runs the block that contains a text, or a whole page, and looks at what it has done."""


def is_of(text: str, name: str) -> bool:
    page, _ = name.split()
    return text == page if page in PROGRAMS else text in BLOCKS[name]


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (test,) = (test for text, test in RUNS.items() if is_of(text, name))
    test(name, capsys)


def test_every_run_has_a_block() -> None:
    assert [text for text in RUNS if not any(is_of(text, name) for name in BLOCKS)] == []
