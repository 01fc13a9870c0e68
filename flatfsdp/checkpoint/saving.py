"""`save`: a model and its optimizer to a folder, whole or not at all.

In:   a model, or the stages of a pipeline that this rank has, and the optimizer.
Out:  a folder that `load` reads with any number of ranks.
Next: `writer.py` writes it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from flatfsdp.checkpoint.errors import CheckpointError, first_failure, reason
from flatfsdp.checkpoint.optimizer_state import merged_groups
from flatfsdp.checkpoint.sharded import numbered, sharded_optimizer_state_dict, sharded_state_dict
from flatfsdp.checkpoint.stages import check_names, of_each_stage, raise_on_all
from flatfsdp.checkpoint.writer import Writer
from flatfsdp.engine.units import Model


def save(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes model and optimizer to a folder, each rank its part.  Collective over all ranks.

    It is there whole or not at all: killed at any moment, the folder holds what it held before, or all of the
    new one.  Every file has a digest, which `load` verifies.

    Args:
        model: or the stages of a pipeline that this rank has.
        optimizer: over all parameters of `model`.
        extra: what else belongs to it, such as the step, for `load` to return: tensors, numbers, strings, and
            lists and dicts of them.  The first rank's is written.
        overwrite: whether to replace a checkpoint that the folder holds; that one can be loaded until the new
            one is complete.

    Raises:
        FileExistsError: if the folder holds a checkpoint and is not to be overwritten.
        ValueError: as `sharded_state_dict`; if two stages have parameters of the same name.
        TypeError: if `extra`, or an option of the optimizer, is such that `load` would refuse it.
        CheckpointError: if a rank could not write, with the system's reason.
        All of them on every rank, and what the folder held before can still be loaded.
    """
    problem: Exception | None = None
    try:
        if extra:
            _check_loadable(dict(extra), "extra")
        for group in optimizer.param_groups if optimizer is not None else ():
            for option, value in group.items():
                if option != "params":
                    _check_loadable(value, f"the optimizer's {option}")
    except Exception as error:
        problem = error
    raise_on_all(problem, model)
    write(Writer(path, overwrite=overwrite, extra=extra), model, optimizer)


def write(writer: Writer, model: Model, optimizer: torch.optim.Optimizer | None) -> None:
    """Saves with this writer, whatever it has been given as `extra`; otherwise raises what `save` raises."""
    check_names(model)
    state: dict[str, Any] = {"model": sharded_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = sharded_optimizer_state_dict(model, optimizer)
        groups = state["optimizer"]["param_groups"]
        of_stages = of_each_stage([groups[number] for number in sorted(groups, key=int)], model)
        state["optimizer"]["param_groups"] = numbered(merged_groups(of_stages))
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.CheckpointException as failed:
        rank, error = first_failure(failed)
        # The writer's own has no number of the system's.
        if isinstance(error, FileExistsError) and error.errno is None:
            raise FileExistsError(*error.args) from None
        raise CheckpointError(
            f"the checkpoint {writer.path} was not saved: rank {rank}: {reason(error)}"
        ) from None


def _check_loadable(value: Any, what: str) -> None:
    """Saves and loads a value in memory, as `load` will.

    Raises:
        TypeError: if `torch.load(weights_only=True)` would refuse it.
    """
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{what} cannot be saved: {reason(error)}") from None
    except pickle.UnpicklingError:
        raise TypeError(
            f"{what} has more than tensors, numbers, strings, lists and dicts, and `load` would refuse that, "
            "because reading it could run code; save plain values"
        ) from None
