"""Memory that an attached engine shares with its host's node."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv.attach.own_host import OwnHost
from p2pkv.attach.sharing import SharingRegistrar
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory

NBYTES = 4096


class Attachment:
    """One to a node that stands still, at which a signal's handler ends the wait the first time."""

    cluster = "default"

    def __init__(self) -> None:
        self.n_asked = 0

    def take_pool(self) -> None:
        """Return nothing: pools are not looked at."""

    def share(self, nbytes: int, fd: int, timeout: float) -> tuple[int, str]:
        self.n_asked += 1
        if self.n_asked == 1:
            raise KeyboardInterrupt
        return self.n_asked, ""

    def use(self, number: int, address: int, nbytes: int) -> None:
        """Take note of nothing."""

    def forget(self, number: int) -> None:
        """Take note of nothing."""

    def close(self) -> None:
        """There is nothing to end."""


class Mapped:
    """Memory with a descriptor of its own."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("memory")
        os.ftruncate(self.fd, NBYTES)
        self._mapping = mmap.mmap(self.fd, NBYTES)
        self.address = np.frombuffer(self._mapping, np.uint8).ctypes.data


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    mapped = Mapped()
    yield mapped
    os.close(mapped.fd)


def test_memory_whose_registration_is_interrupted_is_not_registered_nor_shared(mapped: Mapped) -> None:
    host = OwnHost(
        "/nowhere",
        0,
        lambda attachment, boot: None,
        lambda boot: None,
        open_attachment=lambda *_, **__: Attachment(),  # type: ignore[arg-type]
    )
    registrations = Registrations([])
    registrar = SharingRegistrar(Registrar(registrations, DeviceMemory(registrations, 1 << 20, 0)), host)
    with pytest.raises(KeyboardInterrupt):
        registrar.register_address(mapped.address, NBYTES, mapped, is_readable=False)
    assert not registrations.table.memories
    assert not host._shared, "the next node would be told of it, by a descriptor that is another's by then"
    memory = registrar.register_address(mapped.address, NBYTES, mapped, is_readable=False)
    assert len(host._shared) == 1
    memory.close()
    assert not host._shared
    host.close()
