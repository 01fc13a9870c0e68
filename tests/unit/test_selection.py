"""What `make test` leaves out has been seen elsewhere, and nothing else is left out."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.support import selection

PROGRAM = """
import pytest

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [[], {}])
@pytest.mark.parametrize("c", ["x", "y"])
def test_three(a, b, c): ...

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", [1, 2])
def test_two(a, b): ...

@pytest.mark.parametrize(("a", "b", "c"), [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_listed(a, b, c): ...

def test_none(): ...
"""


class Kept:
    """A plugin that asks which of the collected items are to run."""

    items: list[pytest.Item]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = selection.one_case_a_pair(items)


def test_every_pair_of_values_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "test_program.py"
    file.write_text(PROGRAM)
    kept = Kept()
    assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", str(file)], plugins=[kept]) == 0
    cases: dict[str, list[dict[str, object]]] = {}
    for item in kept.items:
        call = getattr(item, "callspec", None)
        cases.setdefault(item.name.partition("[")[0], []).append(call.params if call else {})
    assert {name: len(found) for name, found in cases.items()} == {
        "test_three": 6,
        "test_two": 6,
        "test_listed": 3,
        "test_none": 1,
    }
    for names, values in (("ab", 6), ("ac", 6), ("bc", 4)):
        pairs = {tuple(repr(case[name]) for name in names) for case in cases["test_three"]}
        assert len(pairs) == values
    assert len({frozenset(combinations(case.items(), 2)) for case in cases["test_listed"]}) == 3


def test_tests_of_kernels_import_only_what_changes_the_digest() -> None:
    files = set(selection.files_of_kernels())
    importing = re.compile(r"^ *from (tests\.support[.\w]*) import (\w+)", re.MULTILINE)
    for path in files:
        for module, name in importing.findall(path.read_text()):
            imported = selection.ROOT / module.replace(".", "/")
            imported = imported / f"{name}.py" if imported.is_dir() else imported.with_suffix(".py")
            assert imported in files, f"{path} imports {imported}, which OF_KERNELS leaves out"


def test_a_changed_kernel_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    digests = {selection._digest()}
    for name, text in (
        ("kernels/norm/rows.py", "a"),
        ("kernels/norm/rows.py", "b"),
        ("tests/kernels/x.py", ""),
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        digests.add(selection._digest())
    (tmp_path / "flatfsdp").mkdir()
    (tmp_path / "flatfsdp" / "other.py").write_text("")
    assert len(digests) == 4 and selection._digest() in digests
