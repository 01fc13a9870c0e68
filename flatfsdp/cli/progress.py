"""A progress bar for training steps, on stderr, so that stdout stays free for results.

In:   the loss, and the speed if it is to be shown, after each step.
Out:  one line; without a terminal it is written once, at the end, as a log of the run.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flatfsdp.parity.evidence import Compared


class StepBar:
    """Progress bar, to be used as a context; with `visible=False` (every rank but one) it does nothing.

    `shows_speed` adds tokens/s: where one run is compared with another, evidence is collected in between, and
    the speed is not that of training.
    """

    def __init__(self, label: str, steps: int, visible: bool, *, shows_speed: bool = False) -> None:
        self._shows_speed = shows_speed
        self._progress = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=20),
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
        speed = f"  {tokens_per_second:,.0f} tokens/s" if self._shows_speed else ""
        self._progress.update(self._task, advance=1, note=f"loss {loss:.4f}{speed}")

    def conclude(self, found: Compared) -> None:
        """Replaces the last note by the result of the steps."""
        self._progress.update(self._task, note="equal" if found.equal else "DIFFER")
