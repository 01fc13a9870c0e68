"""The command `flatfsdp`, and `python -m flatfsdp`: see `flatfsdp/cli/app.py`."""

from flatfsdp.cli.needs import end_without

try:
    from flatfsdp.cli.app import app
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("flatfsdp"):
        raise
    raise end_without(missing.name) from None


def main() -> None:
    """Runs the command line."""
    app(prog_name="flatfsdp")


# The ranks import this module again, under another name; only the first process is the program.
if __name__ == "__main__":
    main()
