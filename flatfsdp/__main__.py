"""`python -m flatfsdp`: see `flatfsdp/cli/app.py`."""

from flatfsdp.cli.app import app

# The ranks import this module again, under another name; only the first process is the program.
if __name__ == "__main__":
    app(prog_name="python -m flatfsdp")
