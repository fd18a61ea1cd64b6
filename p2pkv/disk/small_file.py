"""A few lines of text that a node keeps beside its store: written whole, and checked when they are read.

Such a file is a help and no condition: a disk that is slow, full, broken or gone costs a warning, and holds up nobody
for longer than a moment. ``docs/disk.md`` has the formats.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from p2pkv.limited_log import LimitedLog

_log = logging.getLogger(__name__)

_WAIT_S = 1.0
"""How long a call waits for the disk; what it has not done by then it does when it can."""
_CHECKED = re.compile(rb"(p2pkv ([^\n]+)\nversion=1\nnode=([^\n]+)\n(.*))check=([0-9a-f]{16})\n", re.DOTALL)


class SmallFile:
    """Reads and writes one file, whose first line is ``p2pkv`` and what it has. Thread-safe."""

    def __init__(
        self, path: str, has: str, node_id: str, loss: str, *, longest: int, makes_parents: bool = False
    ) -> None:
        """``longest``: bytes of a file that can be one. ``loss``: what it costs that there is none."""
        self.path = Path(os.path.abspath(path))
        self._has = has
        self._node_id = node_id
        self._loss = loss
        self._longest = longest
        self._makes_parents = makes_parents
        self._lock = threading.Lock()  # held while a thread writes, however long the disk takes
        self._log = LimitedLog(_log)

    def read(self, take: Callable[[bytes], None]) -> None:
        """Have the lines taken that were written, if there are any. Never raises, whatever ``take`` raises."""

        def read() -> None:
            with suppress(FileNotFoundError), _open_own(self.path) as file:
                take(self._parse(file.read(self._longest + 1)))

        self._within(read, "read")

    def write(self, lines: Callable[[], bytes | None]) -> None:
        """Replace what is there by ``lines``, unless they are None then, if the disk can. Never raises.

        ``lines`` is called on another thread, by one at a time.
        """

        def write() -> None:
            with self._lock:
                text = lines()
                if text is not None:
                    self._replace(text)

        self._within(write, "written")

    def _within(self, act: Callable[[], None], done: str) -> None:
        """Act on another thread, since a disk may hang; what goes wrong is a warning."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  # the top of a thread
                errors.append(error)

        thread = threading.Thread(target=run, name="p2pkv-small-file", daemon=True)
        thread.start()
        thread.join(_WAIT_S)
        if thread.is_alive():
            self._warn(done, f"the disk did not answer within {_WAIT_S} s")
        elif errors:
            self._warn(done, errors[0])

    def _warn(self, done: str, why: object) -> None:
        message = "the %s of node %s can't be %s (%s): %s; %s"
        self._log.warning(None, message, self._has, self._node_id, done, self.path, why, self._loss)

    def _parse(self, text: bytes) -> bytes:
        match = _CHECKED.fullmatch(text)
        if match is None or match[2] != self._has.encode() or match[5].decode() != _check(match[1]):
            raise ValueError("it is damaged, or of another version")
        if match[3] != self._node_id.encode():
            raise ValueError("it is another node's")
        return match[4]

    def _replace(self, lines: bytes) -> None:
        text = f"p2pkv {self._has}\nversion=1\nnode={self._node_id}\n".encode() + lines
        if self._makes_parents:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.path.with_name(f"{self.path.name}.new")
        # One that is there is a dead run's, or a link that another user has put where he thinks that this writes.
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(text + f"check={_check(text)}\n".encode())
            file.flush()
            os.fsync(descriptor)
        new.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _open_own(path: Path) -> BinaryIO:
    """Open what this user has written: the folder may be one where others write too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise ValueError("it is no file of this user's")
    return open(descriptor, "rb")


def _check(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()
