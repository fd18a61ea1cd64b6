"""The last boot epoch of a node, kept beside its store: so that a clock that was set back can't give it a lower one.

Peers remember it as well; the file counts where none of them does. It is a help and no condition: a disk that is slow,
full, broken or gone costs a warning, and holds up nobody for longer than a moment. ``docs/disk.md`` has the format.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

_log = logging.getLogger(__name__)

_WAIT_S = 1.0
"""For the disk, at a start; what it has not done by then it does when it can."""
_LARGEST = 1 << 62
"""A boot epoch is below it, and there is room above for those to come."""
_LONGEST = 1024
"""Bytes of a file that can be one."""
_FORMAT = re.compile(
    rb"(p2pkv boot epoch\nversion=1\nnode=([^\n]+)\nboot=([0-9]{1,19})\n)check=([0-9a-f]{16})\n"
)


class BootFile:
    """Reads and writes one file. Thread-safe."""

    def __init__(self, folder: str, node_id: str, *, makes_parents: bool = False) -> None:
        self.path = Path(f"{os.path.abspath(folder)}.boot")
        self._node_id = node_id
        self._makes_parents = makes_parents
        self._lock = (
            threading.Lock()
        )  # held while a thread writes, however long the disk takes; guards the next
        self._written = 0
        self._has_warned = False

    def read(self) -> int:
        """Return the boot epoch of the last run, 0 without one. Never raises."""
        found: list[int] = []

        def read() -> None:
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                found.append(self._parse(file.read(_LONGEST)))

        self._within(_WAIT_S, read, "read")
        return found[0] if found else 0

    def write(self, boot_epoch: int) -> None:
        """Remember this one, if the disk can. Never raises."""

        def write() -> None:
            with self._lock:
                if boot_epoch > self._written:
                    self._replace(boot_epoch)
                    self._written = boot_epoch

        self._within(_WAIT_S, write, "written")

    def _within(self, seconds: float, act: Callable[[], None], done: str) -> None:
        """Act on another thread, since a disk may hang; what goes wrong is a warning."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  # the top of a thread
                errors.append(error)

        thread = threading.Thread(target=run, name="p2pkv-boot-file", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._warn(done, f"the disk did not answer within {seconds} s")
        elif errors:
            self._warn(done, errors[0])

    def _warn(self, done: str, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the boot epoch of node %s can't be %s (%s): %s; should the clock be set back, and no peer remember "
                "the last one, the node has a lower one",
                self._node_id,
                done,
                self.path,
                why,
            )

    def _parse(self, text: bytes) -> int:
        match = _FORMAT.fullmatch(text)
        if match is None or match[4].decode() != _check(match[1]):
            raise ValueError("it is damaged, or of another version")
        if match[2] != self._node_id.encode():
            raise ValueError("it is another node's")
        boot_epoch = int(match[3])
        if boot_epoch >= _LARGEST:
            raise ValueError(f"boot epoch {boot_epoch} is beyond every clock")
        return boot_epoch

    def _replace(self, boot_epoch: int) -> None:
        text = f"p2pkv boot epoch\nversion=1\nnode={self._node_id}\nboot={boot_epoch}\n".encode()
        if self._makes_parents:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.path.with_name(f"{self.path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
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


def _check(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()
