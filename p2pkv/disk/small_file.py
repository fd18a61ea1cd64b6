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
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
"""Between attempts to write what the disk did not take; doubled from the first to the second."""
_CHECKED = re.compile(rb"(p2pkv ([^\n]+)\nversion=1\nnode=([^\n]+)\n(.*))check=([0-9a-f]{16})\n", re.DOTALL)


class _Attempt:
    """A thread of its own does what the disk is to do, which may hang, again until it works or that is over."""

    def __init__(self) -> None:
        self.has_begun = False
        """Whether the thread has come to it; one that waits for the disk does what is to be done by then."""
        self.is_over = threading.Event()
        """It is not tried again."""
        self.was_tried = threading.Event()
        self.error: Exception | None = None
        """The first attempt ended by this."""

    def start(self, act: Callable[[], None]) -> None:
        def run() -> None:
            pause = _RETRY_S
            while True:
                try:
                    act()
                except Exception as error:  # noqa: BLE001  # the top of a thread
                    if not self.was_tried.is_set():
                        self.error = error
                else:
                    break
                finally:
                    self.was_tried.set()
                if self.is_over.wait(pause):
                    break
                pause = min(2 * pause, _LONGEST_RETRY_S)

        try:
            threading.Thread(target=run, name="p2pkv-small-file", daemon=True).start()
        except RuntimeError as error:  # no thread is to be had now: the next write is another attempt
            self.has_begun, self.error = True, error
            self.was_tried.set()


class SmallFile:
    """Reads and writes one file, whose first line is ``p2pkv`` and what it has. Thread-safe.

    What the disk does not take is tried again until it does, something newer is written, or :meth:`close`.
    """

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
        # held while a thread writes, however long the disk takes; guards the next
        self._lock = threading.Lock()
        self._written: bytes | None = None  # the lines, once the disk has taken them
        self._turn = threading.Lock()  # guards the next two
        self._last: _Attempt | None = None  # the last write
        self._is_closed = False
        self._log = LimitedLog(_log)

    def read(self, take: Callable[[bytes], None]) -> None:
        """Have the lines taken that were written, if there are any. Never raises, whatever ``take`` raises."""

        def read() -> None:
            with suppress(FileNotFoundError), _open_own(self.path) as file:
                take(self._parse(file.read(self._longest + 1)))

        once = _Attempt()
        once.is_over.set()
        once.start(read)
        self._wait(once, "read", None)

    def write(self, lines: Callable[[], bytes], wait_s: float | None = None) -> bool:
        """Replace what is there by ``lines``, unless they are what was written last, if the disk can. Never raises.

        ``lines`` is called on another thread, by one at a time, and again at each attempt; it says what is to be there
        at that moment. Returns whether the disk has answered, well or not, for which it is waited for ``wait_s``.
        """
        with self._turn:
            attempt = self._last
            is_new = attempt is None or attempt.has_begun
            # One that has not begun waits for a disk that hangs, and will ask for the lines of then.
            if attempt is None or is_new:
                if attempt is not None:
                    attempt.is_over.set()
                attempt = self._last = _Attempt()
                if self._is_closed:
                    attempt.is_over.set()
        if is_new:
            attempt.start(lambda: self._write(attempt, lines))
        return self._wait(attempt, "written", wait_s)

    def _write(self, attempt: _Attempt, lines: Callable[[], bytes]) -> None:
        with self._lock:
            with self._turn:
                attempt.has_begun = True
            text = lines()
            if text != self._written:
                self._replace(text)
                self._written = text

    def close(self) -> None:
        """Try nothing again any more. Idempotent."""
        with self._turn:
            self._is_closed = True
            if self._last is not None:
                self._last.is_over.set()

    def _wait(self, attempt: _Attempt, done: str, wait_s: float | None) -> bool:
        """Wait for the first attempt, a moment or as long as is said; a failure is a warning."""
        if not attempt.was_tried.wait(_WAIT_S if wait_s is None else wait_s):
            if wait_s is None:  # who says how long he waits may have no more time, and learns it
                self._warn(done, f"the disk did not answer within {_WAIT_S} s")
            return False
        if attempt.error is not None:
            self._warn(done, attempt.error)
        return True

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
        if self._is_closed:  # the disk has answered late, and another of this path may write by now
            return
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
