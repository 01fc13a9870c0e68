"""Words of FSDP1, FSDP2 and DDP are answered with ours, as the pages say; typos are left to Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatfsdp import FlatFSDP, Precision, auto_wrap, by_class, checkpoint, microbatches, shard
from flatfsdp.contract.foreign_words import DTYPES, METHODS, OPTIONS
from flatfsdp.engine.api.methods import UnitMethods
from flatfsdp.options import Options
from tests.unit.docs.pages import DOCS


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


CALLS: dict[str, Callable[..., Any]] = {
    "shard": lambda **options: shard(model(), by_class(nn.Linear), **options),
    "auto_wrap": lambda **options: auto_wrap(model(), by_class(nn.Linear), **options),
    "FlatFSDP": lambda **options: FlatFSDP(model(), **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("word", OPTIONS)
def test_an_option_of_another_engine_names_ours(call: str, word: str) -> None:
    with pytest.raises(TypeError, match=rf"^{call} has no {word}=: {re.escape(OPTIONS[word])}$"):
        CALLS[call](**{word: None})


@pytest.mark.parametrize("word", DTYPES)
def test_a_dtype_of_another_engine_names_ours(word: str) -> None:
    with pytest.raises(TypeError, match=rf"^Precision has no {word}=: {re.escape(DTYPES[word])}$"):
        Precision(**{word: torch.bfloat16})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_fsdp2_names_ours(method: str) -> None:
    for sharded in (shard(model()), FlatFSDP(model())):
        with pytest.raises(TypeError, match=f"no {method}: {re.escape(METHODS[method])}"):
            getattr(sharded, method)(2.0)


def test_typos_and_signatures_are_pythons() -> None:
    for name, call in CALLS.items():
        with pytest.raises(
            TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'reshard_after'"
        ):
            call(reshard_after=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'compute_dtype'"):
        Precision(compute_dtype=torch.bfloat16)  # type: ignore[call-arg]
    assert "compute" in inspect.signature(Precision).parameters
    assert list(inspect.signature(FlatFSDP).parameters) == ["module", "options"]
    assert list(inspect.signature(shard).parameters) == ["module", "policy", "options"]


def test_no_word_is_ours() -> None:
    options = {*Options.__annotations__, "policy"}
    assert not options & OPTIONS.keys()
    assert not inspect.signature(Precision).parameters.keys() & DTYPES.keys()
    # In place, the class of the model is behind ours.
    assert all(vars(UnitMethods)[method].__name__ == "refuse" for method in METHODS)


PAGES = [DOCS[name] for name in ("from_fsdp1.md", "from_fsdp2.md", "from_ddp.md", "zero.md")]


def test_the_pages_have_the_words() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [word for word in (*OPTIONS, *DTYPES) if f"{word}=" not in text]
    missing += [method for method in METHODS if f"{method}(" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.stem)
def test_the_words_of_the_pages_are_answered(page: Path) -> None:
    """Those of the first column that are options there and not here."""
    cells = re.findall(r"^\| ([^|]*) \|", page.read_text(), re.MULTILINE)
    words = {word for cell in cells for word in re.findall(r"\b([a-z_0-9]+)=(?!=)", cell)}
    ours = {*Options.__annotations__, *OPTIONS, *DTYPES}
    assert words - ours == words & {
        "min_num_params",  # of a policy
        "offload_params",  # of CPUOffload
        "optimizer",
    }


# ---- arguments in another order -------------------------------------------------------------------------


def test_arguments_in_another_order_are_named(tmp_path: Path) -> None:
    plain: Any = model()
    with pytest.raises(TypeError, match=r"shard takes a module, and then the policy, not a function first"):
        shard(by_class(nn.Linear), plain)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"not a list first\. Several modules are one unit as parts"):
        shard([plain[0], plain[1]])  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"microbatches\(model, batches\) takes the model first, not a list"):
        next(iter(microbatches([torch.ones(1)], plain)))  # type: ignore[arg-type]
    shard(plain)
    for call in (checkpoint.save, checkpoint.load):
        name = call.__name__
        with pytest.raises(TypeError, match=rf"^{name} takes the folder first, .*: {name}\(path, model"):
            call(plain, tmp_path)


def test_a_second_shard_says_so() -> None:
    plain = model()
    shard(plain, by_class(nn.Linear))
    with pytest.raises(ValueError, match="this Sequential is sharded already"):
        shard(plain, by_class(nn.Linear))


@pytest.mark.parametrize("call", CALLS)
def test_a_number_is_no_flag(call: str) -> None:
    with pytest.raises(TypeError, match=r"reshard_after_forward is 2; .*FSDP2's.*dp_shard="):
        CALLS[call](reshard_after_forward=2)
    for name in ("sync_module_states", "cpu_offload", "optimize_backward_concat", "cast_inputs"):
        with pytest.raises(TypeError, match=rf"{name} is 'no'; it must be True or False$"):
            CALLS[call](**{name: "no"})
