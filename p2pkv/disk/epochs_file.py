"""The epochs of namespaces that a node with a disk knows, kept beside its store.

What is on its disk was published in them: without the file a node that is the first of its cluster to start finds none
of that. Peers tell it as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from p2pkv._native import NamespaceEpochs
from p2pkv.disk.small_file import SmallFile

_LINE = re.compile(rb"([0-9a-f]{32})=([0-9]{1,19})\n")
_LONGEST = 1024 + 53 * (NamespaceEpochs.MOST + 1)


class EpochsFile:
    """Reads and writes one file. Thread-safe."""

    def __init__(self, folder: str, node_id: str, *, makes_parents: bool = False) -> None:
        self._file = SmallFile(
            f"{folder}.epochs",
            "namespace epochs",
            node_id,
            "should no peer remember them, what is on this node's disk is not found any more",
            longest=_LONGEST,
            makes_parents=makes_parents,
        )
        self.path = self._file.path

    def read(self, known: NamespaceEpochs) -> None:
        """Raise what the last run knew. Never raises."""
        self._file.read(lambda lines: known.raise_to(_parse(lines)))

    def write(self, known: Callable[[], Sequence[tuple[bytes, int]]], wait_s: float | None = None) -> bool:
        """Remember what is ``known`` by the time that the disk takes it, as soon as it can. Never raises.

        Returns whether the disk has answered, for which it is waited for a moment, or for ``wait_s`` seconds.
        """

        def lines() -> bytes:
            return b"".join(f"{name.hex()}={epoch}\n".encode() for name, epoch in known())

        return self._file.write(lines, wait_s)

    def close(self) -> None:
        """Try no more to write what the disk did not take. Idempotent."""
        self._file.close()


def _parse(lines: bytes) -> list[tuple[bytes, int]]:
    found = _LINE.findall(lines)
    if b"".join(b"%b=%b\n" % line for line in found) != lines:
        raise ValueError("it is damaged, or of another version")
    return [(bytes.fromhex(name.decode()), int(epoch)) for name, epoch in found]
