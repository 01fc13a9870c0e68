"""A progress bar for training steps, on stderr, so that stdout stays free for results.

In:   the loss, and the speed if it is to be shown, after each step.
Out:  one line; without a terminal it is written once, at the end, as a log of the run.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class StepBar(Progress):
    """Progress bar, to be used as a context; with `visible=False` (every rank but one) it does nothing.

    `tokens`, the number in a step of all ranks, adds tokens/s: where one run is compared with another,
    evidence is collected in between, and the speed is not that of training.
    """

    def __init__(self, label: str, steps: int, visible: bool, *, tokens: int | None = None) -> None:
        super().__init__(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not visible,
        )
        self.tokens = tokens
        self.steps = self.add_task(label, total=steps, note="")

    def show(self, loss: float, ms: float) -> None:
        """Shows that one step has ended, with its loss and milliseconds."""
        speed = "" if self.tokens is None else f"  {1e3 * self.tokens / ms:,.0f} tokens/s"
        self.update(self.steps, advance=1, note=f"loss {loss:.4f}{speed}")

    def conclude(self, equal: bool) -> None:
        """Replaces the last note by the result of the steps."""
        self.update(self.steps, note="equal" if equal else "DIFFER")
