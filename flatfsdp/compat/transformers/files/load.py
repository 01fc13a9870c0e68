"""`load_hf`: every rank reads its own part of each tensor from a folder of safetensors.

In:   a folder, as written by `save_pretrained` or `huggingface_hub.snapshot_download`, and a sharded model.
Out:  the model's shards and buffers have its values.

Tensors that transformers converts (`conversions.py`) are computed whole, one at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatfsdp.comm.paths import path_of_all_ranks
from flatfsdp.compat.transformers.files.conversions import arranged
from flatfsdp.compat.transformers.files.folder import Stored, stored_in
from flatfsdp.compat.transformers.files.names import FileNames, FileParameter
from flatfsdp.compat.transformers.files.together import begin_together, raising_together

_SHOWN = 5
"""Largest number of names in one message."""


def load_hf(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads a Hugging Face folder into a sharded model, part by part.  Collective over its ranks.

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model = shard(model, policy_of(model), device="cuda", param_init_fn=init_weights_of(model))
        load_hf(model, snapshot_download(name))

    Each rank reads its parts of the tensors, so that no rank ever has the whole model in memory.  Values are
    converted to the model's dtypes.  For a PEFT model only the base is loaded; adapters keep their values.

    Args:
        model: a model of transformers, or a PEFT model around one; sharded in place, or wrapped.
        path: a folder with `model.safetensors`, or several files and their index; readable by all ranks,
            which pass the same.

    Raises:
        FileNotFoundError: if there is no such folder or file.
        ValueError: if tensors are missing, have another shape, or have no place in the model; if files are
            damaged, quantized, outside of the folder, or from a save that did not complete; if the model is
            not sharded; if the path is a URL, or ranks pass different ones.
        TypeError: if `model` is neither a model of transformers nor a PEFT model around one.
        RuntimeError: if a rank does not call it; inside `summon_full_params`.
        Each error is raised on every rank, and nothing has changed then, except if a file becomes unreadable
        after it was checked: the model may be partly loaded.
    """
    state, groups = begin_together(model, "load_hf")
    folder = path_of_all_ranks(path, state.grid.dimensions, state.shared.device)
    with raising_together(state):
        plan = _Plan(FileNames(model), folder)
    with raising_together(state), torch.no_grad():
        plan.carry_out()
    for group in groups:
        group.master.loaded()


class _Plan:
    """What is read, and where it goes.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the folder does not fit the model.
    """

    def __init__(self, names: FileNames, folder: Path) -> None:
        self._names = names
        self._targets = {name: parameter for parameter in names.parameters for name in parameter.names}
        own = {name: tuple(parameter.slot.whole_shape) for name, parameter in self._targets.items()}
        own |= {name: tuple(buffer.shape) for name, buffer in names.buffers.items()}
        stored, self._converted, self._rules = arranged(names.base, stored_in(folder), own)
        found = {name: each.shape for name, each in stored.items()}
        for converted in self._converted:
            found |= converted.shapes
        self._buffers = {name: stored[name] for name in names.buffers if name in stored}
        self._copies: list[tuple[Stored, FileParameter]] = []
        missing = [*(names.buffers.keys() - stored.keys())]
        for parameter in names.parameters:
            here = [name for name in parameter.names if name in stored]
            if here:
                self._copies.append((stored[here[0]], parameter))
            elif found.keys().isdisjoint(parameter.names):
                missing.append(parameter.names[0])
            for name in here[1:]:
                if not stored[here[0]].equals(stored[name]):
                    raise ValueError(
                        f"{here[0]} and {name} are one parameter in the model, and have different values in "
                        "the folder; build the model with tie_word_embeddings=False"
                    )
        shapes = [
            f"{name} ({shape}, here {own[name]})"
            for name, shape in found.items()
            if name in own and shape != own[name]
        ]
        old = [*(names.base._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS]
        told = {
            "missing": _but(missing, names.base._keys_to_ignore_on_load_missing),
            "unexpected": _but(found.keys() - own.keys(), old),
            "of another shape": shapes,
        }
        parts = [f"{what}: {_listed(each)}" for what, each in told.items() if each]
        if parts:
            raise ValueError(f"{folder} is not of this model; {'; '.join(parts)}")

    def carry_out(self) -> None:
        """Reads all tensors into the model."""
        for stored, (group, slot, _) in self._copies:
            shard = group.grid.shard
            piece = group.layout.piece(slot, shard.rank, shard.size)
            if piece is not None:
                begin, count = piece.shard_offset, piece.stop - piece.start
                stored.read_into(group.master.flat.detach()[begin : begin + count], piece.start)
        for each in self._converted:
            for name, value in each.values().items():
                group, slot, _ = self._targets[name]
                group.master.load(slot, value)
        for name, stored in self._buffers.items():
            self._names.buffers[name].copy_(stored.read())
        # transformers reads this when the model is saved.
        self._names.base._weight_conversions = self._rules


_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files contain and transformers now computes."""


def _but(names: Iterable[str], patterns: Any) -> list[str]:
    """Names that match none of these regular expressions."""
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns or ()))


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
