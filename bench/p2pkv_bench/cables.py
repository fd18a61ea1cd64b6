"""Two places joined by cables that can be cut: network namespaces and veth pairs. Needs root and iproute2."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from contextlib import ExitStack

from p2pkv_bench.errors import BenchError
from p2pkv_bench.holding import Holding

CUTS = ("unplugged", "answers vanish", "requests vanish")
"""How a cable is cut: out of the owner's port, or such that what one side sends is lost without a word."""
_NOWHERE = "02:de:ad:00:00:02"
_numbers = itertools.count()


def unavailable() -> str | None:
    """Return why no cables can be made here, None if they can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"'{program}' is not there"
    try:
        Cables(1).close()
    except BenchError as error:
        return str(error)
    return None


class Cables(Holding):
    """Places "a" and "b", and ``n`` cables ``r0``, ``r1``.. between them. Undone by :meth:`close`."""

    def __init__(self, n: int) -> None:
        self._prefix = f"p2pkv-rails-{os.getpid()}-{next(_numbers)}"
        self._undo = ExitStack()
        try:
            for place in "ab":
                _run("ip", "netns", "add", self._name(place))
                self._undo.callback(_run, "ip", "netns", "del", self._name(place))
                self._ip(place, "link", "set", "lo", "up")
            for cable in range(n):
                peer = ("peer", "name", f"r{cable}", "netns", self._name("b"))
                _run("ip", "link", "add", f"r{cable}", "netns", self._name("a"), "type", "veth", *peer)
                for place in "ab":
                    self._ip(place, "addr", "add", f"{self.address(place, cable)}/24", "dev", f"r{cable}")
                    self._ip(place, "link", "set", f"r{cable}", "up")
        except BaseException:
            self.close()
            raise

    def _name(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def _ip(self, place: str, *arguments: str) -> None:
        _run("ip", "-n", self._name(place), *arguments)

    @staticmethod
    def address(place: str, cable: int) -> str:
        """Return the IPv4 address of a place on a cable."""
        return f"10.85.{cable}.{'ab'.index(place) + 1}"

    def inside(self, place: str) -> list[str]:
        """Return what comes before a command that is to run at a place; the process keeps its id."""
        return ["nsenter", f"--net=/run/netns/{self._name(place)}", "--"]

    def cut(self, how: str, cable: int) -> None:
        """Cut a cable in one of the ways of ``CUTS``. Place "a" is the owner's."""
        if how == "unplugged":
            self._ip("a", "link", "set", f"r{cable}", "down")
            return
        source, target = ("a", "b") if how == "answers vanish" else ("b", "a")
        entry = (self.address(target, cable), "lladdr", _NOWHERE, "dev", f"r{cable}", "nud", "permanent")
        self._ip(source, "neigh", "replace", *entry)

    def heal(self, how: str, cable: int) -> None:
        """Undo :meth:`cut`."""
        if how == "unplugged":
            self._ip("a", "link", "set", f"r{cable}", "up")
            return
        source, target = ("a", "b") if how == "answers vanish" else ("b", "a")
        self._ip(source, "neigh", "del", self.address(target, cable), "dev", f"r{cable}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"'{' '.join(command)}' failed: {done.stderr.strip()}")
