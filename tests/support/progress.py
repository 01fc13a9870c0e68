"""What a long run has done so far, a line now and then: on a terminal, in a pipe and in a log."""

from __future__ import annotations

import time

SECONDS = 5.0
"""Between two lines."""


class Progress:
    """Prints what is counted: at most one line every few seconds, and those that have to be.

    Args:
        what: is counted; the beginning of each line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = time.monotonic()

    def show(self, count: object, at_once: bool = False) -> None:
        """One line, with the seconds since the beginning, if it is time for one.

        Args:
            at_once: it is, for the last line, say.
        """
        now = time.monotonic()
        if at_once or now - self._last > SECONDS:
            self._last = now
            # Python holds back what goes into a pipe.
            print(f"{self._what}: {count}  ({now - self._start:.0f} s)", flush=True)
