"""`Owner`: of all runs that save to one folder, only the one that began last goes on.

In:   the folder of a run.
Out:  a file in it that names the process that saves there; an error in any other.
Next: `manager.py` and `FlatTrainer` ask before each save, and their writer before the end of it.

A job that was started again may not be alone: a host that was lost can come back, and ranks outlive a
launcher that was killed.  A lock would not help, since a dead host never gives it back.  So whoever begins
takes the folder without asking, and whoever had it finds that out before it saves again.
"""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from flatfsdp.checkpoint.errors import CheckpointError
from flatfsdp.checkpoint.media import medium_of
from flatfsdp.checkpoint.store import Place
from flatfsdp.checkpoint.writer import Writer

FILE = "_owner.txt"
"""What begins so stays here when transformers' Trainer uploads the folder of a run."""


class Owner:
    """What one rank of a run knows about the run's folder.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._own: bytes | None = None

    def require(self) -> None:
        """Takes the folder the first time, and later finds out whether it still belongs to this run.

        Raises:
            CheckpointError: if another run has taken it.
            OSError: if the file can be neither read nor written.
        """
        found = None
        if self._own is not None:
            # Somebody who tidies up may have removed it, and is no run: it is written again.
            with suppress(FileNotFoundError):
                found = (self._folder / FILE).read_bytes()
        if found is None:
            self._take()
        elif found != self._own:
            raise CheckpointError(
                f"{self._folder} belongs to another run now: {found.decode(errors='replace')}; this one "
                "saves nothing more there; stop one of the two, or give it a folder of its own"
            )

    def _take(self) -> None:
        since = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
        name = f"process {os.getpid()} on {socket.gethostname()}, since {since}, {uuid.uuid4().hex}"
        medium, own = medium_of(self._folder), name.encode()
        medium.make()
        medium.commit({FILE: own}, FILE)
        medium.flush()
        # Only now: what could not be written is tried again, whoever the folder belonged to before.
        self._own = own


class OwnedWriter(Writer):
    """A writer whose save fails if the run's folder has another owner at its end.

    Args:
        owner: what this rank knows.
        path: folder of the checkpoint.
        options: further ones of `Writer`.
    """

    def __init__(self, owner: Owner, path: Place, **options: Any) -> None:
        super().__init__(path, **options)
        self._owner = owner

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the files; the coordinator alone calls it."""
        # The new owner may save the same step at this moment: a commit removes the files of other saves.
        self._owner.require()
        super().finish(metadata, results)
