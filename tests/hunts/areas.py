"""Memory of nodes for hunts, in rows whose every byte is known; once closed it is somebody else's at once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fake_cuda import fake_cuda
from hunts.frame import Broken
from p2pkv import Node, _native

ROW = 16 * 1024
POISON = 0xDEAD_0000_0000_0001
"""What is written over closed memory; no row that is offered holds it."""

_PROT_NONE = 0  # which mmap has no name for
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Area:
    """Registered memory of one node: ``n_rows`` rows, each all of one 64-bit value. Every method is thread-safe.

    ``kind`` is "host", "shared" (which shm reads) or "device". Host memory that is closed can't be touched by anybody:
    whoever does crashes the process, which is a finding.
    """

    def __init__(self, node: Node, kind: str, n_rows: int) -> None:
        self.kind = kind
        self.n_rows = n_rows
        self._node = node
        self._nbytes = n_rows * ROW
        self._lock = threading.Lock()  # guards all below, and is held while the bytes are looked at
        self._is_open = False
        self._is_barred = False
        self._lives = 0
        self._values = [POISON] * n_rows
        self._lent: set[int] = set()  # rows that may hold anything while this is open
        self._owner: Any = None
        if kind == "device":
            # of the kind that cuda_ipc can map within a process
            self.address = fake_cuda().allocate(self._nbytes, virtual=True)
        elif kind == "shared":
            self._owner = _native.SharedRegion.create(self._nbytes)
            self.address = self._owner.address
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self.address = _libc.mmap(None, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        for row in range(n_rows):
            self._write(row, POISON)
        self.open()

    def open(self) -> None:
        """Register it, again if it was closed; what was written over it must still be there."""
        self.unbar()
        self.check()
        self._memory = self._node.register_address(self.address, self._nbytes, self._owner, readable=True)
        with self._lock:
            self._is_open = True

    def close(self, *, bar: bool) -> None:
        """Close it, and at once give it to somebody else: it is written over, and with ``bar`` nobody's any more."""
        self._memory.close()
        with self._lock:
            self._is_open = False
            self._lives += 1
            for row in range(self.n_rows):
                self._write(row, POISON)
            if bar and self.kind == "host":
                self._is_barred = True
                _libc.mprotect(self.address, self._nbytes, _PROT_NONE)

    def unbar(self) -> None:
        """Let what was barred be looked at again."""
        with self._lock:
            if self._is_barred:
                _libc.mprotect(self.address, self._nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            self._is_barred = False

    @property
    def is_open(self) -> bool:
        with self._lock:
            return self._is_open

    @property
    def life(self) -> int:
        """Another number after each closing: what was known of the rows before does not count any more."""
        with self._lock:
            return self._lives

    def spans(self, first: int, n: int) -> NDArray[np.int64]:
        rows = np.arange(first, first + n, dtype=np.int64)
        return np.stack([self.address + rows * ROW, np.full(n, ROW, np.int64)], axis=1)

    def fill(self, row: int, value: int) -> bool:
        """Take a row back: nobody else may write to it from now on. False: it is closed, and not to be filled."""
        with self._lock:
            self._lent.discard(row)
            if self._is_open:
                self._write(row, value)
            return self._is_open

    def lend(self, row: int) -> None:
        """From now on the row may hold anything."""
        with self._lock:
            self._lent.add(row)

    def holds(self, row: int, value: int, life: int) -> bool:
        """Say whether all of a row is of this value, if it is still in that life."""
        with self._lock:
            return life != self._lives or bool((self._read(row) == value).all())

    def check(self) -> None:
        """Raise `Broken` if a row that nobody may write to was written to."""
        with self._lock:
            rows = [] if self._is_barred else range(self.n_rows)
            for row in rows:
                is_lent = self._is_open and row in self._lent
                if is_lent or (self._read(row) == self._values[row]).all():
                    continue
                found = ", ".join(sorted({hex(int(word)) for word in self._read(row)})[:3])
                state = "open" if self._is_open else "closed"
                raise Broken(
                    f"row {row} of {state} {self.kind} memory is {found} instead of {self._values[row]:#x}"
                )

    def free(self) -> None:
        """Give the memory back. Its node is closed."""
        if self.kind == "device":
            fake_cuda().free(self.address)
        elif self.kind == "host":
            _libc.munmap(self.address, self._nbytes)
        self._owner = None
        with contextlib.suppress(AttributeError):
            del self._memory

    def _write(self, row: int, value: int) -> None:
        words = np.full(ROW // 8, value, np.uint64)
        if self.kind == "device":
            fake_cuda().write(self.address + row * ROW, words.view(np.uint8))
        else:
            ctypes.memmove(self.address + row * ROW, words.ctypes.data, ROW)
        self._values[row] = value

    def _read(self, row: int) -> NDArray[np.uint64]:
        address = self.address + row * ROW
        if self.kind == "device":
            return fake_cuda().read(address, ROW).view(np.uint64)
        return np.frombuffer(ctypes.string_at(address, ROW), np.uint64)
