"""A fresh folder for each run: what an earlier run has written is never written over."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from bigbatch.errors import OptionError


def fresh(asked: Path) -> Path:
    """Makes the folder that was asked for, or the first numbered one beside it that holds nothing yet.

    Raises:
        OptionError: a file is in the way.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> first = fresh(root / "runs" / "digits")
    >>> _ = (first / "run.json").write_text("{}")
    >>> fresh(root / "runs" / "digits").name
    'digits-2'
    """
    if asked.exists() and not asked.is_dir():
        raise OptionError(f"out={str(asked)!r} was asked for", "a file of that name", "name a folder")
    for number in count(1):
        folder = asked if number == 1 else asked.with_name(f"{asked.name}-{number}")
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            break
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        do = "name a folder that can be made"
        raise OptionError(f"out={str(asked)!r} was asked for", f"{error.strerror} ({folder})", do) from error
    return folder
