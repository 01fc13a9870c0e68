"""What the command line needs besides the library: packages that `pip install 'flatfsdp[cli]'` brings.

In:   the name of a package.
Out:  the end of the program, with what to install, if the package is not there.
"""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str) -> None:
    """Looks for a package without importing it: before a run of hours rather than behind it.

    Raises:
        SystemExit: if it is not installed.
    """
    if find_spec(package) is None:
        raise end_without(package)


def end_without(package: str) -> SystemExit:
    """What ends the program with exit code 1, and says what to install."""
    return SystemExit(
        f"the command line needs {package}, which is not installed; run: pip install 'flatfsdp[cli]'"
    )
