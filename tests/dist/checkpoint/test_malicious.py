"""Checkpoints that would run code: nothing of them runs, on any rank."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from flatfsdp import checkpoint
from flatfsdp.checkpoint import CheckpointError, DamagedCheckpoint, Reader, Writer
from flatfsdp.checkpoint.reader import unpickled_metadata
from tests.support.faults.training import Run
from tests.support.ranks import on_ranks


class Attack:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.makedirs, (self.mark,)


def state_of(run: Run) -> dict[str, Any]:
    return checkpoint.sharded_training_state(run.model, run.optimizer)


def is_refused(run: Run, folder: Path, mark: Path, error: type[Exception], match: str) -> None:
    before = run.digest()
    with pytest.raises(error, match=match):
        run.load(folder)
    assert run.digest() == before
    dist.barrier()
    assert not mark.exists()


@on_ranks(2)
def test_in_the_metadata(rank: int, tmp_path: Path) -> None:
    run, mark = Run(), tmp_path / "mark"
    folder = tmp_path / "plain"
    dcp.save(state_of(run), checkpoint_id=folder)
    if rank == 0:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data["model.0.weight"] = Attack(mark)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    dist.barrier()
    is_refused(run, folder, mark, DamagedCheckpoint, r"\.metadata is refused: it asks for os\.makedirs")
    with pytest.raises(dcp.CheckpointException, match=r"asks for os\.makedirs|metadata is None"):
        dcp.load(state_of(run), storage_reader=Reader(folder))
    assert not mark.exists()


@on_ranks(2)
def test_in_a_value(tmp_path: Path) -> None:
    run, mark = Run(), tmp_path / "mark"
    folder = tmp_path / "plain"
    state = state_of(run)
    values = {"optimizer": {"param_groups": state["optimizer"]["param_groups"]}}
    values["optimizer"]["param_groups"]["0"]["lr"] = Attack(mark)
    dcp.save(state, storage_writer=Writer(folder))
    is_refused(run, folder, mark, CheckpointError, r"'optimizer\.param_groups\.0\.lr' is refused")
    with pytest.raises(dcp.CheckpointException, match="could run code"):
        dcp.load(values, storage_reader=Reader(folder))
    assert not mark.exists()


@on_ranks(2)
def test_in_what_is_neither_model_nor_optimizer(tmp_path: Path) -> None:
    run, mark = Run(), tmp_path / "mark"
    folder = tmp_path / "plain"
    writer = Writer(folder, extra={"step": Attack(mark)}, weights_only=False)
    dcp.save(state_of(run), storage_writer=writer)
    is_refused(
        run, folder, mark, CheckpointError, r"extra-[0-9a-f]{12}\.pt is refused.*: it asks for os\.makedirs"
    )
    with pytest.raises(TypeError, match=r"extra\['step'\] \(Attack\) is more than tensors"):
        checkpoint.save(tmp_path / "other", run.model, extra={"step": Attack(mark)})


@on_ranks(1, 2)
def test_fabric_executes_what_it_is_told_to_alone(rank: int, world_size: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("flatfsdp.compat.lightning", reason="needs Lightning Fabric")
    os.environ["LOCAL_RANK"] = str(rank)
    strategy = lightning.FlatFSDPStrategy()
    fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    run, mark = Run(), tmp_path / "mark"
    writer = Writer(tmp_path / "fabric", extra={"attack": Attack(mark)}, weights_only=False)
    dcp.save(state_of(run), storage_writer=writer)
    state = {"model": run.model}
    with pytest.raises(CheckpointError, match=r"is refused.*asks for \w+\.\w+; .*weights_only=False"):
        strategy.load_checkpoint(tmp_path / "fabric", state)
    dist.barrier()
    assert not mark.exists()
    if world_size == 1:
        strategy.load_checkpoint(tmp_path / "fabric", state, weights_only=False)
        assert mark.exists()


@on_ranks(2)
def test_files_outside_of_the_folder(rank: int, tmp_path: Path) -> None:
    run = Run()
    dcp.save(state_of(run), checkpoint_id=tmp_path)
    for name in ("../other/__0_0.distcp", "/etc/passwd", "a/../../b"):
        if rank == 0:
            metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
            for about in metadata.storage_data.values():
                about.relative_path = name
            (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        dist.barrier()
        is_refused(
            run, tmp_path, tmp_path / "mark", DamagedCheckpoint, "names a file outside of the checkpoint"
        )


@pytest.mark.parametrize("value", [os.system, eval, getattr, torch.load, pickle.loads, io.open, Path.unlink])
def test_callables_are_refused(value: Any) -> None:
    """`getattr` in metadata reads members of enumerations and nothing else, even as an argument."""
    with pytest.raises(pickle.UnpicklingError, match=r"asks for|is not the metadata|holds"):
        unpickled_metadata(pickle.dumps(value))
    with pytest.raises(pickle.UnpicklingError):
        unpickled_metadata(pickle.dumps(Metadata({}, planner_data=_Got(value), storage_data={})))


class _Got:
    """An object that is pickled as an attribute of something."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self.value, "__call__")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_of_any_dtype_and_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    floats = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]
    names = [*floats, "int64", "int32", "int16", "int8", "uint8", "bool"]
    tensors = {name: torch.zeros(2, dtype=getattr(torch, name)) for name in names}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"a": tensors, "b": [1, "x"]}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    found = unpickled_metadata(pickle.dumps(metadata, protocol))
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data


def built(target: str, state: Any) -> bytes:
    """A pickle that sets attributes of a global, such as "pathlib\\nPurePosixPath"."""
    return b"c" + target.encode() + b"\n" + pickle.dumps(state, protocol=2)[2:-1] + b"b."


@pytest.mark.parametrize(
    ("target", "state"),
    [
        ("pathlib\nPurePosixPath", (None, {"mark": 1})),
        ("torch.serialization\n_get_layout", {"mark": 1}),
        ("torch.distributed.checkpoint.metadata\nMetadata", (None, {"mark": 1})),
        ("torch.distributed.checkpoint.metadata\nMetadata", {"mark": 1}),
    ],
)
def test_attributes_of_classes_and_functions_are_not_set(target: str, state: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="it sets attributes of"):
        unpickled_metadata(built(target, state))
    module, name = target.split("\n")
    assert not hasattr(getattr(importlib.import_module(module), name), "mark")
