"""The fleet of hosts: on each a node of its own, a keeper of its memory, and engines that attach to it.

A host is a place. Its node has a pool and a part of the directory, and no load; engines have a load, and no pool. Every
other node has a disk as well, where its pages are found again when both it and its keeper have ended. The cluster's
members are in an etcd at a place of its own. Members go by a secret that is changed in three rounds of restarts again
and again: :meth:`Hosts.next_secret` begins the next round, and whoever is started then goes by it.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .etcd import Etcd
from .load import DEADLINE_S
from .namespaces import Network
from .processes import Level, Processes

N_HOSTS, N_ENGINES = 3, 2
"""Hosts, and engines on each of them."""
_TTL_S = 10
"""Of a member's record in etcd: an outage that is shorter costs nobody his."""
_POOL = "48MiB"
"""Room for the pages of all hosts, several times over: whoever drains finds some, and nothing is evicted."""
_ROUNDS = 3
"""Rounds of restarts in which a cluster is moved to another secret (docs/security.md)."""


_HAS_AGAIN = b"has the pool's memory again"
"""What a node logs when it has given its memory to a keeper that was started again."""


def n_places(n_hosts: int) -> int:
    """Return how many places a fleet of so many hosts needs."""
    return n_hosts + 1


class Hosts(Processes):
    """Numbers 0 to ``n_hosts - 1`` are the hosts' nodes; then come the engines of all hosts, host by host."""

    bound_s = 10.0
    counts_from_up = True

    def __init__(self, n_hosts: int, seed: int, network: Network, folder: Path) -> None:
        nodes = [f"h{host}" for host in range(n_hosts)]
        engines = [f"h{host}e{engine}" for host in range(n_hosts) for engine in range(N_ENGINES)]
        super().__init__([*nodes, *engines], seed, network, folder)
        self.n_hosts = n_hosts
        self._n_changes = 0
        self._keepers: dict[int, subprocess.Popen[str]] = {}
        self._unkept: dict[int, int] = {}
        """Hosts whose keeper was killed, and how long their nodes' logs were then."""
        for host in range(n_hosts):
            self._folder_of(host).mkdir(mode=0o700)
            self.start_keeper(host)
        self.etcd = Etcd(network, n_hosts, folder)

    @property
    def loaded(self) -> Sequence[int]:
        return range(self.n_hosts, self.n)

    @property
    def nodes(self) -> Sequence[int]:
        """The hosts' nodes."""
        return range(self.n_hosts)

    def place(self, number: int) -> int:
        """Return the place of a process; that after the last process is etcd's."""
        if number == self.n:
            return self.n_hosts
        return number if number < self.n_hosts else (number - self.n_hosts) // N_ENGINES

    def has_disk(self, number: int) -> bool:
        return False  # no pages of its own: those of its engines that nobody takes back but a bump, for good

    def kind_of(self, name: str) -> str:
        if name.startswith("k"):
            return "keeper"
        return "engine" if "e" in name else "node"

    def _folder_of(self, host: int) -> Path:
        return self.folder / f"host{host}"

    def _secret(self, number: int) -> str:
        path = self.folder / f"secret{number}"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        return str(path)

    def next_secret(self) -> str:
        """Begin the next round of a change; return what it is. It is over when everybody was started again."""
        self._n_changes += 1
        uses, accepts = self._secrets()
        return f"secret {uses}, and {', '.join(map(str, accepts)) or 'none'} accepted besides"

    def _secrets(self) -> tuple[int, list[int]]:
        """Return the secret that whoever is started now goes by, and those that he accepts besides."""
        old, at = divmod(self._n_changes, _ROUNDS)
        return ((old, []), (old, [old + 1]), (old + 1, [old]))[at]

    def _role(self, number: int) -> dict[str, object]:
        host, (uses, accepts) = self.place(number), self._secrets()
        folder = self._folder_of(host)
        config: dict[str, object] = {
            "node_id": self.names[number],
            "secret_file": self._secret(uses),
            "accepted_secret_files": [self._secret(each) for each in accepts],
            "transports": ["shm", "tcp"],
            "deadline": DEADLINE_S,
        }
        if number < self.n_hosts:
            config |= {
                "listen": f"{self.network.address(host)}:0",
                "membership": f"etcd://{self.etcd.address}?ttl={_TTL_S}",
                "pool_size": _POOL,
                "buffer_size": 0,
                "attach_listen": f"unix:{folder}/s",
                "keeper": f"unix:{folder}/k",
            }
            if number % 2 == 0:  # every other one writes its pages to a disk besides
                config |= {"disk_path": str(folder / "disk"), "disk_size": _POOL}
        else:
            config |= {"attach": f"unix:{folder}/s"}
        return {"role": "host" if number < self.n_hosts else "engine", "config": config}

    def start_keeper(self, host: int) -> None:
        """Start a host's keeper."""
        command = [sys.executable, "-m", "p2pkv", "keeper", f"unix:{self._folder_of(host)}/k"]
        self._keepers[host] = self._open(host, command, self.folder / f"k{host}.log")

    def kill_keeper(self, host: int) -> None:
        """End a host's keeper at once; a node that lives has the memory in hand, and gives it to the next one."""
        keeper = self._keepers.pop(host)
        log = self.log(host)
        self._unkept[host] = log.stat().st_size if log.exists() else 0
        keeper.kill()
        keeper.communicate()

    def are_kept(self) -> bool:
        """Whether every keeper that was started again has the memory of its host's node, as that one says."""
        for host, at in list(self._unkept.items()):
            if _HAS_AGAIN in self.log(host).read_bytes()[at:]:
                del self._unkept[host]
        return not self._unkept

    def levels(self) -> dict[str, Level]:
        keepers = {f"k{host}": Level.of(keeper.pid) for host, keeper in self._keepers.items()}
        return super().levels() | keepers

    def close(self) -> None:
        super().close()
        for host in list(self._keepers):
            self.kill_keeper(host)
        if hasattr(self, "etcd"):
            self.etcd.kill()
