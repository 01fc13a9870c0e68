"""A progress bar for training steps, on stderr, so that stdout stays free for results.

In:   the loss and the speed after each step.
Out:  one line; without a terminal it is written once, at the end, as a log of the run.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class StepBar:
    """Progress bar, to be used as a context; with `visible=False` (every rank but one) it does nothing."""

    def __init__(self, label: str, steps: int, visible: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._progress.add_task(label, total=steps, note="")

    def __enter__(self) -> StepBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, loss: float, tokens_per_second: float) -> None:
        """Shows that one step has ended; `tokens_per_second` counts all ranks."""
        self._progress.update(
            self._task, advance=1, note=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        )

    def conclude(self, note: str) -> None:
        """Replaces the last note by the result of the steps."""
        self._progress.update(self._task, note=note)
