"""Local state dicts: this rank's flat shards, without communication; `consolidate` joins them offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.contract.late_buffers import LATE_BUFFERS, PREPARE_LOAD
from flatfsdp.contract.placement import Partition
from flatfsdp.contract.transparent import prefixed_modules
from flatfsdp.engine.storage.group import FlatGroup, settle
from flatfsdp.engine.whole.units import keys_of_slots, named_groups
from flatfsdp.flat.layout import FlatLayout, ParamSpec


def local_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """This rank's flat shards, such as "blocks.0.flat_param", and all persistent buffers by their names.

    The tensors are the model's own, not copies.  Extra state of modules is not included.
    """
    settle(group for _, group in _shards(model))
    shards = {key: group.master.flat.detach() for key, group in _shards(model)}
    return {**shards, **dict(persistent_buffers(model))}


def load_local_state_dict(model: nn.Module, state_dict: dict[str, Tensor], strict: bool = True) -> None:
    """Loads a result of `local_state_dict` from the same rank of as many ranks, with the same lanes.

    Raises:
        RuntimeError: for missing or unexpected keys (if `strict`), or another length; nothing is changed.
    """
    absent = adopt_late_buffers(model, {key: value.shape for key, value in state_dict.items()})
    own = {key: value for key, value in local_state_dict(model).items() if key not in absent}
    problems = [
        f"size mismatch for {key}: {tuple(state_dict[key].shape)} in the checkpoint, {tuple(own[key].shape)} "
        "here; shards fit only as many ranks as wrote them, with equal lanes, so consolidate them for others"
        for key in own
        if key in state_dict and state_dict[key].shape != own[key].shape
    ]
    if strict:
        problems += [f"Missing key: {key}" for key in own if key not in state_dict]
        problems += [f"Unexpected key: {key}" for key in state_dict if key not in own]
    if problems:
        raise RuntimeError("the local state dict does not fit this rank:\n\t" + "\n\t".join(problems))
    for key, tensor in own.items():
        if key in state_dict:
            tensor.copy_(state_dict[key])
    for _, group in _shards(model):
        group.master.count_load()


def local_metadata(model: nn.Module) -> dict[str, Any]:
    """Metadata of this rank's `local_state_dict` for `consolidate`; plain JSON values."""
    keys = keys_of_slots(model)
    return {
        "shards": {
            key: {
                "rank": group.grid.shard.rank,
                "num_shards": group.grid.shard.size,
                "tensor_rank": group.grid.tensor.rank,
                "tensor_size": group.grid.tensor.size,
                "parameters": [
                    {
                        "names": keys[group, slot],
                        "shape": list(slot.shape),
                        "partition": slot.partition and [slot.partition.dim, list(slot.partition.sizes)],
                    }
                    for slot in group.layout.slots
                ],
            }
            for key, group in _shards(model)
        }
    }


def consolidate(
    state_dicts: Sequence[dict[str, Tensor]], metadata: Sequence[dict[str, Any]]
) -> dict[str, Tensor]:
    """Joins the local state dicts of all ranks into the full one.  Offline: needs no process group.

    Args:
        state_dicts: local state dict of every rank, in any order.
        metadata: `local_metadata` of each rank, in the same order.

    Returns:
        Whole tensors under the original names; tied parameters are one tensor.

    Raises:
        ValueError: naming a shard that is missing, has the wrong length, or differs between replicas.
    """
    if not state_dicts or len(state_dicts) != len(metadata):
        raise ValueError(
            f"{len(state_dicts)} local state dicts and {len(metadata)} metadata; pass one pair a rank"
        )
    keys = metadata[0]["shards"]
    full: dict[str, Tensor] = {}
    for key, about in keys.items():
        specs = [ParamSpec(entry["names"][0], tuple(entry["shape"])) for entry in about["parameters"]]
        layout = FlatLayout.pack(specs)
        views = [layout.views(flat) for flat in _whole_buffers(key, about, state_dicts, metadata)]
        for entry, *parts in zip(about["parameters"], *views, strict=True):
            partition = entry.get("partition")
            tensor = Partition(*partition).join(parts) if partition else parts[0].clone()
            full.update((name, tensor) for name in entry["names"])
    return {**full, **{key: value for key, value in state_dicts[0].items() if key not in keys}}


def _whole_buffers(
    key: str,
    about: dict[str, Any],
    state_dicts: Sequence[dict[str, Tensor]],
    metadata: Sequence[dict[str, Any]],
) -> list[Tensor]:
    """The whole padded buffer of one flat group, for each tensor-parallel rank.

    Any replica will do, as all hold equal shards.
    """
    shards: dict[tuple[int, int], Tensor] = {}
    lengths: set[int] = set()
    for state_dict, of_rank in zip(state_dicts, metadata, strict=True):
        if key not in state_dict or key not in of_rank["shards"]:
            raise ValueError(f"{key} is missing in one of the local state dicts; are they of one model?")
        shard, own = state_dict[key], of_rank["shards"][key]
        lengths.add(shard.numel())
        known = shards.setdefault((own.get("tensor_rank", 0), own["rank"]), shard)
        if len(lengths) == 1 and not torch.equal(known, shard):
            raise ValueError(
                f"{key}: ranks hold different values of shard {own['rank']}, so each group of ranks has "
                "parameters of its own (experts); consolidate the files of each group by themselves"
            )
    tensor_ranks, ranks = range(about.get("tensor_size", 1)), range(about["num_shards"])
    for tensor_rank, rank in product(tensor_ranks, ranks):
        if (tensor_rank, rank) not in shards:
            lost = f"shard {rank} of {len(ranks)} of tensor-parallel rank {tensor_rank}"
            raise ValueError(f"{key}: {lost} is missing; pass the files of all ranks")
    if len(lengths) > 1:
        raise ValueError(f"{key}: shards have different lengths {sorted(lengths)}; a file is corrupt")
    return [torch.cat([shards[tensor_rank, rank] for rank in ranks]) for tensor_rank in tensor_ranks]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every buffer of the state dict, under its original name."""
    for prefix, owner in prefixed_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield prefix + name, buffer


def adopt_late_buffers(model: nn.Module, saved: Mapping[str, torch.Size]) -> set[str]:
    """Prepares modules with buffers that appear on first use, such as FP8 scales, for a checkpoint.

    Args:
        model: the model to prepare.
        saved: shape of each tensor in the checkpoint, by original name.

    Returns:
        Names of such buffers that the checkpoint lacks; they keep their values.
    """
    absent: set[str] = set()
    device = next((group.master.device for _, group in named_groups(model)), torch.device("cpu"))
    for prefix, owner in prefixed_modules(model):
        names = LATE_BUFFERS.of(owner)
        shapes = {name: saved[prefix + name] for name in names if prefix + name in saved}
        absent.update(prefix + name for name in names if name in owner._buffers and name not in shapes)
        if names:
            PREPARE_LOAD.of(owner)(shapes, device)
    return absent


def _shards(model: nn.Module) -> Iterator[tuple[str, FlatGroup]]:
    for prefix, group in named_groups(model):
        yield f"{prefix}{group.flat_name}", group
