"""The files of other projects that are run, and the tests in them; reads them without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PYTORCH = [
    f"test_fully_shard_{subject}.py"
    for subject in (
        "autograd",
        "frozen",
        "training",
        "mixed_precision",
        "clip_grad_norm_",
        "grad_scaler",
        "state",
        "state_dict",
    )
]
MEGATRON = ["test_fully_shard.py"]
INSIDE = {"test/distributed/_composable/fsdp": PYTORCH, "tests/unit_tests/distributed/mfsdp_v2": MEGATRON}
"""Where the files are in a clone of PyTorch or of Megatron-LM."""


def files_in(folder: Path) -> list[Path]:
    """The files that are run: of a clone, or of a folder that has them at its top.

    Raises:
        FileNotFoundError: if there are none.
    """
    places = [(folder, PYTORCH + MEGATRON), *((folder / inside, names) for inside, names in INSIDE.items())]
    found = [place / name for place, names in places for name in names if (place / name).exists()]
    if not found:
        raise FileNotFoundError(
            f"{folder} has none of the tests; pass a clone of PyTorch or Megatron-LM, or the folder in it "
            f"that has them: {', '.join(INSIDE)}"
        )
    return found


def tests_in(file: Path) -> list[str]:
    """Names of the tests, "Class.test" or "test", in the order of the file."""
    return list(_tests(ast.parse(file.read_text()).body, ""))


def _tests(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _tests(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield prefix + node.name
