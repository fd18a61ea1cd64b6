"""The network of a run: a namespace a place, all of them on one bridge in a namespace of its own.

Needs root and iproute2, and nothing of the kernel but veth and bridges: a way is cut, in one direction, by a neighbour
entry that leads nowhere, so frames vanish silently as on a broken link.
A slow link is a token bucket (``tbf``), and connections are reset by ``ss -K``; where the kernel has not these two,
:meth:`Network.lacks` says so and the faults are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

_NOWHERE = "02:de:ad:00:00:01"
_PREFIX = "p2pkv-chaos"
_NAMES = re.compile(rf"{_PREFIX}-(\d+)-\w+")
_SLOW = ("tbf", "rate", "3mbit", "burst", "16kb", "latency", "300ms")


def unavailable() -> str | None:
    """Return why no network of namespaces can be made here, None if one can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program, package in (("ip", "iproute2"), ("ss", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"'{program}' is not there; install {package}"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    try:
        linked = _try("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        linked = linked or _try("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        return f"no bridge of veth pairs can be made: {linked}" if linked else None
    finally:
        _try("ip", "netns", "del", name)


class Network:
    """``n`` places that reach each other. Cuts are counted, so that faults may overlap. Undone by :meth:`close`."""

    def __init__(self, n: int) -> None:
        _remove_leftovers()
        self._prefix = f"{_PREFIX}-{os.getpid()}"
        self._cuts: Counter[tuple[int, int]] = Counter()
        self.n_places = n
        self._undo = ExitStack()
        try:
            self._make("sw")
            self._ip("sw", "link", "add", "br0", "type", "bridge")
            self._ip("sw", "link", "set", "br0", "up")
            for place in range(n):
                self._add(place)
        except BaseException:
            self.close()
            raise

    def _make(self, what: str) -> None:
        _run("ip", "netns", "add", self._name(what))
        self._undo.callback(_try, "ip", "netns", "del", self._name(what))
        self._ip(what, "link", "set", "lo", "up")

    def _add(self, place: int) -> None:
        self._make(str(place))
        port = f"v{place}"
        peer = ("peer", "name", "eth0", "netns", self._name(str(place)))
        _run("ip", "link", "add", port, "netns", self._name("sw"), "type", "veth", *peer)
        self._ip("sw", "link", "set", port, "master", "br0")
        self._ip("sw", "link", "set", port, "up")
        self._ip(str(place), "addr", "add", f"{self.address(place)}/24", "dev", "eth0")
        self._ip(str(place), "link", "set", "eth0", "up")

    def _name(self, what: str) -> str:
        return f"{self._prefix}-{what}"

    def _ip(self, what: str, *arguments: str) -> None:
        _run("ip", "-n", self._name(what), *arguments)

    def address(self, place: int) -> str:
        """Return the IPv4 address of a place."""
        return f"10.83.0.{place + 1}"

    def inside(self, place: int) -> list[str]:
        """Return what comes before a command that is to run at a place; the process keeps its id."""
        return ["nsenter", f"--net=/run/netns/{self._name(str(place))}", "--"]

    def cut(self, source: int, target: int) -> None:
        """Let what ``source`` sends to ``target`` vanish; the other direction is left as it is."""
        self._cuts[source, target] += 1
        if self._cuts[source, target] == 1:
            entry = (self.address(target), "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
            self._ip(str(source), "neigh", "replace", *entry)

    def heal(self, source: int, target: int) -> None:
        """Undo one :meth:`cut`."""
        self._cuts[source, target] -= 1
        if self._cuts[source, target] == 0:
            # tried only: a cable that was out meanwhile may have taken the entry with it
            where = ("dev", "eth0")
            _try("ip", "-n", self._name(str(source)), "neigh", "del", self.address(target), *where)

    def plug(self, place: int, *, is_in: bool) -> None:
        """Take a place's cable out, as its own kernel sees it too, or put it in again."""
        self._ip("sw", "link", "set", f"v{place}", "up" if is_in else "down")

    def slow(self, place: int, *, is_slow: bool) -> None:
        """Let what a place sends queue up behind 3 Mbit/s, for up to 0.3 s."""
        what = ("add", "dev", "eth0", "root", *_SLOW) if is_slow else ("del", "dev", "eth0", "root")
        _run("tc", "-n", self._name(str(place)), "qdisc", *what)

    def reset(self, place: int, target: int | None = None) -> None:
        """Break off every TCP connection of a place, to ``target`` or to all: both ends see a reset."""
        towards = () if target is None else ("dst", self.address(target))
        _run(*self.inside(place), "ss", "-K", "-t", "state", "established", *towards)

    def lacks(self) -> dict[str, str]:
        """Return the kinds of fault that this kernel can't do, each with the reason."""
        lacking = {}
        if shutil.which("tc") is None:
            lacking["slow"] = "'tc' is not there"
        elif why := _try("tc", "-n", self._name("0"), "qdisc", "add", "dev", "lo", "root", *_SLOW):
            lacking["slow"] = f"tc can't do tbf: {why}"
        else:
            _try("tc", "-n", self._name("0"), "qdisc", "del", "dev", "lo", "root")
        if not _can_reset():
            lacking["reset"] = "'ss -K' ends no connection: the kernel has no INET_DIAG_DESTROY"
        return lacking

    def close(self) -> None:
        """Remove all namespaces, and with them every link."""
        self._undo.close()


def _can_reset() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, server.accept()[0]:
            near.settimeout(0.2)
            _try("ss", "-K", "-t", "dport", "=", str(port))
            try:
                near.recv(1)
            except TimeoutError:
                return False
            except OSError:
                return True
            return True


def _remove_leftovers() -> None:
    """Remove the namespaces of drivers that were killed."""
    for name in sorted(os.listdir("/run/netns")) if Path("/run/netns").is_dir() else []:
        owner = _NAMES.fullmatch(name)
        if owner is not None and not Path(f"/proc/{owner[1]}").exists():
            _try("ip", "netns", "del", name)


def _run(*command: str) -> None:
    """Run a command; its own words are in the exception if it fails."""
    why = _try(*command)
    if why is not None:
        raise OSError(f"'{' '.join(command)}' failed: {why}")


def _try(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else None
