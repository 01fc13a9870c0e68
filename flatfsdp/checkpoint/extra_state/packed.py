"""Values as tensors and JSON: what a checkpoint can hold, and a load can read without executing anything.

In:   numbers, strings, tensors, and lists, tuples and dicts of them.
Out:  tensors by number, and one more, with JSON that says where they belong.

Every value but a plain one is a JSON object with one key, which says its kind: `{"tensor": "0"}`,
`{"tuple": [1, 2]}`, `{"dict": {"a": 1}}`, `{"record": ["DelayedScaling", {...}]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

JSON = "json"
"""Key of the tensor with JSON, UTF-8."""

_PLAIN = (type(None), bool, int, float, str)


TakeApart = Callable[[Any], tuple[str, dict[str, Any]] | None]
"""Function that returns a record of an object of another library: the name of its class, and the arguments
that make it; None for an object that is not known."""

Make = Callable[[str, dict[str, Any]], Any]
"""Function that makes the object of a record; raises ValueError for one that is not known."""


def pack(value: Any, take_apart: TakeApart | None = None) -> dict[str, Tensor]:
    """The tensors that stand for a value, by key; with `take_apart` also objects that it knows.

    Raises:
        TypeError: for anything else than numbers, strings, tensors, lists, tuples, dicts and records.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(value, tensors, take_apart))
    return {JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **tensors}


def _packed(value: Any, tensors: dict[str, Tensor], take_apart: TakeApart | None) -> Any:
    def inner(each: Any) -> Any:
        return _packed(each, tensors, take_apart)

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
    record = take_apart(value) if take_apart is not None else None
    if record is None:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")
    name, fields = record
    return {"record": [name, {key: inner(each) for key, each in fields.items()}]}


def unpack(tensors: Mapping[str, Tensor], make: Make | None = None) -> Any:
    """The value that these tensors stand for.

    Raises:
        ValueError: if they are not what `pack` returns.
    """
    try:
        return _unpacked(json.loads(tensors[JSON].numpy().tobytes()), tensors, make)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"something that no save has written: {type(error).__name__}: {error}") from None


def _unpacked(value: Any, tensors: Mapping[str, Tensor], make: Make | None) -> Any:
    def inner(each: Any) -> Any:
        return _unpacked(each, tensors, make)

    if type(value) in _PLAIN:
        return value
    match [*value.items()] if isinstance(value, dict) else None:
        case [("tensor", key)]:
            return tensors[key]
        case [("list", parts)]:
            return [inner(each) for each in parts]
        case [("tuple", parts)]:
            return tuple(inner(each) for each in parts)
        case [("dict", parts)]:
            return {key: inner(each) for key, each in parts.items()}
        case [("record", [str(name), fields])]:
            if make is None:
                raise ValueError(f"an object of class {name}, which is not known here")
            return make(name, {key: inner(each) for key, each in fields.items()})
    raise ValueError(f"a value of an unknown kind: {value!r:.60}")
