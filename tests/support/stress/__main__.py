"""Random models, trained in random ways, from the command line: see `search.py`."""

import typer

from tests.support.stress.search import main

if __name__ == "__main__":
    typer.run(main)
