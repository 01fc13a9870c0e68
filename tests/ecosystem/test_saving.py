"""Files of sharded models as plain transformers reads them, and what the model reports of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flatfsdp import Precision, auto_wrap, shard
from tests.support.ecosystem.families import FAMILIES, batches_of, needs_transformers
from tests.support.ecosystem.folders import shared_folder
from tests.support.ecosystem.fused import MODELS
from tests.support.ecosystem.training import (
    assert_same_training,
    assert_same_values,
    read,
    train_plain,
    train_sharded,
)
from tests.support.ranks import on_ranks

pytestmark = needs_transformers


@on_ranks(2)
def test_save_pretrained_of_a_wrapped_model(rank: int) -> None:
    family = FAMILIES["Llama"]
    model = auto_wrap(family.build(), family.is_unit)
    state = train_sharded(model, rank, steps=1).state
    with shared_folder() as folder:
        model.save_pretrained(folder)
        assert_same_values(read(family, folder).state_dict(), state)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_all_ranks_call_save_pretrained_and_one_writes(rank: int, name: str) -> None:
    family = MODELS[name]
    model = shard(family.build(), family.is_unit)
    state = train_sharded(model, rank, steps=1).state
    with shared_folder() as folder:
        # Each rank has its own folder, which shows who writes.
        model.save_pretrained(folder / str(rank))
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["0"]
        plain = read(family, folder / "0")
        assert_same_values(plain.state_dict(), state)
        config = json.loads((folder / "0" / "config.json").read_text())
        assert config["architectures"] == [family.model]
        assert config["dtype"] == "float32"
    inputs = batches_of(rank, 0)[0]
    found, expected = model.eval()(**inputs).logits, plain.eval()(**inputs).logits
    if family.is_fused:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)
    assert train_sharded(model.train(), rank, steps=1).losses


@on_ranks(2)
def test_one_rank_that_saves_alone_is_told_so(rank: int) -> None:
    family = FAMILIES["Llama"]
    model = shard(family.build(), family.is_unit, timeout=1.0)
    train_sharded(model, rank, steps=1)
    with shared_folder() as folder:
        if rank == 0:
            alone = "save_pretrained is collective, and rank 1 did not call it"
            with pytest.raises(RuntimeError, match=alone):
                model.save_pretrained(folder)
        assert list(folder.iterdir()) == []
        dist.barrier()
        # Nothing is left behind: all ranks together can save.
        model.save_pretrained(folder)
        assert list(folder.iterdir()) != []


@on_ranks(2)
def test_who_has_to_save_and_what_is_said_of_it(rank: int) -> None:
    """All ranks that share the model save, or one with a state dict; the dtype is that of the files."""
    family = FAMILIES["Llama"]
    options: dict[str, Any] = {"precision": Precision(compute=torch.bfloat16)}
    model = shard(family.build(), family.is_unit, **options)
    state = model.state_dict()
    alone = [dist.new_group([each]) for each in range(2)][rank]
    options["mesh"] = DeviceMesh.from_group(alone, "cpu")
    by_itself = shard(family.build(), family.is_unit, **options)
    with shared_folder() as folder:
        model.save_pretrained(folder / "together")
        if rank == 0:
            model.save_pretrained(folder / "given", state_dict=dict(state))
        else:
            by_itself.save_pretrained(folder / "alone")
        dist.barrier()
        for each in folder.iterdir():
            assert json.loads((each / "config.json").read_text())["dtype"] == "float32"
            assert_same_values(read(family, each).state_dict(), state)
        assert len(list(folder.iterdir())) == 3
    assert model.dtype == torch.bfloat16


@on_ranks(2)
def test_an_error_of_the_rank_that_writes_reaches_all(rank: int) -> None:
    family = FAMILIES["Llama"]
    model = shard(family.build(), family.is_unit)
    with shared_folder() as folder:
        if rank == 0:
            (folder / "config.json").mkdir()
        dist.barrier()
        with pytest.raises(OSError if rank == 0 else RuntimeError, match=r"config\.json"):
            model.save_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_counts_and_dtypes_are_those_of_the_whole_model(rank: int, name: str) -> None:
    family = MODELS[name]
    expected = family.build()
    numbers = expected.num_parameters(), expected.num_parameters(exclude_embeddings=True)
    footprint = expected.get_memory_footprint()
    model = shard(family.build(), family.is_unit, precision=Precision(compute=torch.bfloat16))
    for _ in range(2):
        assert (model.num_parameters(), model.num_parameters(exclude_embeddings=True)) == numbers
        assert model.get_memory_footprint() == footprint
        assert model.dtype == torch.bfloat16
        assert model.device == torch.device("cpu")
        # Also after a forward.
        loss = model(**batches_of(rank, 0)[0]).loss
        assert bool(loss.isfinite())


@on_ranks(2)
def test_embeddings_are_resized_before_or_not_at_all(rank: int, world_size: int) -> None:
    family = FAMILIES["Llama"]

    def resized() -> Any:
        model: Any = family.build()
        torch.manual_seed(1)
        model.resize_token_embeddings(80)
        return model

    model = shard(resized(), family.is_unit)
    with pytest.raises((RuntimeError, TypeError), match=r"resize_token_embeddings.*(before|then) .*shard"):
        model.resize_token_embeddings(96)
    found = train_sharded(model, rank, steps=1)
    assert_same_training(found, train_plain(resized(), rank, world_size, steps=1))
