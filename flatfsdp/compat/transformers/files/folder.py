"""A folder of safetensors files: finding tensors, reading parts of them, writing files in any order.

    model.safetensors                   one file
    model-00001-of-00002.safetensors    one of several
    model.safetensors.index.json        which tensor is in which of these

Format: https://huggingface.co/docs/safetensors; 8 bytes with the length of a JSON header, the header with
dtype, shape and place of each tensor, then their bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfsdp.checkpoint.boxes import boxes
from flatfsdp.checkpoint.durable import make_folder, sync_folder
from flatfsdp.comm.paths import is_inside

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNFINISHED = ".unfinished-save"
"""Folder in which a save writes its files before it moves them into place."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


class Stored(NamedTuple):
    """A tensor in an open file.

    Attributes:
        file: a `safetensors.safe_open`.
        key: name of the tensor in the file.
    """

    file: Any
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The whole tensor, in CPU memory."""
        whole: Tensor = self.file.get_tensor(self.key)
        return whole

    def without_values(self) -> Tensor:
        """A tensor like it on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def equals(self, other: Stored) -> bool:
        """Compares row by row, so that nothing is whole in memory."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        ours, theirs = self.file.get_slice(self.key), other.file.get_slice(other.key)
        rows = range(0, self.shape[0], 256)
        return all(torch.equal(ours[row : row + 256], theirs[row : row + 256]) for row in rows)

    def read_into(self, target: Tensor, start: int) -> None:
        """Copies elements [start, start + target.numel()) to a 1-D tensor of any floating-point dtype."""
        if not self.shape:
            target.copy_(self.read().reshape(1))
            return
        view = self.file.get_slice(self.key)
        for box in boxes(self.shape, start, start + target.numel()):
            limits = zip(box.offsets, box.sizes, strict=True)
            part = view[tuple(slice(low, low + size) for low, size in limits)]
            target[box.start - start : box.start - start + box.numel].copy_(part.reshape(-1))


def stored_in(folder: Path) -> dict[str, Stored]:
    """The model's tensors in a folder, by their names there; unrelated files are ignored.

    Raises:
        FileNotFoundError: if the folder, its weights, or a file named in the index is missing.
        ValueError: if the last save did not complete, a file is damaged or lacks a tensor of the index, the
            index names a file outside of the folder, or a dtype is not supported.
    """
    if (folder / INDEX).exists():
        of_files: dict[str, set[str]] = {}
        for key, name in json.loads((folder / INDEX).read_text())["weight_map"].items():
            if not is_inside(name):
                raise ValueError(f"{folder / INDEX} names a file outside of the folder: {name!r}")
            of_files.setdefault(name, set()).add(key)
    elif (folder / ONE_FILE).exists():
        of_files = {ONE_FILE: set()}
    elif (folder / UNFINISHED).exists():
        raise ValueError(f"{folder} holds a save that did not end; save to it again")
    elif not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {folder}; download a model first: huggingface_hub.snapshot_download(name)"
        )
    else:
        raise FileNotFoundError(f"{folder} has neither {ONE_FILE} nor {INDEX}")
    found: dict[str, Stored] = {}
    for name, keys in of_files.items():
        in_file = _tensors_of(folder / name)
        if lacking := sorted(keys - in_file.keys()):
            raise ValueError(f"{folder / name} has no {lacking[0]}, which {INDEX} says is there")
        found |= {key: stored for key, stored in in_file.items() if key in keys or not keys}
    return found


def _tensors_of(path: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    found = {}
    for key in file.keys():  # noqa: SIM118 - no dict
        view = file.get_slice(key)
        dtype = _TORCH_DTYPES.get(view.get_dtype())
        if dtype is None:
            raise ValueError(
                f"{key} in {path} is {view.get_dtype()}: quantized weights are not loaded; convert the files "
                "to 16 bits first"
            )
        found[key] = Stored(file, key, tuple(view.get_shape()), dtype)
    return found


class NewFiles:
    """Files that are written tensor by tensor, in any order, in a temporary folder inside `folder`.

    Args:
        folder: the final folder.
        files: tensors of each file by name, in file order; only their shapes and dtypes are read.
        index: contents of the index, or None.

    Raises:
        OSError: if they cannot be created.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Mapping[str, Tensor]], index: Mapping[str, Any] | None
    ) -> None:
        self.folder = folder
        self.place = folder / UNFINISHED
        make_folder(folder)
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        self._index = index
        self._to_write: dict[str, tuple[Path, int, Tensor]] = {}
        for name, tensors in files.items():
            self._make(self.place / name, tensors)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes some of the tensors to their places, in their files' dtypes.

        Raises:
            OSError: if one cannot be written.
            KeyError: if one has already been written, or is in no file.
        """
        for name, value in values.items():
            path, offset, about = self._to_write.pop(name)
            assert value.shape == about.shape, name
            data = value.detach().to("cpu", about.dtype).contiguous().reshape(-1).view(torch.uint8)
            with open(path, "r+b") as file:
                file.seek(offset)
                data.numpy().tofile(file)

    def commit(self) -> None:
        """Moves all files into place, replacing an earlier save's; unrelated files stay.

        The earlier save stays readable until this begins; with one file, until that is moved, and then the
        new one is.  An interruption while several are moved leaves a folder that is recognisably incomplete.

        Raises:
            OSError: if something cannot be moved.
        """
        assert not self._to_write, f"{list(self._to_write)} were not written"
        if self._index is not None:
            (self.place / INDEX).write_text(json.dumps(self._index, indent=2, sort_keys=True) + "\n")
        for path in self.place.iterdir():
            with open(path, "rb") as written:
                os.fsync(written.fileno())
        is_one = self._index is None
        earlier = [self.folder / INDEX, *self.folder.glob("model-*-of-*.safetensors")]
        # Several files cannot be replaced at once; what readers look for goes first then.
        for path in () if is_one else (self.folder / ONE_FILE, *earlier):
            path.unlink(missing_ok=True)
        last = ONE_FILE if is_one else INDEX
        for path in sorted(self.place.iterdir(), key=lambda path: path.name == last):
            os.replace(path, self.folder / path.name)
        for path in earlier if is_one else ():
            path.unlink(missing_ok=True)
        sync_folder(self.folder)
        self.place.rmdir()

    def discard(self) -> None:
        """Removes what was written; the earlier save stays."""
        with suppress(OSError):
            shutil.rmtree(self.place)

    def _make(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            offsets = [end, end + tensor.numel() * tensor.element_size()]
            _, end = offsets
            shape = list(tensor.shape)
            header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        begin = 8 + len(text)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(begin + end)
        for name, tensor in tensors.items():
            self._to_write[name] = (path, begin + header[name]["data_offsets"][0], tensor)
