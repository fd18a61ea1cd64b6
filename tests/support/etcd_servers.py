"""A real etcd of one or three members, on ports of loopback, which a test starts, harms and stops."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster import eventually
from p2pkv.testing.ports import free_port

READY_S = 30.0

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None or shutil.which("etcdctl") is None,
    reason="no etcd is installed; `tools/system-packages python3 etcd` installs Debian's",
)


class EtcdServers:
    """Members ``m0``... in ``folder``.

    ``tls`` are the flags of their certificates, and ``client_flags`` those of ``etcdctl``.
    """

    def __init__(
        self, folder: Path, n_members: int = 3, *, tls: Sequence[str] = (), client_flags: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._tls = tuple(tls)
        self._scheme = "https" if tls else "http"
        self._ports = [(free_port(), free_port()) for _ in range(n_members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._client_flags = tuple(client_flags)
        for index in range(n_members):
            self.start(index)
        self.await_ready()

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{client}" for client, _ in self._ports]

    @property
    def url(self) -> str:
        return f"etcd{'s' if self._tls else ''}://{','.join(self.addresses)}"

    @property
    def up(self) -> list[int]:
        return sorted(self._processes)

    def start(self, index: int) -> None:
        """Start a member, again if it was killed: its data are still there."""
        client, peer = self._ports[index]
        members = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports))
        flags = {
            "name": f"m{index}",
            "data-dir": str(self._folder / f"m{index}"),
            "listen-client-urls": f"{self._scheme}://127.0.0.1:{client}",
            "advertise-client-urls": f"{self._scheme}://127.0.0.1:{client}",
            "listen-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
            "initial-cluster": members,
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "log-level": "error",
            "auth-token-ttl": "3",
        }
        with (self._folder / f"m{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                ["etcd", "--unsafe-no-fsync", *(f"--{k}={v}" for k, v in flags.items()), *self._tls],
                stdout=log,
                stderr=log,
            )

    def kill(self, index: int) -> None:
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def pause(self, index: int) -> None:
        self._processes[index].send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self._processes[index].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for index in self.up:
            self.kill(index)

    def await_ready(self) -> None:
        assert eventually(lambda: self.leader() is not None, READY_S), self.logs()

    def leader(self) -> int | None:
        """Return the member that leads, or None while nobody is known to."""
        for index in self.up:
            try:
                status = self._status(index)
            except (OSError, subprocess.SubprocessError, ValueError):
                continue
            own, leads = status["header"]["member_id"], status.get("leader", 0)
            if own == leads:
                return index
        return None

    def ctl(self, *arguments: str, flags: Sequence[str] = (), stdin: bytes | None = None) -> str:
        """Run ``etcdctl`` and return what it says."""
        endpoints = [self.addresses[index] for index in self.up]
        return self._run(endpoints, [*flags, *arguments], stdin)

    def revision(self) -> int:
        """Return that of the newest change."""
        return int(self._status(self.up[0])["header"]["revision"])

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._folder.glob("m*.log")))

    def _status(self, index: int) -> dict[str, Any]:
        said = self._run([self.addresses[index]], ["endpoint", "status", "-w", "json"])
        found: dict[str, Any] = json.loads(said)[0]["Status"]
        return found

    def _run(self, endpoints: Sequence[str], arguments: Sequence[str], stdin: bytes | None = None) -> str:
        where = ",".join(f"{self._scheme}://{address}" for address in endpoints)
        return subprocess.run(
            ["etcdctl", f"--endpoints={where}", *self._client_flags, *arguments],
            env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin:/usr/local/bin"},
            input=stdin,
            check=True,
            capture_output=True,
            timeout=30,
        ).stdout.decode(errors="surrogateescape")
