"""The files that a store's settings name: read again and again, by threads whose calls have deadlines."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def require_file(path: str) -> None:
    """Raise OSError unless ``path`` is a regular file: a FIFO is waited for until somebody writes to it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is no regular file")


def text_of(path: str) -> str:
    """Return what a file holds, without blanks around it. Raises OSError and UnicodeDecodeError."""
    require_file(path)
    return Path(path).read_text(encoding="utf-8").strip()
