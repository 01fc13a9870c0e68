"""`save_hf`: writes a sharded model, unit by unit, as a folder that plain `from_pretrained` reads.

In:   a sharded model.
Out:  safetensors files of bounded size, their index, and the configurations.
Next: `folder.py` writes them, and moves them into place at the end.

torch.distributed.checkpoint's `HuggingFaceStorageWriter` does not fit: it writes one box of a tensor a rank,
where our shards have several, holds each rank's part twice, has the first rank read all of it again to join
it, and writes over the earlier model's files.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatfsdp.comm.paths import path_of_all_ranks
from flatfsdp.compat.transformers.files.conversions import Values, reverted
from flatfsdp.compat.transformers.files.folder import NewFiles
from flatfsdp.compat.transformers.files.names import FileNames
from flatfsdp.compat.transformers.files.together import begin_together, raising_together
from flatfsdp.contract.mixed import innermost
from flatfsdp.engine.storage.group import FlatGroup
from flatfsdp.flat.layout import ParamSlot


def save_hf(
    model: nn.Module,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    max_shard_size: int | str = "50GB",
) -> None:
    """Writes the files of `save_pretrained` from shards.  Collective over the model's ranks.

        save_hf(model, "out", dtype=torch.bfloat16)
        tokenizer.save_pretrained("out")

    The first rank gathers and writes one unit after the other, so that no rank has more than one in memory.
    The folder's earlier model stays readable until the new one is completely written.  Killed while several
    new files are moved into place, it leaves a folder that `load_hf` refuses; one file is replaced at once.

    Args:
        model: a model of transformers; sharded in place, or wrapped.
        path: the folder, the same on all ranks.
        dtype: dtype of floating-point values; None: the master shards', FP32 by default.
        max_shard_size: largest size of one file, in bytes or as a string such as "5GB".

    Raises:
        OSError: if something cannot be written.
        ValueError: if the model is not sharded, or is a PEFT model, whose adapters `save_pretrained` saves;
            for an unsupported dtype; if transformers joins tensors of several units into one; if the path is
            a URL, or ranks pass different ones.
        TypeError: if `model` is no model of transformers.
        RuntimeError: if a rank does not call it; inside `summon_full_params`.
        Each error is raised on every rank, and the folder's earlier model stays.
    """
    state, groups = begin_together(model, "save_hf")
    folder = path_of_all_ranks(path, state.grid.dimensions, state.shared.device)
    with raising_together(state):
        if dtype not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"save_hf: dtype is {dtype}; models are saved in 16 bits or more, such as torch.bfloat16"
            )
        if hasattr(model, "peft_config"):
            raise ValueError(
                "save_hf of a PEFT model would be without its adapters; model.save_pretrained(folder) saves "
                "these; for one whole model, call merge_and_unload() of what plain PEFT loads"
            )
        contents = _Contents(model, dtype)
        layout = contents.layout()
    files: NewFiles | None = None
    try:
        with raising_together(state):
            if state.grid.is_first:
                files = _new_files(folder, layout, max_shard_size)
        for group in groups:
            full = group.master.gather(rank0_only=True)
            with raising_together(state):
                if files is not None and full is not None:
                    files.write(contents.of_group(group, full))
            del full
        with raising_together(state):
            if files is not None:
                files.write(contents.buffers)
                _save_configurations(contents.base, files.place, contents.dtype)
                files.commit()
    except BaseException:
        if files is not None:
            files.discard()
        raise


class _Contents:
    """The contents to write, by name and in the form that they have in files.

    Attributes:
        base: the model of transformers.
        buffers: the buffers to write.
        dtype: dtype of floating-point parameters.

    Raises:
        TypeError: if the model is not one of transformers.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        names = FileNames(model)
        self.base = names.base
        ignored, tied = self.base._keys_to_ignore_on_save or (), self.base.all_tied_weights_keys
        self.buffers = {name: value for name, value in names.buffers.items() if name not in ignored}
        self._slots: dict[FlatGroup, dict[str, ParamSlot]] = {}
        for group, slot, own in names.parameters:
            # Under the names that transformers does not tie to another.
            written = [name for name in own if name not in tied] or own[:1]
            of_group = self._slots.setdefault(group, {})
            of_group.update({name: slot for name in written if name not in ignored})
        dtypes = {group.master.flat.dtype for group in self._slots}
        self.dtype = max(dtypes, key=lambda each: each.itemsize) if dtype is None else dtype

    def layout(self) -> Values:
        """All tensors, on the meta device.

        Raises:
            ValueError: if transformers joins tensors of several units into one.
        """
        plain: Values = {}
        found: Values = {}
        for slots in self._slots.values():
            own = {name: torch.empty(slot.whole_shape, device="meta") for name, slot in slots.items()}
            plain |= own
            found |= reverted(self.base, own)
        shapes = {name: value.shape for name, value in found.items()}
        wanted = {name: value.shape for name, value in reverted(self.base, plain).items()}
        if shapes != wanted:
            differing = sorted(shapes.items() ^ wanted.items())[0][0]
            raise ValueError(
                f"save_hf: {differing} is made of parameters of several units; let the wrap policy pick the "
                "module around them"
            )
        sizes = {name: torch.empty(shape, dtype=self.dtype, device="meta") for name, shape in shapes.items()}
        return sizes | {name: value.to("meta") for name, value in self.buffers.items()}

    def of_group(self, group: FlatGroup, full: Tensor) -> Values:
        """The tensors of one unit.

        Args:
            group: the unit's group.
            full: its whole padded buffer.
        """
        views = dict(zip(group.layout.slots, group.layout.views(full), strict=True))
        return reverted(self.base, {name: views[slot] for name, slot in self._slots.get(group, {}).items()})


def _new_files(folder: Path, layout: Values, max_shard_size: int | str) -> NewFiles:
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(
        layout, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    files = {
        file: {name: layout[name] for name in names} for file, names in split.filename_to_tensors.items()
    }
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    return NewFiles(folder, files, index if split.is_sharded else None)


def _save_configurations(base: Any, folder: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(base.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [innermost(type(base)).__name__]
    config.save_pretrained(folder)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)
