"""The commands of the package in blocks of the pages run; installing and `make` are what CI itself does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.unit.docs.pages import PAGES

COMMAND = re.compile(r"(?:\$ )?(?:python -m )?flatfsdp (.*?)(?:  #.*)?")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 8192,
}
"""Stands for the configuration that a page has a path to."""


def commands() -> list[str]:
    blocks = (
        block
        for page in PAGES.values()
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    )
    joined = (re.sub(r"\s*\\\n\s*", " ", block) for block in blocks)
    found = (COMMAND.fullmatch(line) for block in joined for line in block.splitlines())
    return sorted({match[1] for match in found if match})


@pytest.mark.parametrize("command", commands())
def test_command_runs(command: str, tmp_path: Path) -> None:
    if "--hugging-face" in command:
        pytest.importorskip("transformers")
    model = tmp_path / "my_model.py"
    (own,) = re.findall(
        r"```python\n(# my_model\.py.*?)```", PAGES["docs/numerics.md"].read_text(), re.DOTALL
    )
    model.write_text(own)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    there = command.replace("my_model.py", str(model)).replace("path/to/llama-3-8b", str(tmp_path))
    smaller = ("--layers", "4") if command.startswith("plan --preset") else ()
    only_verify = ("--device", "cpu", "--out", str(tmp_path)) if command.startswith("verify") else ()
    if only_verify and ".py" not in command:
        only_verify += ("--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--batch", "2")
    if "--world" in command:
        # Else all precisions and strategies, two minutes long.
        only_verify += ("--steps", "2", "--precision", "bf16", "--strategy", "zero3")
    done = run_program("-m", "flatfsdp", *shlex.split(there), *only_verify, *smaller)
    # 1 is an answer of `plan`: it does not fit.
    assert done.returncode in ((0,) if only_verify else (0, 1)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_pages_have_commands() -> None:
    assert len(commands()) >= 6
