"""Joins the flat shards of all ranks into one full state dict, offline; reads fairscale's files, too.

In:   a dict of tensors and a dict of metadata from every rank, in rank order.
Out:  whole tensors under the names of the plain module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flatfsdp.checkpoint import consolidate


def consolidate_shard_weights(
    shard_weights: Sequence[dict[str, Tensor]],
    shard_metadata: Sequence[dict[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Joins every rank's `local_state_dict()`, described by its `local_metadata_dict()`.

    Also reads what fairscale's methods of these names have saved.  Needs no process group.  For units that
    each rank has to itself (an expert in a group of one), the result has the first rank's values.

    Args:
        shard_weights: the state dicts, in rank order.
        shard_metadata: the metadata, in rank order.
        with_module_buffers: also return the first rank's buffers.
        strict: False skips flat parameters that the first rank's weights lack.

    Raises:
        ValueError: unless there is one pair per rank; if a shard is missing or has the wrong length; if
            groups of several ranks have different parameters.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ValueError(
            f"{len(shard_weights)} shards and {len(shard_metadata)} metadata; pass one pair a rank"
        )
    if "param_metadata" in shard_metadata[0]:
        full = dict(_parameters_of_fairscale(shard_weights, shard_metadata, strict))
        names = shard_metadata[0]["buffer_names"]
        buffers = {name: shard_weights[0][name] for name in names if strict or name in shard_weights[0]}
    else:
        metadata = _present(shard_weights[0], shard_metadata, strict)
        joined = consolidate(_with_the_firsts(shard_weights, metadata[0]), metadata)
        buffers = {name: joined[name] for name in joined if name in shard_weights[0]}
        full = {name: value for name, value in joined.items() if name not in buffers}
    return {**full, **buffers} if with_module_buffers else full


def _present(
    weights: dict[str, Tensor], metadata: Sequence[dict[str, Any]], strict: bool
) -> Sequence[dict[str, Any]]:
    if strict:
        return metadata
    return [
        {**of_rank, "shards": {k: v for k, v in of_rank["shards"].items() if k in weights}}
        for of_rank in metadata
    ]


def _with_the_firsts(
    weights: Sequence[dict[str, Tensor]], metadata: dict[str, Any]
) -> Sequence[dict[str, Tensor]]:
    """All ranks' weights, with the first rank's for units that each rank has to itself."""
    firsts = {
        key: weights[0][key]
        for key, about in metadata["shards"].items()
        # The mark is absent in older files, and in those of `flatfsdp.checkpoint`.
        if about.get("no_broadcast_optim_state") and about["num_shards"] == 1 and key in weights[0]
    }
    return [{**of_rank, **firsts} for of_rank in weights]


def _parameters_of_fairscale(
    weights: Sequence[dict[str, Tensor]], metadata: Sequence[dict[str, Any]], strict: bool
) -> Iterator[tuple[str, Tensor]]:
    """Parameters from fairscale's shards, which hold them back to back with padding only at a shard's end."""
    for index, unit in enumerate(metadata[0]["param_metadata"]):
        found: dict[str, Tensor] = {}
        for flat_name, about in unit["params"].items():
            key = _join(unit["fsdp_path"], flat_name)
            if key not in weights[0] and not strict:
                continue
            shards = []
            for rank in range(1 if unit["no_broadcast_optim_state"] else len(weights)):
                padding = metadata[rank]["param_metadata"][index]["params"][flat_name]["padding"]
                shard = weights[rank][key]
                shards.append(shard[: shard.numel() - padding])
            flat = torch.cat(shards)
            if flat.numel() != sum(about["numels"]):
                raise ValueError(
                    f"{key} has {flat.numel()} elements over all ranks, but its parameters "
                    f"{sum(about['numels'])}; pass the files of all ranks"
                )
            views = zip(about["names"], flat.split(about["numels"]), about["shapes"], strict=True)
            found.update((_join(unit["fsdp_path"], name), view.view(shape)) for name, view, shape in views)
        yield from found.items()
        for source, tied in unit["shared_param_info"]:
            # fairscale has swapped the attributes' names.
            (source_module, tied_name), (tied_module, source_name) = _split(source), _split(tied)
            original = _join(unit["fsdp_path"], _join(source_module, source_name))
            if original in found:
                yield _join(unit["fsdp_path"], _join(tied_module, tied_name)), found[original]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(".")
    return module, attribute
