#!/usr/bin/env python3
"""Does what README.md tells a new user to do, on a clean checkout, and prints the seconds of each step.

    .ci/first_ten_minutes.py                   all of it; tests run twice, the second time with their cache
    .ci/first_ten_minutes.py --without-tests   until the demo has ended

The last commit is cloned into a temporary folder, so what is not committed is not there.  A step that fails
ends the program with exit code 1.  Needs git, make and python3, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = (".venv/bin/torchrun", "--standalone", "--nproc-per-node", "2", "train.py")


def own_model(checkout: Path) -> str:
    """The program of the page for beginners, which its first line names train.py."""
    page = (checkout / "docs" / "getting_started.md").read_text()
    blocks = re.findall(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)
    if len(blocks) != 1:
        raise SystemExit(f"docs/getting_started.md has {len(blocks)} programs called train.py, not one")
    return blocks[0]


def seconds_of(command: Sequence[str], checkout: Path) -> float:
    """Runs a command in the checkout, with its output shown.

    Raises:
        SystemExit: if it fails.
    """
    print(f"$ {' '.join(command)}", flush=True)
    # As in a new terminal: neither the packages of this process, nor options of a `make` around it.
    inherited = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    start = time.monotonic()
    done = subprocess.run(command, cwd=checkout, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed, with exit code {done.returncode}")
    return time.monotonic() - start


def main() -> None:
    """Runs the steps and prints their seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--without-tests", action="store_true", help="do not install what they need, either")
    options = parser.parse_args()
    steps: list[tuple[str, Sequence[str]]] = [
        ("install", ("make", ".venv/cli")),
        ("first own model, on 2 ranks", TORCHRUN),
        ("demo", ("make", "demo")),
    ]
    if not options.without_tests:
        steps += [
            ("install what tests need", ("make", ".venv/installed")),
            ("tests, first run", ("make", "test")),
            ("tests, second run", ("make", "test")),
        ]
    with tempfile.TemporaryDirectory(prefix="first-ten-minutes-") as folder:
        checkout = Path(folder, "checkout")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        (checkout / "train.py").write_text(own_model(checkout))
        seconds: dict[str, float] = {}
        try:
            for name, command in steps:
                seconds[name] = seconds_of(command, checkout)
        finally:
            print(f"\n{'seconds':>8}  step, on {os.cpu_count()} CPUs, Python {sys.version.split()[0]}")
            for name, taken in seconds.items():
                print(f"{taken:8.1f}  {name}")


if __name__ == "__main__":
    main()
