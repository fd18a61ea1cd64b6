"""Whose memfd memory is: what an engine registers can be shared if its mapping begins where the memfd does."""

from __future__ import annotations

import os
from pathlib import Path

from p2pkv._native import SharedRegion
from p2pkv.transports.base import FdBacked


def begins_memfd(fd: int, address: int, nbytes: int) -> bool:
    """Whether the ``nbytes`` at ``address`` are the beginning of what ``fd`` leads to, mapped shared.

    Asked of the kernel, since an owner may be wrong about its own descriptor, and other bytes would be published then.
    """
    info = os.fstat(fd)
    end = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, mode, offset, device, inode = line.split(maxsplit=5)[:5]
        first, last = (int(number, 16) for number in extent.split("-"))
        if not first <= end < last:
            continue
        major, minor = (int(number, 16) for number in device.split(":"))
        if mode[3] != "s" or int(inode) != info.st_ino or os.makedev(major, minor) != info.st_dev:
            return False
        if int(offset, 16) + end - first != end - address:
            return False
        end = last
        if end >= address + nbytes:
            return True
    return False


def descriptor_of(owner: object, address: int, nbytes: int) -> int | None:
    """Return the descriptor of a memfd that begins with this memory, if ``owner`` has one; None: it can't be shared."""
    if isinstance(owner, SharedRegion):
        return owner.fd if owner.address == address and nbytes <= owner.nbytes else None
    if not isinstance(owner, FdBacked) or not begins_memfd(owner.fd, address, nbytes):
        return None
    return owner.fd
