"""A node in a process of its own, told what to do in JSON lines on stdin, answering in JSON lines on stdout."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import random
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import pages
import patience  # noqa: F401  (this process has it too)
from device_buffers import KINDS, DeviceBuffer
from fake_cuda import fake_cuda
from p2pkv import Config, Node, Outcome, SharedRegion, _native
from p2pkv.memory.registered import Memory
from p2pkv.testing.lateness import Lateness
from p2pkv.testing.processes import obey, say
from p2pkv.transfers import Grant, Offer, RowStatus
from p2pkv.transports.base import Transport
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.native import ShmTransport, TcpTransport
from p2pkv.transports.ucx import UcxTransport
from p2pkv.transports.verbs import VerbsTransport
from row_churn import Notes, offer_rows, take_rows
from transfer_pair import spans_of


class Worker:
    """``seconds`` in its answers is how long a call took, without what this machine was late by."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.device: DeviceBuffer | None = None
        self.device_memory: Memory | None = None
        self.handles: dict[str, Offer | Grant] = {}
        self.watched = Lateness()
        self.team: _native.CopyTeam | None = None

    def start(
        self,
        config: dict[str, Any],
        memory: int = 16 << 20,
        sabotage: str = "",
        readable: bool = False,
        device: str = "",
        shares_copies: bool = False,
        in_memfd: bool = False,
    ) -> dict[str, Any]:
        """Start the node; with a kind of ``device`` memory it transfers from and to that.

        ``in_memfd``: its memory is one that other processes can map.
        """
        if shares_copies:
            self.team = _native.CopyTeam(always=True)
        extra = _sabotaged(sabotage, config["transports"][0]) if sabotage else []
        self.node = Node.start(Config.load(config, environ={}), extra_transports=extra)
        if in_memfd:
            region = SharedRegion.create(memory)
            self.memory = region.array
            self.node.register_address(region.address, region.nbytes, region, readable=readable)
        else:
            self.memory = np.zeros(memory, np.uint8)
            self.node.register_memory(self.memory, readable=readable)
        for name in self.node.config.tenants_by_name:
            self.node.tenant(name).register_memory(self.memory)
        if device:
            self.device = KINDS[device](memory)
            self.device_memory = self.node.register_memory(self.device.array, readable=readable)
        return {"address": self.node.address, "pid": os.getpid()}

    def _rows(self, n_pages: int, nbytes: int) -> NDArray[np.uint8]:
        return self.memory[: n_pages * nbytes].reshape(n_pages, nbytes)

    def _write(self, data: NDArray[np.uint8] | int, n: int, nbytes: int) -> NDArray[np.int64]:
        """Set what is transferred from or to; return its spans."""
        rows = self._rows(n, nbytes)
        rows[:] = data
        spans = spans_of(rows)
        if self.device is not None:
            self.device.write(rows)
            spans[:, 0] += self.device.address - self.memory.ctypes.data
        return spans

    def _read(self, n: int, nbytes: int) -> NDArray[np.uint8]:
        if self.device is not None:
            return self.device.read()[: n * nbytes].reshape(n, nbytes)
        return self._rows(n, nbytes)

    def _node(self, tenant: str) -> Node:
        """Return the node, or that of a tenant of it."""
        assert self.node is not None
        return self.node.tenant(tenant) if tenant else self.node

    def publish(self, keys: list[str], nbytes: int, timeout: float = 2.0, tenant: str = "") -> list[int]:
        """Publish pages whose bytes follow from their keys, and of a tenant's from its name as well."""
        rows = self._rows(len(keys), nbytes)
        pages.fill(rows, _of_tenant(tenant, keys))
        return [int(outcome) for outcome in self._node(tenant).publish(keys, rows, timeout=timeout)]

    def fetch(self, keys: list[str], nbytes: int, timeout: float = 2.0, tenant: str = "") -> dict[str, Any]:
        rows = self._rows(len(keys), nbytes)
        rows[:] = 0
        with Lateness() as late:
            outcomes = self._node(tenant).fetch(keys, rows, timeout=timeout)
        return {
            "hits": [int(outcome) for outcome in outcomes],
            "wrong": pages.wrong(rows, _of_tenant(tenant, keys), outcomes),
            "seconds": late.seconds - late.worst,
        }

    def exists(self, keys: list[str], timeout: float = 2.0, tenant: str = "") -> dict[str, Any]:
        with Lateness() as late:
            outcomes = self._node(tenant).exists(keys, timeout=timeout)
        return {"hits": [int(o) for o in outcomes], "seconds": late.seconds - late.worst}

    def retract(self, keys: list[str]) -> list[int]:
        assert self.node is not None
        return [int(outcome) for outcome in self.node.retract(keys)]

    def clear(self) -> int:
        assert self.node is not None
        return self.node.clear()

    def members(self, tenant: str = "") -> list[dict[str, Any]]:
        return [
            {"node_id": m.node_id, "boot_epoch": m.boot_epoch, "state": m.state.name}
            for m in self._node(tenant).members()
        ]

    def offer(self, request: str, n: int, nbytes: int, seed: int, to: str = "", lease: float = 30.0) -> None:
        """Offer, or with ``to`` put, rows that anybody can check who knows ``seed``; keep the handle by ``request``."""
        assert self.node is not None
        spans = self._write(_pattern(n, nbytes, seed), n, nbytes)
        transfers = self.node.transfers
        self.handles[request] = (
            transfers.put_async(to, request, spans, lease=lease)
            if to
            else transfers.offer(request, spans, lease=lease)
        )

    def grant(self, request: str, n: int, nbytes: int, timeout: float, source: str = "") -> None:
        """Grant, or with ``source`` get, rows; keep the handle by ``request``."""
        assert self.node is not None
        spans = self._write(0, n, nbytes)
        transfers = self.node.transfers
        self.handles[request] = (
            transfers.get_async(source, request, spans, timeout=timeout)
            if source
            else transfers.grant(request, spans, timeout=timeout)
        )

    def wait(self, request: str, timeout: float, seed: int = -1, nbytes: int = 0) -> dict[str, Any]:
        """Wait for a handle; with ``seed``, compare the bytes of the rows that are said to be right."""
        with Lateness() as late:
            statuses = self.handles[request].wait(timeout)
        wrong = 0
        if seed >= 0:
            rows = self._read(len(statuses), nbytes)
            expected = _pattern(len(statuses), nbytes, seed)
            wrong = int(((rows != expected).any(axis=1) & (statuses == RowStatus.OK)).sum())
        names = sorted({RowStatus(s).name for s in statuses})
        n_ok = int((statuses == RowStatus.OK).sum())
        return {"statuses": names, "n_ok": n_ok, "seconds": late.seconds - late.worst, "wrong": wrong}

    def free_device(self) -> dict[str, Any]:
        """Close the device memory, and free it; say how long the first took, and whether others mapped it still."""
        assert self.device is not None
        assert self.device_memory is not None
        with Lateness() as late:
            self.device_memory.close()
        before = fake_cuda().counts().freed_while_mapped
        self.device.close()
        return {
            "seconds": late.seconds - late.worst,
            "freed_while_mapped": fake_cuda().counts().freed_while_mapped - before,
        }

    def put_times(self, to: str, n: int, nbytes: int, rounds: int) -> list[float]:
        """Put the same rows to requests "round 0" and so on; return how long each took until they were there."""
        assert self.node is not None
        spans = self._write(_pattern(n, nbytes, 1), n, nbytes)
        times = []
        for i in range(rounds):
            began = time.monotonic()
            statuses = self.node.transfers.put(to, f"round {i}", spans, timeout=30.0)
            times.append(time.monotonic() - began)
            assert not statuses.any(), statuses
        return times

    def copy_times(self, n: int, nbytes: int, rounds: int) -> list[float]:
        """Return the seconds that copies of as many bytes take within the device."""
        assert self.device is not None
        copy = self.device.inner_copier(n * nbytes)
        times = []
        for _ in range(rounds):
            began = time.monotonic()
            copy()
            times.append(time.monotonic() - began)
        return times

    def withdraw(self, request: str) -> None:
        handle = self.handles[request]
        assert isinstance(handle, Offer)
        handle.withdraw()

    def believe_lying_events(self, delay_us: int) -> None:
        """Have copies take a while, and the emulated driver say that they are done."""
        fake_cuda().delay_copies(delay_us)
        fake_cuda().lie_about_events()

    def watch(self) -> None:
        """Begin to watch how late this machine is; :meth:`late` says it."""
        self.watched.__enter__()

    def late(self) -> float:
        return self.watched.worst

    def counters(self, tenant: str = "") -> dict[str, float]:
        return self._node(tenant).counters()

    def hold_gil(self, seconds: float) -> float:
        say({"result": {"holding": True}})
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return time.monotonic() - began

    def drain(self, seconds: float) -> dict[str, Any]:
        assert self.node is not None
        return asdict(self.node.drain(seconds))

    def bump(self) -> int:
        assert self.node is not None
        return self.node.bump().epoch

    def close(self) -> None:
        assert self.node is not None
        self.node.close()
        gc.collect()  # whoever counts what is left means what will stay

    def churn(self, progress: str, sizes: list[int], seed: int, seconds: float, batch: int) -> int:
        """Publish fresh batches for ``seconds``; the number of the next one stands in the file ``progress``.

        A second number there, other than 0, ends it sooner.
        """
        assert self.node is not None
        counter = 0
        with open(progress, "r+b") as file, mmap.mmap(file.fileno(), 16) as shared:
            until = time.monotonic() + seconds
            while time.monotonic() < until and not any(shared[8:]):
                keys, nbytes = _hunted(counter, sizes, seed, batch)
                rows = self._rows(len(keys), nbytes)
                pages.fill(rows, keys)
                if self.device is None:
                    self.node.publish(keys, rows)
                else:
                    self.device.write(rows)
                    self.node.publish(keys, self.device.rows(len(keys), nbytes))
                counter += 1
                shared[:8] = counter.to_bytes(8, "little")
        return counter

    def hunt(
        self, progress: str, sizes: list[int], seed: int, reader: int, hits: int, seconds: float, batch: int
    ) -> dict[str, Any]:
        """Look up recent batches of :meth:`churn`, wait a little, fetch, and check every byte."""
        assert self.node is not None
        rng = random.Random(seed + reader)
        n_hits, bad, n_asked = 0, [], 0
        with open(progress, "rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as shared:
            until = time.monotonic() + seconds
            # One wrong byte says it all: with a safeguard in place that is a failure, without one what was looked for.
            while time.monotonic() < until and n_hits < hits and not bad:
                last = int.from_bytes(shared[:], "little")
                keys, nbytes = _hunted(max(0, last - rng.randrange(1, 12)), sizes, seed, batch)
                there = self.node.exists(keys)
                keys = [key for key, outcome in zip(keys, there, strict=True) if outcome == Outcome.HIT]
                if not keys:
                    continue
                if rng.random() < 0.1:
                    time.sleep(rng.uniform(0, 0.05))
                rows = self._rows(len(keys), nbytes)
                if self.device is None:
                    outcomes = self.node.fetch(keys, rows)
                else:
                    outcomes = self.node.fetch(keys, self.device.rows(len(keys), nbytes))
                    rows = self.device.read(len(keys) * nbytes).reshape(len(keys), nbytes)
                n_asked += len(keys)
                n_hits += int(outcomes.sum())
                bad += pages.wrong(rows, keys, outcomes)
        return {"hits": n_hits, "asked": n_asked, "wrong": bad[:10], "n_wrong": len(bad)}

    def offer_rows(self, peer: str, device: str, notes: str, seed: int, nbytes: int, delay_us: int) -> None:
        """Be the producer of the hunt for torn rows, which overwrites them soon after."""
        offer_rows(self._node(""), KINDS[device], peer, Notes(Path(notes)), seed=seed, nbytes=nbytes)

    def take_rows(
        self, peer: str, device: str, notes: str, seed: int, nbytes: int, delay_us: int
    ) -> dict[str, Any]:
        """Be its consumer, whose copies take ``delay_us`` if the driver is emulated."""
        if delay_us:
            fake_cuda().delay_copies(delay_us)
        return take_rows(self._node(""), KINDS[device], peer, Notes(Path(notes)), seed=seed, nbytes=nbytes)


def _hunted(number: int, sizes: list[int], seed: int, batch: int) -> tuple[list[str], int]:
    """Return the keys of a batch of the hunt, and the size of its pages."""
    nbytes = random.Random(f"{seed}/{number}").choice(sizes)
    return [f"hunt-{number}-{i}" for i in range(batch)], nbytes


def _of_tenant(tenant: str, keys: list[str]) -> list[str]:
    """Return what the bytes of a tenant's pages follow from."""
    return [f"{tenant} {key}" for key in keys] if tenant else keys


def _pattern(n: int, nbytes: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size=(n, nbytes), dtype=np.uint8)


def _sabotaged(fault: str, transport: str) -> list[Transport]:
    built_in: list[type[Transport]] = [ShmTransport, TcpTransport, VerbsTransport, UcxTransport]
    inner = next(way for way in built_in if way.name == transport)()
    return [FaultyTransport(inner, Faults(**{fault: True}))]


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    obey(Worker())


if __name__ == "__main__":
    main()
