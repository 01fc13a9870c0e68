"""Draws pictures of `results` again, from the JSON files beside them: after a change of how they are drawn.

python benchmarks/redraw.py
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

from lib.common import RESULTS

SCRIPTS = ("hf", "step", "bytes")
"""Benchmarks whose pictures are functions of their JSON alone."""


def main() -> None:
    for script in SCRIPTS:
        redraw: Callable[[object, Path], None] = importlib.import_module(script).redraw
        for file in sorted(RESULTS.glob(f"{script}*.json")):
            redraw(json.loads(file.read_text()), file.with_suffix(".png"))
            print(file.stem)


if __name__ == "__main__":
    main()
