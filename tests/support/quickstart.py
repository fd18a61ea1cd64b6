"""Walks docs/quickstart.md as it stands, in one shell: what it says is printed is printed.

A module for tests, and a program for whoever has installed p2pkv: ``python quickstart.py PAGE FOLDER`` walks all of it
in ``FOLDER``, which has the wheel in ``dist/``; it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from p2pkv.testing.ports import free_port

_WHOLE = ("bash", "bash", "bash", "bash", "bash", "python", "python", "bash", "bash", "bash", "bash")
"""The page's blocks: install, doctor, demo, nodes, status, writer, reader, both, kill, the wrong secret, the end."""
_PATIENCE_S = 90.0


class Shell:
    """A bash in a folder that is its home too; ``run`` returns what a block of the page printed there."""

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=home,
            env={**environ, "HOME": str(home), "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, block: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{block}\necho END-OF-BLOCK\n")
        self._process.stdin.flush()
        return "".join(iter(self._process.stdout.readline, "END-OF-BLOCK\n"))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Walk:
    """One walk through the page; ports are others than the page's, so that nobody else's cluster is met."""

    def __init__(self, page: Path, home: Path, environ: Mapping[str, str]) -> None:
        text = page.read_text()
        self._metrics = f"127.0.0.1:{free_port()}"
        ports = {"127.0.0.1:7400": f"127.0.0.1:{free_port()}", "7480": self._metrics.partition(":")[2]}
        for old, new in ports.items():
            text = text.replace(old, new)
        blocks = re.findall(r"^```(bash|python)\n(.*?)^```", text, re.S | re.M)
        assert tuple(kind for kind, _ in blocks) == _WHOLE, [kind for kind, _ in blocks]
        self._blocks = [block for _, block in blocks]
        self._home = home
        self._shell = Shell(home, environ)

    def install(self) -> None:
        self._shell.run(self._blocks[0])

    def go(self) -> None:
        """Do all that comes after the installation."""
        _, doctor, demo, nodes, status, writer, reader, both, kill, wrong, end = self._blocks
        run = self._shell.run
        assert "transport shm" in run(doctor)
        assert "token for token" in run(demo)
        run(nodes)
        _eventually(lambda: "3 of 3 known nodes of cluster p2pkv are alive" in run(status))
        _eventually(lambda: self._members() == {"a": "alive", "b": "alive", "c": "alive"})
        assert "<title>p2pkv</title>" in self._get("/")
        for name, program in (("writer.py", writer), ("reader.py", reader)):
            (self._home / name).write_text(program)
        said = run(both)
        expected = (
            "found: [1] bytes: [7 7 7 7] from: [PeerTraffic(node_id='writer', transport='shm', n_pages="
        )
        _eventually(lambda: expected in said or expected in self._log("reader"))
        said = run(kill)
        reason = "page 'a page' in namespace 'default' is not there: who had it is no member any more, or was restarted"
        _eventually(lambda: reason in said or reason in run(kill.splitlines()[-1]))
        assert self._log("reader").splitlines()[-1].startswith("found: [0]")
        _eventually(lambda: self._members().get("writer") == "dead")
        key = urllib.parse.quote("a page")
        assert reason in json.loads(self._get(f"/explain.json?key={key}"))["lines"][0]
        _eventually(lambda: {"peer_lost", "not_found"} <= self._misses("reader"))
        alone = run(wrong)
        assert "something speaks ZMQ there, but does not let us in; is secret_file the cluster's?" in alone
        refused = "whoever connects there has another secret, or none"
        _eventually(lambda: any(refused in self._log(node) for node in "abc"))
        run(end)

    def close(self) -> None:
        self._shell.close()

    def _log(self, name: str) -> str:
        return (self._home / f"{name}.log").read_text()

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._metrics}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def _members(self) -> dict[str, str]:
        """What the page shows of every member."""
        return {
            member["node_id"]: member["state"].lower()
            for member in json.loads(self._get("/cluster.json"))["members"]
        }

    def _misses(self, node: str) -> set[str]:
        counted = json.loads(self._get("/cluster.json"))["counters"].get(node, {}).items()
        return {
            match[1]
            for name, value in counted
            if (match := re.fullmatch(r'p2pkv_missed_pages_total\{reason="(\w+)"\}', name)) and value
        }


def _eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, "what the page says did not come about"
        time.sleep(0.2)


def main() -> None:
    page, home = (Path(argument).resolve() for argument in sys.argv[1:])
    walk = Walk(page, home, {"PATH": os.environ["PATH"], **_package_sources()})
    try:
        walk.install()
        walk.go()
    finally:
        walk.close()
    print(f"ok: {page.name}, walked in {home}", flush=True)


def _package_sources() -> dict[str, str]:
    """Where pip has packages from, on machines that say so in the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


if __name__ == "__main__":
    main()
