"""docs/quickstart.md, walked as it stands, in one shell: what it says is printed is printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import eventually, free_port

PAGE = Path(__file__).resolve().parents[2] / "docs/quickstart.md"


class Shell:
    """A bash in a home of its own; ``run`` returns what a block of the page printed there."""

    def __init__(self, home: Path) -> None:
        self._port = f"127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=home,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(home),
                "LANG": "C.UTF-8",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, block: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(block.replace("127.0.0.1:7400", self._port) + "\necho END-OF-BLOCK\n")
        self._process.stdin.flush()
        lines = list(iter(self._process.stdout.readline, "END-OF-BLOCK\n"))
        return "".join(lines)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def test_the_quickstart_goes_as_it_says(shell: Shell, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert [kind for kind, _ in blocks] == ["bash", "bash", "bash", "python", "bash"]
    doctor, nodes, status, crossing, wrong = (block for _, block in blocks)
    assert "transport shm" in shell.run(doctor)
    shell.run(nodes)
    all_alive = "3 of 3 known nodes of cluster p2pkv are alive"
    eventually(lambda: all_alive in shell.run(status), 15)
    crossed = shell.run(f"python - <<'PROGRAM'\n{crossing}PROGRAM\n")
    assert "found: [1] bytes: [7 7 7 7] [PeerTraffic(node_id='writer', transport='shm', n_pages=1" in crossed
    alone = shell.run(wrong)
    assert "something speaks ZMQ there, but does not let us in; is secret_file the cluster's?" in alone
    refused = "whoever connects there has another secret, or none"
    eventually(lambda: any(refused in (tmp_path / f"{node}.log").read_text() for node in "abc"), 15)
