"""Two nodes joined by two network ports and a control network: one port at a time is cut, and no page is missed.

In network namespaces, so that the kernel's own TCP meets cables that lose packets without a word.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import NodeProcess, eventually
from p2pkv.testing.processes import ChildProcess

WORKER = Path(__file__).parents[1] / "support/node_worker.py"
NOWHERE = "02:de:ad:00:00:02"
PAGE, N = 64 << 10, 64
KEYS = [f"page-{i}" for i in range(N)]
ROUNDS = int(os.environ.get("P2PKV_TEST_RAIL_ROUNDS", "4"))
DEADLINE = 5.0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"'{' '.join(command)}' failed: {done.stderr.strip()}"


class Cables:
    """Two places, "a" and "b", and three cables: r0 for the control plane, r1 and r2 for data."""

    def __init__(self) -> None:
        self._prefix = f"p2pkv-rails-{os.getpid()}"
        self._undo = ExitStack()
        for place in "ab":
            _run("ip", "netns", "add", self._name(place))
            self._undo.callback(subprocess.run, ["ip", "netns", "del", self._name(place)])
            _run("ip", "-n", self._name(place), "link", "set", "lo", "up")
        for cable in range(3):
            peer = ("peer", "name", f"r{cable}", "netns", self._name("b"))
            _run("ip", "link", "add", f"r{cable}", "netns", self._name("a"), "type", "veth", *peer)
            for place in "ab":
                self._ip(place, "addr", "add", f"{self.address(place, cable)}/24", "dev", f"r{cable}")
                self._ip(place, "link", "set", f"r{cable}", "up")

    def _name(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def _ip(self, place: str, *arguments: str) -> None:
        _run("ip", "-n", self._name(place), *arguments)

    @staticmethod
    def address(place: str, cable: int) -> str:
        return f"10.85.{cable}.{'ab'.index(place) + 1}"

    def inside(self, place: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._name(place)}", "--"]

    def cut(self, how: str, cable: int) -> None:
        """Let what one side sends vanish, or pull the plug out."""
        if how == "unplugged":
            self._ip("a", "link", "set", f"r{cable}", "down")
            return
        source, target = ("a", "b") if how == "answers vanish" else ("b", "a")
        entry = (self.address(target, cable), "lladdr", NOWHERE, "dev", f"r{cable}", "nud", "permanent")
        self._ip(source, "neigh", "replace", *entry)

    def heal(self, how: str, cable: int) -> None:
        if how == "unplugged":
            self._ip("a", "link", "set", f"r{cable}", "up")
            return
        source, target = ("a", "b") if how == "answers vanish" else ("b", "a")
        self._ip(source, "neigh", "del", self.address(target, cable), "dev", f"r{cable}")

    def close(self) -> None:
        self._undo.close()


class Placed(NodeProcess):
    """A node at one of the places."""

    def __init__(self, cables: Cables, place: str, secret: Path) -> None:
        self.node_id = place
        ChildProcess.__init__(self, [*cables.inside(place), sys.executable, str(WORKER)], name=place)
        rails = {"tcp": {"addresses": [cables.address(place, cable) for cable in (1, 2)]}}
        config = {
            "node_id": place,
            "listen": f"{cables.address(place, 0)}:7083",
            "join": [f"{cables.address('a', 0)}:7083"],
            "secret_file": str(secret),
            "transports": ["tcp"],
            "transport_options": rails,
            "pool_size": "16MiB",
            "deadline": DEADLINE,
        }
        self.settings = {"config": config}

    def bytes_over(self, rail: int) -> float:
        name = f'p2pkv_rail_bytes_total{{transport="tcp",rail="{rail}"}}'
        return float(self.call("counters").get(name, 0))


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"'{program}' is not there"
    name = f"p2pkv-rails-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@pytest.fixture
def cables() -> Iterator[Cables]:
    if missing := _missing():
        pytest.skip(missing)
    cables = Cables()
    yield cables
    cables.close()


def _fetch(reader: NodeProcess) -> float:
    answer = reader.call("fetch", keys=KEYS, nbytes=PAGE, timeout=DEADLINE)
    missed = {name: n for name, n in reader.call("counters").items() if "missed" in name or "rail_" in name}
    assert answer["hits"] == [1] * N, f"after {answer['seconds']:.3f} s: {missed}"
    assert answer["wrong"] == []
    return float(answer["seconds"])


@pytest.mark.timeout(300)
def test_a_rail_that_is_cut_costs_no_page(cables: Cables, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    owner, reader = Placed(cables, "a", secret), Placed(cables, "b", secret)
    try:
        owner.start()
        reader.start()
        eventually(lambda: len(reader.call("members")) == 2, 10.0)
        assert owner.call("publish", keys=KEYS, nbytes=PAGE) == [1] * N
        usual, healing = [], []
        for number in range(ROUNDS):
            how, rail = ("answers vanish", "requests vanish", "unplugged")[number % 3], number % 2

            def all_carry() -> bool:
                before = [reader.bytes_over(each) for each in (0, 1)]
                usual.append(_fetch(reader))
                return all(reader.bytes_over(each) > before[each] for each in (0, 1))

            if number % 4 < 3:  # else the other one has just been healed
                eventually(all_carry, 60.0)
            cables.cut(how, 1 + rail)
            healing.append(_fetch(reader))
            _fetch(reader)
            cables.heal(how, 1 + rail)
        counters = reader.call("counters")
        given_up = sum(n for name, n in counters.items() if name.startswith("p2pkv_rail_failures_total"))
        assert given_up >= ROUNDS / 2
        usual.sort()
        healing.sort()
        print(
            f"a fetch takes {usual[len(usual) // 2] * 1e3:.1f} ms, one that meets a cut rail "
            f"{healing[len(healing) // 2] * 1e3:.1f} ms, the longest of {ROUNDS} {healing[-1] * 1e3:.1f} ms"
        )
    finally:
        reader.close()
        owner.close()
