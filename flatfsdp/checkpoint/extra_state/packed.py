"""Values as tensors and JSON: what a checkpoint can hold, and a load can read without executing anything.

In:   numbers, strings, tensors, and lists, tuples and dicts of them.
Out:  tensors by number, and one more, with JSON that says where they belong.

Every value but a plain one is a JSON object with one key, which says its kind: `{"tensor": "0"}`,
`{"tuple": [1, 2]}`, `{"dict": {"a": 1}}`, `{"record": ["DelayedScaling", {...}]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

JSON = "json"
"""Key of the tensor with JSON, UTF-8."""

_PLAIN = (type(None), bool, int, float, str)


class Record(NamedTuple):
    """An object of another library by name, which `Records` can make again.

    Attributes:
        kind: name of the class.
        fields: what it is made of, by the names of its arguments.
    """

    kind: str
    fields: dict[str, Any]


class Records(NamedTuple):
    """Objects of another library as records.

    Attributes:
        take_apart: an object's record; None for an object that is not known.
        make: the object of a record; raises ValueError for one that is not known.
    """

    take_apart: Callable[[Any], Record | None]
    make: Callable[[Record], Any]


def _none_known(record: Record) -> Any:
    raise ValueError(f"an object of class {record.kind}, which is not known here")


NO_RECORDS = Records(lambda value: None, _none_known)


def pack(value: Any, records: Records = NO_RECORDS) -> dict[str, Tensor]:
    """The tensors that stand for a value, by key.

    Raises:
        TypeError: for anything else than numbers, strings, tensors, lists, tuples, dicts and records.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(value, tensors, records))
    return {JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **tensors}


def _packed(value: Any, tensors: dict[str, Tensor], records: Records) -> Any:
    def inner(each: Any) -> Any:
        return _packed(each, tensors, records)

    if isinstance(value, Tensor):
        key = str(len(tensors))
        # A copy: what is saved later must not change before.
        tensors[key] = value.detach().to("cpu", copy=True)
        return {"tensor": key}
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [inner(each) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: inner(each) for key, each in value.items()}}
    record = records.take_apart(value)
    if record is None:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
    return {"record": [record.kind, {key: inner(each) for key, each in record.fields.items()}]}


def unpack(tensors: Mapping[str, Tensor], records: Records = NO_RECORDS) -> Any:
    """The value that these tensors stand for.

    Raises:
        ValueError: if they are not what `pack` returns.
    """
    try:
        return _unpacked(json.loads(tensors[JSON].numpy().tobytes()), tensors, records)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"something that no save has written: {type(error).__name__}: {error}") from None


def _unpacked(value: Any, tensors: Mapping[str, Tensor], records: Records) -> Any:
    def inner(each: Any) -> Any:
        return _unpacked(each, tensors, records)

    if type(value) in _PLAIN:
        return value
    kind: str = ""
    content: Any = None
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        parts = [inner(each) for each in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {key: inner(each) for key, each in content.items()}
    if kind == "record":
        name, fields = content
        return records.make(Record(name, {key: inner(each) for key, each in fields.items()}))
    raise ValueError(f"a value of an unknown kind: {value!r:.60}")
