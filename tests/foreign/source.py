"""A foreign test file, translated in memory; line numbers stay those of the file.

for everybody    GPUs become the CPU: "cuda", .cuda(), device_ids=, TEST_CUDA, device_count(), GradScaler()
for `shard`      .to_local() and ._local_tensor are the parameter itself, which is this rank's part, and
                 assertions about the inside of the other engine are left out, each with its reason
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

RANKS = "_RANKS"
"""Name of the number of ranks, in translated files."""

COUNTED = "counts the other engine's collectives"
PRIVATE = {
    "backward_count": "counts calls of FSDP2's own autograd function",
    "expected_numel": "the size of FSDP2's buffer",
    "expected_all_gather_count": COUNTED,
    "expected_reduce_scatter_count": COUNTED,
    "expected_all_reduce_count": COUNTED,
    "expected_all_reduces": COUNTED,
}
"""Names in assertions that are left out for `shard`, and why."""

NOT_HERE = ("megatron", "tests.unit_tests")
"""Packages that need not be installed: what files import from them comes from `megatron.py`."""


class LeftOut(NamedTuple):
    """An assertion that is not made."""

    line: int
    assertion: str
    reason: str


class Translated(NamedTuple):
    """A file as code.

    Attributes:
        code: what to execute.
        left_out: assertions that it lacks.
        is_megatron: whether it tests Megatron-FSDP.
    """

    code: ast.Module
    left_out: list[LeftOut]
    is_megatron: bool


def translate(file: Path, *, for_shard: bool) -> Translated:
    """Reads a file and translates it."""
    tree = ast.parse(file.read_text())
    imports = _WithoutImports()
    tree = _OnCPU().visit(imports.visit(tree))
    own = _OwnInterface()
    if for_shard:
        tree = own.visit(tree)
    return Translated(ast.fix_missing_locations(tree), own.left_out, imports.found)


class _WithoutImports(ast.NodeTransformer):
    found = False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if not (node.module or "").startswith(NOT_HERE):
            return node
        self.found = True
        return ast.copy_location(ast.Pass(), node)


class _OnCPU(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.copy_location(ast.Constant("cpu"), node) if node.value == "cuda" else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(value=True), node) if node.id == "TEST_CUDA" else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.keywords = [each for each in node.keywords if each.arg != "device_ids"]
        if isinstance(node.func, ast.Name) and node.func.id == "GradScaler":
            named = [each for each in node.keywords if each.arg != "device"]
            node.keywords = [ast.keyword("device", ast.Constant("cpu")), *named]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "device_count":
            return ast.copy_location(ast.Name(RANKS, ast.Load()), node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and not node.args:
            return node.func.value
        return node


class _OwnInterface(ast.NodeTransformer):
    def __init__(self) -> None:
        self.left_out: list[LeftOut] = []

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return self._kept(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr.startswith("assert"):
            return self._kept(node)
        return self.generic_visit(node)  # type: ignore[return-value]

    def _kept(self, node: ast.stmt) -> ast.stmt:
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in PRIVATE]
        if not names:
            return self.generic_visit(node)  # type: ignore[return-value]
        self.left_out.append(LeftOut(node.lineno, ast.unparse(node), PRIVATE[names[0]]))
        return ast.copy_location(ast.Pass(), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return node.value if node.attr == "_local_tensor" else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to_local":
            return node.func.value
        return node
