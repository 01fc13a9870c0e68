"""Random trainings, eager and replayed, from the command line: see `search.py`."""

import typer

from tests.support.replaying.search import main

if __name__ == "__main__":
    typer.run(main)
