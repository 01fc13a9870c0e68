"""The floor plan: a package imports only what stands above it, and nothing goes round in circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torch import nn

import flatfsdp
from flatfsdp import FlatFSDP, FlattenParamsWrapper
from flatfsdp.engine.api.methods import UnitMethods
from flatfsdp.engine.whole.units import UnitModule

PACKAGE = Path(flatfsdp.__file__).parent
ORDER = (
    "torch_private",
    "kernels",
    "comm",
    "contract",
    "fp8",
    "options",
    "microbatch",
    "byte_ledger",
    "flat",
    "matmul",
    "layers",
    "optim",
    "engine/storage",
    "engine/step",
    "engine/guards",
    "engine/whole",
    "engine/build",
    "engine/replay",
    "engine/api",
    "parallel",
    "checkpoint",
    "models",
    "plan",
    "profiling",
    "compat",
    "parity",
    "training",
    "cli",
)
"""From the ground up; packages inside a package stand for themselves where they are listed."""


def room_of(module: str) -> str:
    """The entry of the floor plan that a module belongs to."""
    parts = module.split(".")[1:]
    nested = "/".join(parts[:2])
    return nested if nested in ORDER else parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, also inside its functions, and for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flatfsdp"):
            for alias in node.names:
                inner = PACKAGE.parent / node.module.replace(".", "/") / alias.name
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("flatfsdp."))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def edges() -> dict[str, set[str]]:
    """What each module imports; not found while tests are collected, which every test process does."""
    return {module: set(imports_of(path)) - {module, "flatfsdp"} for module, path in FILES.items()}


def test_every_entry_is_on_the_plan() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if not path.name.startswith(("__", "py.typed"))}
    assert entries == {room.split("/")[0] for room in ORDER}
    assert len(entries) <= 22


def test_a_package_imports_only_what_stands_above_it() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in edges().items()
        for other in others
        if module not in ("flatfsdp", "flatfsdp.__main__")
        and ORDER.index(room_of(other)) > ORDER.index(room_of(module))
    ]
    assert wrong == []


def test_layers_and_engine_meet_in_the_contract_alone() -> None:
    pairs = ((module, other) for module, others in edges().items() for other in others)
    rooms = {frozenset(name.split(".")[1] for name in pair) for pair in pairs if "flatfsdp" not in pair}
    assert frozenset({"engine", "layers"}) not in rooms
    assert frozenset({"engine", "contract"}) in rooms


def test_no_circle_of_files() -> None:
    faces = {module for module, path in FILES.items() if path.name == "__init__.py"}
    TopologicalSorter({m: others - faces for m, others in edges().items() if m not in faces}).prepare()


def test_nobody_outside_the_engine_reads_privates_of_a_wrapped_module() -> None:
    """Subclasses may extend them."""
    own = {name for cls in (FlatFSDP, UnitMethods, UnitModule) for name in vars(cls) if name.startswith("_")}
    private = {name for name in own if not name.endswith("__") and not hasattr(nn.Module, name)}
    assert "_apply" not in private and "_unit" in private
    model = FlatFSDP(nn.Linear(2, 2), optimize_backward_concat=False)
    assert {name for name in vars(model) if name.startswith("_")} <= set(
        vars(FlattenParamsWrapper(nn.Linear(2, 2)))
    )
    outside = [path for path in FILES.values() if PACKAGE / "engine" not in path.parents]
    reads = [
        f"{path}:{node.lineno}: {node.attr}"
        for path in outside
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in private
        and ast.unparse(node.value) not in ("self", "super()")
    ]
    assert reads == []


def floors_of(rooms: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms stand above each other up to this one; raises if some stand on each other."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        floors[room] = 1 + max((floors[other] for other in rooms.get(room, ())), default=0)
    return floors


def rooms_below(package: str) -> dict[str, set[str]]:
    """The entries of a package, each with those that it imports."""
    rooms: dict[str, set[str]] = {}
    depth = package.count(".") + 1
    for module, others in edges().items():
        if module.startswith(f"{package}."):
            own = module.split(".")[depth]
            inside = {other.split(".")[depth] for other in others if other.startswith(f"{package}.")}
            rooms.setdefault(own, set()).update(inside - {own})
    return rooms


def test_at_most_ten_floors() -> None:
    """With the command, which stands on everything."""
    floors = floors_of(rooms_below("flatfsdp"))
    assert max(floors.values()) <= 10, floors


def test_at_most_six_floors_in_the_engine() -> None:
    floors = floors_of(rooms_below("flatfsdp.engine"))
    assert max(floors.values()) <= 6, floors


@pytest.mark.parametrize("folder", sorted({p.parent for p in FILES.values()}), ids=lambda p: p.name)
def test_every_folder_says_what_it_holds(folder: Path) -> None:
    first = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").partition("\n")[0]
    assert 20 < len(first) <= 110
    assert first.endswith(".")


def test_files_that_texts_name_exist() -> None:
    """In backticks: beside the file that names them, one folder up, or below the package, kernels or root."""
    root = PACKAGE.parent
    texts = [
        p
        for folder in ("flatfsdp", "kernels", "benchmarks", "examples", "docs")
        for p in (root / folder).rglob("*.[mp][dy]")
    ]
    texts = [path for path in [root / "README.md", *texts] if path.name != "LOG.md"]
    assert len(texts) > 250
    missing = [
        f"{path.relative_to(root)}: {name}"
        for path in texts
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text())
        if not any(
            (folder / name).exists()
            for folder in (path.parent, path.parent.parent, PACKAGE, root / "kernels", root)
        )
    ]
    assert missing == []
