"""Random models, in which one rank does something else, from the command line: see `search.py`."""

import typer

from tests.support.diverging.search import main

if __name__ == "__main__":
    typer.run(main)
