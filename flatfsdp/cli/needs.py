"""Packages that the command line needs, which `pip install 'flatfsdp[cli]'` brings.

In:   the name of a package.
Out:  if the package is missing, the end of the program, with a message that says what to install.
"""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str) -> None:
    """Checks for a package without importing it, before a long run rather than after it.

    Raises:
        SystemExit: if it is not installed.
    """
    if find_spec(package) is None:
        raise end_without(package)


def end_without(package: str) -> SystemExit:
    """Makes the exception that ends the program with exit code 1 and says what to install."""
    return SystemExit(
        f"the command line needs {package}, which is not installed; run: pip install 'flatfsdp[cli]'"
    )
