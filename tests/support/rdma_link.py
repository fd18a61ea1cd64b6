"""The guest's RDMA resources and cables, as the kernel knows them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

MAC = {"veth0": "02:00:0a:4d:00:01", "veth1": "02:00:0a:4d:00:02"}
NOBODY = "02:00:00:00:00:99"


def count(kind: str, pid: int) -> int:
    """Return how many queue pairs (``qp``), regions (``mr``) or completion queues (``cq``) a process has."""
    told = subprocess.run(
        ["rdma", "-j", "resource", "show", kind], capture_output=True, text=True, check=True
    )
    # what a thread makes is its own, by the kernel's account
    threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    return sum(entry.get("pid") in threads for entry in json.loads(told.stdout or "[]"))


def resources(pid: int) -> dict[str, int]:
    """Return the numbers of everything a process holds of the devices."""
    return {kind: count(kind, pid) for kind in ("qp", "mr", "cq", "pd")}


@contextmanager
def black_hole(device: str, address: str) -> Iterator[None]:
    """Have what ``device`` sends to ``address`` vanish, as behind a dead switch: ports stay up."""
    owner = "veth0" if address.endswith(".1") else "veth1"
    _neighbour(device, address, NOBODY)
    try:
        yield
    finally:
        _neighbour(device, address, MAC[owner])


def _neighbour(device: str, address: str, mac: str) -> None:
    subprocess.run(
        ["/sbin/ip", "neigh", "replace", address, "dev", device, "lladdr", mac, "nud", "permanent"],
        check=True,
    )


def n_received(device: str) -> int:
    """Return how many packets an RDMA device has received."""
    with open(f"/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts") as counter:
        return int(counter.read())
