"""An object store in a folder, for ranks in several processes: objects are put whole, and nothing is renamed.

`objects:///path` is registered with fsspec when this is imported.
"""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

_UPLOADING = ".uploading-"


class _Put(io.BytesIO):
    """An object that is there once it is closed; what a killed process leaves is never listed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        if not self.closed:
            folder, name = os.path.split(self.path)
            os.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{_UPLOADING}{uuid.uuid4().hex[:12]}-{name}"
            with open(temporary, "wb") as file:
                file.write(self.getvalue())
            os.replace(temporary, self.path)
        super().close()


class Objects(AbstractFileSystem):
    """Objects are files, and folders those that have objects below them."""

    protocol = "objects"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return (
            [*map(cls._strip_protocol, path)] if isinstance(path, list) else path.removeprefix("objects://")
        )

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if os.path.isfile(path):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        if any(not each.name.startswith(_UPLOADING) for each in Path(path).rglob("*") if each.is_file()):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        self.info(path)
        found = []
        for each in Path(self._strip_protocol(path)).iterdir():
            try:
                if not each.name.startswith(_UPLOADING):
                    found.append(self.info(str(each)))
            except FileNotFoundError:
                pass
        return found if detail else [each["name"] for each in found]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return open(path, "rb") if mode == "rb" else _Put(path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def rm_file(self, path: str) -> None:
        os.unlink(path)

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("object stores rename nothing")


fsspec.register_implementation("objects", Objects, clobber=True)
