"""`Reader`: reads a checkpoint without executing anything: one from elsewhere may hold programs.

In:   `.metadata`, which is a pickle, and data files, which hold pickles of values other than tensors.
Out:  metadata, built from the few classes that torch.distributed.checkpoint writes; `weights_only` values.
Next: `opening.py` and `loading.py` read through these.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from collections import OrderedDict
from enum import Enum
from typing import IO, Any, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from flatfsdp.checkpoint.errors import CheckpointError, reason
from flatfsdp.checkpoint.manifest import METADATA
from flatfsdp.checkpoint.store import Places, StorePath
from flatfsdp.comm.paths import is_inside


class Reader(dcp.FileSystemReader):
    """Reads any checkpoint of torch.distributed.checkpoint, and executes nothing of what it reads.

        dcp.load(state, storage_reader=Reader("out/step-100"))

    Args:
        path: folder of the checkpoint, or its URL.
        metadata: contents of `.metadata`, if they have been read already.

    Raises:
        ValueError: if the path is a URL that fsspec does not know.
        ModuleNotFoundError: if the URL's library is not installed.
        pickle.UnpicklingError: by `dcp.load`, inside its CheckpointException, if `.metadata` asks for more
            than data, or names files outside the folder.
        CheckpointError: likewise, for a value that `torch.load(weights_only=True)` refuses.
    """

    def __init__(self, path: str | os.PathLike[str], *, metadata: Metadata | None = None) -> None:
        super().__init__(path)
        self.fs = Places()
        self.path = self.fs.init_path(path)
        self._metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts reading a checkpoint, perhaps another one."""
        if checkpoint_id is not None:
            self._metadata = None
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata, read without executing anything."""
        rank = kwargs.get("rank")
        if self._metadata is not None and rank is None:
            return self._metadata
        name = METADATA if rank is None else f"__{rank}{METADATA}"
        path: Any = self.fs.concat_path(self.path, name)
        metadata = unpickled_metadata(path.read_bytes())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of the plan without executing anything."""
        return super().read_data(plan, cast(LoadPlanner, _WeightsOnly(planner)))

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if isinstance(file, StorePath):
            # In one request: `torch.load` reads the end first, then the beginning.
            return io.BytesIO(file.read_bytes(sinfo.offset, sinfo.offset + sinfo.length))
        return super()._slice_file(file, sinfo)


class _WeightsOnly:
    """Planner that only sees pickles made here, because planners unpickle what they are given."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            checked = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"value {name!r} is refused, because reading it could run code") from error
        own = io.BytesIO()
        torch.save(checked, own)
        own.seek(0)
        self._planner.load_bytes(read_item, own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def place_for(about: Any) -> Tensor | None:
    """A place for a small value in a checkpoint: `dcp.load` fills a tensor, and replaces anything else."""
    if not isinstance(about, TensorStorageMetadata):
        return None
    return torch.zeros(about.size, dtype=about.properties.dtype, device="cpu")


def unpickled_metadata(data: bytes) -> Metadata:
    """Unpickles the contents of `.metadata`.

    Raises:
        pickle.UnpicklingError: if it is damaged, asks for anything but data, or names files outside the
        folder.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        # Bytes that are not a pickle may raise anything.
        raise pickle.UnpicklingError(reason(error)) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, not the metadata of a checkpoint")
    if not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("it does not say which files its entries are in")
    for about in metadata.storage_data.values():
        name = getattr(about, "relative_path", None)
        if not is_inside(name):
            raise pickle.UnpicklingError(f"it names a file outside of the checkpoint's folder: {name!r}")
    return metadata


def _member(enumeration: type[Enum], name: str) -> Enum:
    """Member of an enumeration, which some versions of Python pickle as `getattr`."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError(f"it asks for attribute {name!r} of {enumeration!r}")
    return enumeration[name]


_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(classes.__name__, name): getattr(classes, name) for name in _CLASSES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # Path of the folder that was saved to.  A path of another system or Python module stays a path.
    **{
        (module, name): getattr(pathlib, f"Pure{name.removeprefix('Pure')}")
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""All classes that the metadata of torch 2.11 to 2.13 asks for, besides dtypes."""


_KINDS = frozenset(kind for kind in _ALLOWED.values() if isinstance(kind, type))


_Unpickler: Any = pickle._Unpickler


class _MetadataUnpickler(_Unpickler):
    """Unpickler in Python, which restricts `load_build`: it could set attributes of classes and functions."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        state, built = self.stack[-1], self.stack[-2]
        if type(built) not in _KINDS or not (isinstance(state, dict) or hasattr(built, "__setstate__")):
            raise pickle.UnpicklingError(f"it sets attributes of {built!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        # Not getattr: torch imports modules for some names.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata needs")
        return _ALLOWED[module, name]
