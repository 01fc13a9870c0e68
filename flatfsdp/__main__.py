"""`python -m flatfsdp`: see `flatfsdp/cli/app.py`."""

try:
    from flatfsdp.cli.app import app
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("flatfsdp"):
        raise
    raise SystemExit(
        f"the command line needs {missing.name}, which is not installed; run: pip install 'flatfsdp[cli]'"
    ) from None

# The ranks import this module again, under another name; only the first process is the program.
if __name__ == "__main__":
    app(prog_name="python -m flatfsdp")
