"""Flat shards saved by fairscale become a full state dict, without fairscale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.compat.fairscale import FSDP

State = dict[str, Tensor]


def as_fairscale_saves(
    units: dict[str, State], ranks: int, shared: list[tuple[str, str]], buffers: State
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each rank's `local_state_dict()` and `local_metadata_dict()`; the root has the tied parameters."""
    weights: list[dict[str, Any]] = [dict(buffers) for _ in range(ranks)]
    metadata: list[dict[str, Any]] = [
        {"param_metadata": [], "buffer_names": list(buffers)} for _ in range(ranks)
    ]
    for path, parameters in units.items():
        flat = torch.cat([p.reshape(-1) for p in parameters.values()])
        chunks = list(flat.chunk(ranks))
        chunks += [flat.new_empty(0)] * (ranks - len(chunks))
        for rank, chunk in enumerate(chunks):
            padding = chunks[0].numel() - chunk.numel()
            weights[rank][f"{path}.flat_param_0".lstrip(".")] = torch.nn.functional.pad(chunk, [0, padding])
            metadata[rank]["param_metadata"].append(
                {
                    "fsdp_path": path,
                    "no_broadcast_optim_state": False,
                    "shared_param_info": [] if path else shared,
                    "params": {
                        "flat_param_0": {
                            "names": list(parameters),
                            "shapes": [p.shape for p in parameters.values()],
                            "numels": [p.numel() for p in parameters.values()],
                            "padding": padding,
                        }
                    },
                }
            )
    return weights, metadata


ROOT = {"embedding.weight": torch.randn(7, 3), "bias": torch.randn(())}
BLOCK = {"up.weight": torch.randn(5, 3), "up.bias": torch.randn(5)}
BUFFERS = {"steps": torch.tensor(3)}
FULL = {**ROOT, "blocks.0.up.weight": BLOCK["up.weight"], "blocks.0.up.bias": BLOCK["up.bias"]}


def saved(ranks: int = 3) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # head.table is embedding.weight; fairscale writes the two attributes' names swapped.
    shared = [("embedding.table", "head.weight")]
    return as_fairscale_saves({"": ROOT, "blocks.0": BLOCK}, ranks, shared, BUFFERS)


@pytest.mark.parametrize("ranks", [1, 3, 24])
def test_parameters_buffers_and_tied_names_come_back(ranks: int) -> None:
    joined = FSDP.consolidate_shard_weights(*saved(ranks))
    expected = {**FULL, "head.table": ROOT["embedding.weight"], **BUFFERS}
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], value) for name, value in expected.items())


def test_buffers_can_be_left_out() -> None:
    joined = FSDP.consolidate_shard_weights(*saved(), with_module_buffers=False)
    assert joined.keys() == {*FULL, "head.table"}


def test_what_is_missing_may_be_left_out_if_asked() -> None:
    weights, metadata = saved()
    for of_rank in weights:
        del of_rank["blocks.0.flat_param_0"], of_rank["steps"]
    with pytest.raises(KeyError, match="flat_param_0"):
        FSDP.consolidate_shard_weights(weights, metadata)
    assert FSDP.consolidate_shard_weights(weights, metadata, strict=False).keys() == {*ROOT, "head.table"}


def test_a_missing_rank_is_noticed() -> None:
    weights, metadata = saved()
    with pytest.raises(ValueError, match="of all ranks"):
        FSDP.consolidate_shard_weights(weights[:-1], metadata[:-1])


def test_ours_may_be_incomplete_too() -> None:
    model = FSDP(torch.nn.Sequential(FSDP(torch.nn.Linear(3, 2)), torch.nn.BatchNorm1d(2)))
    weights, metadata = model.local_state_dict(), model.local_metadata_dict()
    full = FSDP.consolidate_shard_weights([weights], [metadata])
    assert full.keys() == model.state_dict().keys()
    without = FSDP.consolidate_shard_weights([weights], [metadata], with_module_buffers=False)
    assert without.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    del weights["0.flat_param"]
    rest = FSDP.consolidate_shard_weights([weights], [metadata], strict=False)
    assert rest.keys() == {name for name in full if name.startswith("1.")}
