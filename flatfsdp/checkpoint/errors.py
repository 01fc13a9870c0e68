"""Errors of checkpoints, and torch's reports of failed ranks in one sentence.

In:   the `CheckpointException` of torch.distributed.checkpoint, which holds every rank's traceback.
Out:  `CheckpointError`, or `DamagedCheckpoint` if the folder does not hold what was written.
Next: `saving.py` and `loading.py` raise them, the same on every rank.
"""

from __future__ import annotations

import errno
import pickle
import re

import torch
from torch import nn
from torch.distributed.checkpoint import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded: storage fails, or it belongs to a run with other lanes."""


class DamagedCheckpoint(CheckpointError):  # noqa: N818 - says what it is
    """The folder does not hold what a save has written there, or not all of it."""


def require_folder_first(path: object, call: str) -> None:
    """Raises TypeError if the arguments of a save or load are in another order."""
    if isinstance(path, nn.Module | torch.optim.Optimizer):
        raise TypeError(
            f"{call} takes the folder first, and then the model, not a {type(path).__name__}: "
            f"{call}(path, model, optimizer)"
        )


def damaged(place: object, what: str, rank: int | None = None) -> DamagedCheckpoint:
    """Makes the error for a file, or a folder, that does not hold what was written there.

    Args:
        place: the file, or the folder.
        what: a predicate that says what is wrong, such as "is missing".
        rank: the rank that wrote it, if known.
    """
    writer = "" if rank is None else f", written by rank {rank},"
    return DamagedCheckpoint(f"{place}{writer} {what}; load an older checkpoint, or a copy of this one")


def unreadable(place: object, error: Exception, rank: int | None = None) -> CheckpointError:
    """Makes the error for a file, or a folder, that the system cannot read.

    A medium that has lost data means damage.  A failure that may pass, such as a network that is down, does
    not.

    Args:
        place: the file, or the folder.
        error: error of the system.
        rank: the rank that wrote it, if known.
    """
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return damaged(place, f"cannot be read: {error.strerror}", rank)
    return CheckpointError(f"{place} cannot be read: {reason(error)}")


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The lowest rank that failed, and its exception."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def reason(error: BaseException) -> str:
    """Describes an exception in one line; an OSError by the system's message and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def asked_for(error: pickle.UnpicklingError) -> str:
    """Says what a file asks for that `torch.load(weights_only=True)` refuses.

    PyTorch's own message is several paragraphs, with terminal escapes, and the name in the last of them.
    """
    name = re.search(r"\bGLOBAL (\S+)", str(error))
    return f"it asks for {name[1]}" if name is not None else "it holds more than plain data"
