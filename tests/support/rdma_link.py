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


class SecondCable:
    """One more cable, veth2 to veth3, with a device at each end: rxe2 at 10.78.0.1, rxe3 at 10.78.0.2."""

    ENDS = (("veth2", "10.78.0.1", "02:00:0a:4e:00:01"), ("veth3", "10.78.0.2", "02:00:0a:4e:00:02"))

    def __init__(self) -> None:
        (near, _, near_mac), (far, _, far_mac) = self.ENDS
        peer = ("peer", "name", far, "mtu", "9000", "address", far_mac)
        _ip("link", "add", near, "mtu", "9000", "address", near_mac, "type", "veth", *peer)
        for number, (device, address, _) in enumerate(self.ENDS):
            _ip("addr", "add", f"{address}/24", "dev", device)
            # before the rule that would hand a packet for an own address to lo
            _ip("rule", "add", "pref", str(12 + number), "oif", device, "lookup", str(102 + number))
        self.plug_in()
        for number, (device, _, _) in enumerate(self.ENDS):
            command = ["rdma", "link", "add", f"rxe{2 + number}", "type", "rxe", "netdev", device]
            subprocess.run(command, check=True)

    def plug_in(self) -> None:
        """Bring both ends up; what leads over them went with an end that was down."""
        for device, _, _ in self.ENDS:
            _ip("link", "set", device, "up")
        for number, (device, _, _) in enumerate(self.ENDS):
            _ip("route", "replace", "10.78.0.0/24", "dev", device, "table", str(102 + number))
            for _, address, mac in self.ENDS:
                _ip("neigh", "replace", address, "dev", device, "lladdr", mac, "nud", "permanent")

    def unplug(self) -> None:
        """Take one end down: both ports are, and packets vanish."""
        _ip("link", "set", "veth3", "down")

    def lose_answers(self) -> None:
        """Let what the owner's end sends vanish, as behind a dead switch: ports stay up."""
        _ip("neigh", "replace", "10.78.0.2", "dev", "veth2", "lladdr", NOBODY, "nud", "permanent")


def _ip(*arguments: str) -> None:
    subprocess.run(["/sbin/ip", *arguments], check=True)
