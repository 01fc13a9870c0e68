"""Extra state of modules survives `save` and `load`; nothing of it is executed."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from flatfsdp import checkpoint, microbatches, shard
from flatfsdp.checkpoint import CheckpointError
from flatfsdp.checkpoint.extra_state import transformer_engine as adapter
from flatfsdp.checkpoint.extra_state.packed import JSON, pack, unpack
from flatfsdp.engine.api.wrap import by_class
from tests.support.extra_state import Counting, DelayedScaling, Format, ScaledLinear, transformer_engine
from tests.support.models import plain_net, update
from tests.support.ranks import on_ranks

SIZE = 16


class Net(nn.Module):
    def __init__(self, note: Any = None, recipe: DelayedScaling | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledLinear(SIZE, recipe) for _ in range(3))
        self.counting = Counting(note)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        out: Tensor = self.counting(x)
        return out


class Run:
    """A model in training, sharded in place."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.net = Net(**options)
        self.model: Any = shard(self.net, by_class(ScaledLinear))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def train(self, rank: int, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + rank)
            for x in microbatches(self.model, list(torch.randn(2, 4, SIZE, generator=generator))):
                loss = self.model(x).square().mean()
                loss.backward()
                losses.append(loss.item())
            update(self.optimizer)
        return losses

    def bits(self) -> list[Tensor]:
        # A rank without an element of a parameter needs no state for it.
        of_each = [self.optimizer.state.get(p, {}) for p in self.model.parameters() if p.numel()]
        states = [state[key] for state in of_each for key in sorted(state)]
        layers: Any = self.net.layers
        scales = [each for layer in layers for each in (layer.scale, layer.history)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *states, *scales)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@on_ranks(2)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(rank: int, tmp_path: Path) -> None:
    note = {"name": "a", "values": [1, 2.5, None, True], "pair": (1, "x"), "weights": torch.randn(3)}
    with transformer_engine():
        whole, first, second = Run(note=note), Run(note=note), Run(seed=9)
        losses = whole.train(rank, 0, 5)
        begun = first.train(rank, 0, 2)
        checkpoint.save(tmp_path / "saved", first.model, first.optimizer, extra={"step": 2})
        assert checkpoint.load(tmp_path / "saved", second.model, second.optimizer) == {"step": 2}
        assert same(second.bits(), first.bits())
        assert second.net.layers[0].fp8_meta == first.net.layers[0].fp8_meta
        assert begun + second.train(rank, 2, 5) == losses
        assert same(second.bits(), whole.bits())
    counting = second.net.counting
    assert counting.forwards == 10
    assert torch.equal(counting.note.pop("weights"), note.pop("weights"))
    assert counting.note == note and type(counting.note["pair"]) is tuple


@on_ranks(2)
def test_files_hold_tensors_and_json(rank: int, tmp_path: Path) -> None:
    with transformer_engine():
        run = Run()
        run.train(rank, 0, 1)
        checkpoint.save(tmp_path / "saved", run.model)
        files = [path.read_bytes() for path in (tmp_path / "saved").iterdir() if path.suffix == ".distcp"]
        # A pickle of a recipe would name its module.
        assert files and not any(b"transformer_engine" in data for data in files)
        state = {"modules": {"layers.0": {JSON: torch.zeros(0, dtype=torch.uint8)}}}
        metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
        about = metadata.state_dict_metadata[f"modules.layers.0.{JSON}"]
        state["modules"]["layers.0"][JSON] = torch.zeros(about.size, dtype=torch.uint8)
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        text = json.loads(state["modules"]["layers.0"][JSON].numpy().tobytes())
        assert text["dict"]["recipe"]["record"][0] == "DelayedScaling"


@on_ranks(2)
def test_modules_that_never_ran_and_checkpoints_without_state(rank: int, tmp_path: Path) -> None:
    with transformer_engine():
        fresh, ran = Run(), Run(seed=1)
        checkpoint.save(tmp_path / "fresh", fresh.model)
        ran.train(rank, 0, 1)
        scale = ran.net.layers[0].scale
        checkpoint.load(tmp_path / "fresh", ran.model)
        # Transformer Engine itself leaves what it has, if the state is empty.
        assert torch.equal(ran.net.layers[0].scale, scale) and ran.net.counting.forwards == 0


@on_ranks(2)
def test_ranks_whose_states_differ_are_named(rank: int, tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flatfsdp.checkpoint.extra_state.modules")
    logger.addHandler(handler)
    try:
        run = Run(note=rank)
        checkpoint.save(tmp_path / "saved", run.model)
    finally:
        logger.removeHandler(handler)
    assert [text.startswith("counting: the extra state of rank 0 is saved") for text in said] == [True] * (
        1 - rank
    )
    other = Run(seed=3, note="other")
    checkpoint.load(tmp_path / "saved", other.model)
    assert other.net.counting.note == 0


@on_ranks(2)
def test_what_no_checkpoint_can_hold_raises_on_all_ranks(rank: int, tmp_path: Path) -> None:
    # On one rank alone: the other hears of it.
    run = Run(note=Path("x") if rank == 1 else None)
    with pytest.raises(TypeError, match=r"module 'counting' \(Counting\) has a pathlib"):
        checkpoint.save(tmp_path / "saved", run.model)
    with transformer_engine():
        run = Run(recipe=DelayedScaling(amax_compute_algo=torch.amax))
        run.train(rank, 0, 1)
        with pytest.raises(TypeError, match=r"module 'layers.0' \(ScaledLinear\) has a builtins"):
            checkpoint.save(tmp_path / "saved", run.model)
    assert not any(tmp_path.rglob("*.distcp"))


@on_ranks(2)
def test_state_of_modules_that_are_not_there(rank: int, tmp_path: Path) -> None:
    run = Run()
    checkpoint.save(tmp_path / "saved", run.model)
    net = plain_net(Net)
    net.counting = nn.Identity()  # type: ignore[assignment]
    model = shard(net, by_class(ScaledLinear))
    with pytest.raises(ValueError, match="extra state of the module 'counting', and the model has no such"):
        checkpoint.load(tmp_path / "saved", model)
    checkpoint.load(tmp_path / "saved", model, accept=("surplus",))


class Attack:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


@on_ranks(2)
def test_nothing_in_a_file_is_executed(rank: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attack = torch.frombuffer(bytearray(pickle.dumps(Attack(mark))), dtype=torch.uint8)
    crafted = {
        "a pickle in the place of JSON": {JSON: attack},
        "a class that is no recipe": pack_text('{"record": ["Callable", {}]}'),
        "a class of another module": pack_text('{"record": ["os.system", {"command": "true"}]}'),
        "no kind of value": pack_text('{"call": ["print"]}'),
        "a tensor that is missing": pack_text('{"tensor": "7"}'),
    }
    with transformer_engine():
        run = Run()
        before = run.bits()
        for number, tensors in enumerate(crafted.values()):
            state = {**checkpoint.sharded_training_state(run.model), "modules": {"layers.1": tensors}}
            dcp.save(state, checkpoint_id=tmp_path / str(number))
            with pytest.raises(
                (ValueError, CheckpointError), match=r"extra state of the module 'layers.1' has"
            ):
                checkpoint.load(tmp_path / str(number), run.model)
            assert same(run.bits(), before)
    dist.barrier()
    assert not mark.exists()


def pack_text(text: str) -> dict[str, Tensor]:
    return {JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


def test_values_come_back_as_they_were() -> None:
    value = {"a": [1, (2.5, None), "x", True], "b": {"c": float("inf")}, "d": torch.arange(3), "e": []}
    back = unpack(pack(value))
    assert torch.equal(back.pop("d"), value.pop("d")) and back == value
    with transformer_engine():
        recipe = DelayedScaling(margin=1, fp8_format=Format.E4M3)
        found = unpack(pack({"recipe": recipe}, adapter.take_apart), adapter.make)
        assert found["recipe"] == recipe and found["recipe"].fp8_format is Format.E4M3
    tensor = torch.ones(2)
    packed = pack(tensor)
    tensor.zero_()
    assert unpack(packed).tolist() == [1, 1]
