"""The names of attributes through which layers and engine speak stand in `contract/` and nowhere else."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import flatfsdp
from flatfsdp import FlatFSDP, contract
from flatfsdp.checkpoint.local import adopt_late_buffers
from flatfsdp.contract.attribute import Attribute

PACKAGE = Path(flatfsdp.__file__).parent


def names() -> set[str]:
    modules = [f"flatfsdp.contract.{found.name}" for found in pkgutil.iter_modules(contract.__path__)]
    values = [value for name in modules for value in vars(importlib.import_module(name)).values()]
    # PyTorch's own, which everybody reads.
    return {value.name for value in values if isinstance(value, Attribute)} - {"grad"}


def spelled_out(path: Path, wanted: set[str]) -> Iterator[str]:
    """Attributes that are got or set by a string, or set on something else than `self`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            found = [each.value for each in node.args if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found = [] if isinstance(node.value, ast.Name) and node.value.id == "self" else [node.attr]
        else:
            continue
        yield from (f"{path}:{node.lineno}: {name}" for name in found if name in wanted)


def test_names_stand_in_the_contract_alone() -> None:
    wanted = names()
    assert {"main_grad", "fp8_operand", "tensor_model_parallel", "_flatfsdp_name", "exchanges"} <= wanted
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "contract"]
    assert len(files) > 100
    assert [each for path in files for each in spelled_out(path, wanted)] == []


def test_a_name_that_is_spelled_out_is_found(tmp_path: Path) -> None:
    path = tmp_path / "layer.py"
    path.write_text(
        "getattr(weight, 'main_grad')\nweight.fp8_operand = None\nself.main_grad = weight.main_grad"
    )
    found = [each.split(": ")[1] for each in spelled_out(path, names())]
    assert found == ["main_grad", "fp8_operand"]


def test_the_overview_lists_all() -> None:
    assert contract.__doc__ is not None
    overview = contract.__doc__.replace("_flatfsdp_name(s)", "_flatfsdp_name _flatfsdp_names")
    assert [name for name in sorted(names()) if name not in overview] == []


def test_a_layer_with_late_buffers_and_no_way_to_make_them_is_refused() -> None:
    class Halfway(nn.Linear):
        late_buffers = ("scale",)

    model = FlatFSDP(nn.Sequential(Halfway(2, 2)), optimize_backward_concat=False)
    with pytest.raises(TypeError, match="late_buffers needs prepare_load"):
        adopt_late_buffers(model, {})
