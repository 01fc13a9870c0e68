"""Checks that a checkpoint fits the model and the optimizer, before anything is read or changed.

In:   a checkpoint's metadata, and a model or the stages of one.
Out:  nothing, or one ValueError on all ranks that names the differences and the option that allows them.
Next: `loading.py` reads what fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flatfsdp.checkpoint.local import persistent_buffers
from flatfsdp.checkpoint.stages import of_each_stage, raising_on_all
from flatfsdp.contract.late_buffers import LATE_BUFFERS
from flatfsdp.engine.whole.units import Model, keys_of_slots, named_groups, stages_of
from flatfsdp.flat.sites import prefixed_modules

Accepted = Literal["dtype", "surplus", "optimizer"]
"""Differences that `load` may accept: "dtype" converts values of another dtype; "surplus" leaves out entries
that the model has no place for; "optimizer" takes the state of an optimizer of another class."""

_SHOWN = 3
"""Largest number of names in one message."""


def check_accepted(accept: Collection[str]) -> None:
    """Checks `accept`; a misspelt value would accept nothing.

    Raises:
        ValueError: if `accept` is a string, or has values that `Accepted` does not list.
    """
    unknown = [accept] if isinstance(accept, str) else sorted(set(accept) - set(get_args(Accepted)))
    if unknown:
        raise ValueError(
            f"accept is a collection of {', '.join(map(repr, get_args(Accepted)))}; it has {unknown[0]!r}"
        )


def saved_shapes(metadata: Metadata) -> dict[str, torch.Size]:
    """Shapes of the model's tensors, by their names in it."""
    return {
        name: about.size
        for name, about in _saved(metadata).items()
        if isinstance(about, TensorStorageMetadata)
    }


def check_model_fits(metadata: Metadata, model: Model, accept: Collection[str]) -> None:
    """Compares names, shapes and dtypes.  Collective over all ranks.

    Raises:
        ValueError: on every rank, naming tensors that are missing or of another shape, or, unless accepted,
            of another dtype or of no stage.
    """
    saved, own = _saved(metadata), _entries(model)
    missing = [name for name in own if name not in saved]
    shapes, dtypes = [], []
    for name, (shape, dtype) in own.items():
        about = saved.get(name)
        if about is None:
            continue
        if not isinstance(about, TensorStorageMetadata):
            shapes.append(f"{name} (no tensor, here {shape})")
        elif tuple(about.size) != shape:
            shapes.append(f"{name} ({tuple(about.size)}, here {shape})")
        elif about.properties.dtype != dtype:
            dtypes.append(f"{name} ({about.properties.dtype}, here {dtype})")
    of_stages = of_each_stage((missing, shapes, dtypes, _names(model)), model)
    missing, shapes, dtypes, names = (
        list(dict.fromkeys(each for of_stage in lists for each in of_stage))
        for lists in zip(*of_stages, strict=True)
    )
    surplus = sorted(saved.keys() - set(names))
    problems = [
        _told(missing, "missing in the checkpoint"),
        _told(shapes, "of another shape"),
        _told([] if "dtype" in accept else dtypes, "of another dtype; accept=('dtype',) converts them"),
        _told(
            [] if "surplus" in accept else surplus,
            "only in the checkpoint; accept=('surplus',) leaves them out",
        ),
    ]
    if any(problems):
        raise ValueError(f"the checkpoint is not of this model: {'. '.join(filter(None, problems))}")


def check_optimizer_fits(
    saved_class: Any, optimizer: torch.optim.Optimizer, accept: Collection[str], model: Model
) -> None:
    """Compares the class of the optimizer.  Collective over all ranks.

    Args:
        saved_class: name of the saved optimizer's class; None if unknown.
        optimizer: optimizer to load into.
        accept: differences that are accepted; "optimizer" accepts another class.
        model: the model, or this rank's stages of a pipeline.

    Raises:
        ValueError: on every rank, if the classes differ (unless accepted).
    """
    own = type(optimizer).__name__
    with raising_on_all(model):
        if saved_class is not None and saved_class != own and "optimizer" not in accept:
            raise ValueError(
                f"the checkpoint has the state of {saved_class}, and the optimizer is {own}; load the model "
                "alone, or let the optimizer take the state over as it is with accept=('optimizer',)"
            )


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


def _saved(metadata: Metadata) -> dict[str, Any]:
    """The model's entries, by their names in it, without extra state of modules."""
    found = {}
    for flat_name, about in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(flat_name, (flat_name,))
        if path[0] == "model" and not str(path[-1]).endswith("_extra_state"):
            found[".".join(map(str, path[1:]))] = about
    return found


def _entries(model: Model) -> dict[str, _Entry]:
    """Entries of `sharded_state_dict`, without buffers that a layer does not need before its first use."""
    parameters = {
        # A checkpoint cuts along dimensions, so there must be one.
        prefix + slot.name: _Entry(slot.whole_shape or (1,), group.master.flat.dtype)
        for prefix, group in named_groups(model)
        for slot in group.layout.slots
    }
    buffers = {
        name: _Entry(tuple(buffer.shape), buffer.dtype)
        for stage in stages_of(model)
        for name, buffer in persistent_buffers(stage)
    }
    late = set(_late_names(model))
    return {name: entry for name, entry in {**parameters, **buffers}.items() if name not in late}


def _names(model: Model) -> list[str]:
    """All names that its checkpoint may have, with coming buffers and other names of tied parameters."""
    tied = (name for stage in stages_of(model) for names in keys_of_slots(stage).values() for name in names)
    return [*_entries(model), *_late_names(model), *tied]


def _late_names(model: Model) -> Iterable[str]:
    for stage in stages_of(model):
        for prefix, owner in prefixed_modules(stage):
            yield from (prefix + name for name in LATE_BUFFERS.of(owner))


def _told(names: list[str], what: str) -> str:
    """One sentence about these names; empty if there are none."""
    if not names:
        return ""
    more = f", and {len(names) - _SHOWN} more," if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} {'is' if len(names) == 1 else 'are'} {what}"
