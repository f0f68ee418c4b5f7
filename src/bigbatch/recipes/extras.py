"""Optional packages: what to say when one of them is missing."""

from __future__ import annotations

from importlib.util import find_spec

from bigbatch.errors import MissingExtra


def require(*packages: str) -> None:
    """Say how to install the optional packages, if one of them is missing.

    Raises:
        MissingExtra: names the missing packages and the command that installs them.

    >>> require("torch")
    >>> require("no_such_package")
    Traceback (most recent call last):
    bigbatch.errors.MissingExtra: This needs the extra "train". Found: no package named no_such_package. Do: ...
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(
            'This needs the extra "train"',
            f"no package named {', '.join(missing)}",
            'run pip install "bigbatch[train]"',
        )
