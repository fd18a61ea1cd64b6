"""Memory that an engine forgets while its node is being told of it: other memory may lie at its address by then."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import eventually
from p2pkv import Config, Node, SharedRegion, _native
from p2pkv.attach.own_host import SharedMemory
from patience import PATIENCE

KEYS = ["a", "b"]
NBYTES = 64 * 1024
OLD, NEW = 1, 2


class Slow:
    """An attachment of which the test decides when its node is asked to map memory, and when it has answered."""

    def __init__(self, real: _native.Attachment, *, waits: bool) -> None:
        self._real = real
        self.is_asked, self.may_ask = threading.Event(), threading.Event()
        self.is_answered, self.may_go_on = threading.Event(), threading.Event()
        self.inode = 0
        """Of what was shown."""
        if not waits:
            self.may_ask.set()
            self.may_go_on.set()

    def share(self, nbytes: int, fd: int, timeout: float) -> tuple[int, str]:
        self.is_asked.set()
        assert self.may_ask.wait(20.0 * PATIENCE)
        self.inode = os.fstat(fd).st_ino
        answer = self._real.share(nbytes, fd, timeout)
        self.is_answered.set()
        assert self.may_go_on.wait(20.0 * PATIENCE)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Place:
    """A host's node that comes and goes, an engine, and an address at which it has shared memory."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.host = self._start_host()
        self.engine = Node.start(Config(node_id="engine", attach=path))
        self.own_host = self.engine._parts.own_host
        self.lives: list[Slow] = []
        self._are_slow: list[bool] = []
        self.own_host._open = self._open
        self.rows = np.full((len(KEYS), NBYTES), NEW, np.uint8)
        self.region: SharedRegion | None = SharedRegion.create(self.rows.nbytes)
        self.region.array[:] = OLD
        # The region's bytes were at this address once, before these rows came to be there.
        self.memory = SharedMemory(self.rows.ctypes.data, self.rows.nbytes, self.region.fd)

    def _start_host(self) -> Node:
        return Node.start(Config(node_id="host", attach_listen=self._path, pool_size="4MiB"))

    def _open(self, *given: Any, **named: Any) -> Slow:
        real = _native.Attachment.open(*given, **named)
        self.lives.append(Slow(real, waits=self._are_slow.pop(0)))
        return self.lives[-1]

    def start_another_host(self, *, is_slow: bool) -> Slow:
        """Return the engine's attachment to it, as soon as its node is to be asked to map what is shared."""
        self.host.close()
        self._are_slow.append(is_slow)
        n_before = len(self.lives)
        self.host = self._start_host()
        eventually(lambda: len(self.lives) > n_before, 20.0)
        assert self.lives[-1].is_asked.wait(20.0 * PATIENCE)
        return self.lives[-1]

    def mapped(self) -> float:
        """Return how many bytes of engines the node has mapped."""
        return self.host.counters()["p2pkv_attached_memory_bytes"]

    def check_bytes(self) -> None:
        """Publish the rows, and look at what the node serves."""
        served = np.zeros_like(self.rows)
        self.host.register_memory(served)
        self.engine.register_memory(self.rows)
        assert self.engine.publish(KEYS, self.rows, timeout=20.0 * PATIENCE).all()
        assert self.host.fetch(KEYS, served, timeout=20.0 * PATIENCE).all()
        assert np.unique(served).tolist() == [NEW]

    def close(self) -> None:
        for life in self.lives:
            life.may_ask.set()
            life.may_go_on.set()
        self.engine.close()
        self.host.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    tmp_path.chmod(0o700)
    place = Place(f"unix:{tmp_path}/s")
    yield place
    place.close()


@pytest.mark.parametrize("when", ["before it is asked", "after it has answered"])
def test_what_is_forgotten_while_the_engine_attaches_again_is_not_published_from(
    place: Place, when: str
) -> None:
    place.own_host.share(place.memory)
    life = place.start_another_host(is_slow=True)
    if when == "before it is asked":
        place.own_host.forget(place.memory)
        life.may_ask.set()
    else:
        life.may_ask.set()
        assert life.is_answered.wait(20.0 * PATIENCE)
        place.own_host.forget(place.memory)
    life.may_go_on.set()
    eventually(lambda: place.own_host.n_attached == 2, 20.0)
    place.check_bytes()


def test_what_is_forgotten_while_it_is_first_told_of_is_not_published_from(place: Place) -> None:
    place.own_host.share(
        SharedMemory(4096, 4096, place.memory.fd)
    )  # so that the new life has something to wait for
    life = place.start_another_host(is_slow=True)
    telling = threading.Thread(target=place.own_host.share, args=(place.memory,))
    telling.start()
    life.may_ask.set()
    eventually(lambda: place.mapped() == 4096 + place.rows.nbytes, 20.0)
    place.own_host.forget(place.memory)
    life.may_go_on.set()
    telling.join(20.0 * PATIENCE)
    eventually(lambda: place.mapped() == 4096, 20.0)
    place.check_bytes()


def test_a_late_answer_of_a_node_that_has_gone_does_not_hide_its_successors(place: Place) -> None:
    place.own_host.share(SharedMemory(4096, 4096, place.memory.fd))
    first = place.start_another_host(is_slow=False)
    eventually(lambda: place.own_host.n_attached == 2, 20.0)
    first.may_go_on.clear()
    first.is_answered.clear()
    telling = threading.Thread(target=place.own_host.share, args=(place.memory,))
    telling.start()
    assert first.is_answered.wait(20.0 * PATIENCE)
    place.start_another_host(is_slow=False)
    eventually(lambda: place.own_host.n_attached == 3, 20.0)
    eventually(lambda: place.mapped() == 4096 + place.rows.nbytes, 20.0)
    first.may_go_on.set()
    telling.join(20.0 * PATIENCE)
    place.own_host.forget(place.memory)
    eventually(lambda: place.mapped() == 4096, 20.0)
    place.check_bytes()


def test_the_node_is_shown_what_was_meant_though_its_descriptor_is_closed_meanwhile(place: Place) -> None:
    assert place.region is not None
    inode = os.fstat(place.region.fd).st_ino
    place.own_host.share(place.memory)
    life = place.start_another_host(is_slow=True)
    place.own_host.forget(place.memory)
    place.region = None  # the descriptor's number is free, and somebody else's next
    others = os.open("/dev/null", os.O_RDONLY)
    life.may_ask.set()
    assert life.is_answered.wait(20.0 * PATIENCE)
    os.close(others)
    assert life.inode == inode


def test_two_memories_at_one_address_are_forgotten_each_by_itself(place: Place) -> None:
    place.own_host.share(place.memory)
    other = SharedMemory(place.memory.address, place.memory.nbytes, place.memory.fd)
    place.own_host.share(other)
    assert place.mapped() == 2 * place.rows.nbytes
    place.own_host.forget(place.memory)
    eventually(lambda: place.mapped() == place.rows.nbytes, 20.0)
    place.own_host.forget(other)
    eventually(lambda: place.mapped() == 0, 20.0)
    place.check_bytes()
