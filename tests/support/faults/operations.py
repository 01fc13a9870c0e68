"""Every operation on files below one folder, as an event: what a fault can come after."""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Event = Callable[[str], None]
"""Called after an operation with its name, such as "write __0_id_0.distcp"."""


@contextmanager
def watched(folder: Path, event: Event) -> Iterator[None]:
    """Inside, operations that change files below `folder` are told to `event`, those of all threads.

    A write is two: "half" when the first half is in the file, and "write".  Ids of saves are written as "id",
    so that two runs have the same events.
    """
    root = str(folder)

    def tell(what: str, path: Any) -> None:
        path = os.fspath(path) if not isinstance(path, int) else os.readlink(f"/proc/self/fd/{path}")
        if str(path).startswith(root):
            name = os.path.relpath(path, root)
            event(f"{what} {re.sub('[0-9a-f]{12}', 'id', name)}")

    def opened(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            found = original(file, mode, *args, **options)
            if isinstance(file, int) or not set(mode) & set("wxa+") or not str(file).startswith(root):
                return found
            tell("open", file)
            return _File(found, lambda what: tell(what, file))

        return open_file

    def after(name: str) -> Any:
        original = getattr(os, name)

        def operation(path: Any, *args: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")
            place = path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            try:
                return original(path, *args, **options)
            finally:
                # Also if another rank was first.  The name that it has now, of one that was renamed.
                tell(name, args[0] if name in ("rename", "replace") else place)

        return mock.patch.object(os, name, operation)

    def fsync(handle: Any) -> None:
        os_fsync(handle)
        tell("fsync", handle if isinstance(handle, int) else handle.fileno())

    os_fsync = os.fsync
    with ExitStack() as stack:
        for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir"):
            stack.enter_context(after(name))
        stack.enter_context(mock.patch.object(os, "fsync", fsync))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", opened(module.open)))
        yield


class _File:
    """An open file whose operations are told."""

    def __init__(self, file: Any, tell: Event) -> None:
        self._file, self._tell = file, tell

    def write(self, data: Any) -> int:
        if isinstance(data, str):
            return self._file.write(data)
        view = memoryview(data).cast("B")
        half = len(view) // 2
        self._file.write(view[:half])
        self._file.flush()
        self._tell("half")
        self._file.write(view[half:])
        self._tell("write")
        return len(view)

    def flush(self) -> None:
        self._file.flush()
        self._tell("flush")

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._tell("close")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
