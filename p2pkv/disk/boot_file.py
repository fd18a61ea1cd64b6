"""The last boot epoch of a node, kept beside its store: so that a clock that was set back can't give it a lower one.

Peers remember it as well; the file counts where none of them does.
"""

from __future__ import annotations

import re
import threading

from p2pkv.disk.small_file import SmallFile

_LARGEST = 1 << 62
"""A boot epoch is below it, and there is room above for those to come."""
_LONGEST = 1024
_BOOT = re.compile(rb"boot=([0-9]{1,19})\n")


class BootFile:
    """Reads and writes one file. Thread-safe."""

    def __init__(self, folder: str, node_id: str, *, makes_parents: bool = False) -> None:
        self._file = SmallFile(
            f"{folder}.boot",
            "boot epoch",
            node_id,
            "should the clock be set back, and no peer remember the last one, the node has a lower one",
            longest=_LONGEST,
            makes_parents=makes_parents,
        )
        self.path = self._file.path
        self._lock = threading.Lock()  # guards the next
        self._highest = 0

    def read(self) -> int:
        """Return the boot epoch of the last run, 0 without one. Never raises."""
        found: list[int] = []
        self._file.read(lambda lines: found.append(_parse(lines)))
        return found[0] if found else 0

    def write(self, boot_epoch: int) -> None:
        """Remember this one unless a higher one is, as soon as the disk can. Never raises."""
        with self._lock:
            self._highest = max(boot_epoch, self._highest)
        self._file.write(self._lines)

    def _lines(self) -> bytes:
        with self._lock:
            return f"boot={self._highest}\n".encode()

    def close(self) -> None:
        """Try no more to write what the disk did not take. Idempotent."""
        self._file.close()


def _parse(lines: bytes) -> int:
    match = _BOOT.fullmatch(lines)
    if match is None:
        raise ValueError("it is damaged, or of another version")
    boot_epoch = int(match[1])
    if boot_epoch >= _LARGEST:
        raise ValueError(f"boot epoch {boot_epoch} is beyond every clock")
    return boot_epoch
