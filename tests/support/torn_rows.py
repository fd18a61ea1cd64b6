"""The hunt for torn rows: two processes map each other's device memory, and either is killed again and again.

One offers rows and overwrites them soon after, the other takes them and checks every byte (``row_churn.py``). What the
seed says is the same each time: who is killed, after how many rows, and what the two draw; not how they interleave.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster, NodeProcess
from p2pkv.testing.ports import free_port
from row_churn import Notes

ROLES = ("producer", "consumer")


@dataclass(frozen=True, slots=True)
class Churn:
    """What is handed over."""

    device: str
    """The kind of device memory that both have."""
    nbytes: int
    """Of a row."""
    delay_us: int = 0
    """Of each copy of the emulated driver."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a hunt."""

    right: int
    """Rows that were OK and right."""
    not_ok: int
    """Rows that were withdrawn, revoked, late or lost."""
    wrong: int
    """Rows that were OK and had a wrong byte, and memory that was written to after it was revoked."""
    kills: dict[str, int]
    direct_bytes: float
    """Those that went from device to device, of the last life of the consumer."""
    staged_bytes: float
    found: str
    """What was wrong first."""


class _Ends:
    """The two processes, each of which has the same address in every life."""

    def __init__(
        self, folder: Path, cluster: Cluster, churn: Churn, seed: int, settings: dict[str, Any]
    ) -> None:
        self._path, self._cluster, self._churn, self._seed = folder / "notes", cluster, churn, seed
        listen = {role: f"127.0.0.1:{free_port()}" for role in ROLES}
        common = {"transports": ["cuda_ipc"], "buffer_size": 0, "pool_size": 0, "deadline": 5.0} | settings
        self._settings = {
            role: common | {"listen": listen[role], "join": list(listen.values())} for role in ROLES
        }
        self.notes = Notes(self._path)
        self.kills = dict.fromkeys(ROLES, 0)
        self.nodes = {role: self._start(role) for role in ROLES}

    def _start(self, role: str) -> NodeProcess:
        return self._cluster.start(role, memory=4096, **self._settings[role])

    def set_going(self, role: str) -> None:
        churn = self._churn
        other = ROLES[1 - ROLES.index(role)]
        self.nodes[role].send(
            "offer_rows" if role == "producer" else "take_rows",
            peer=other,
            device=churn.device,
            notes=str(self._path),
            seed=self._seed,
            nbytes=churn.nbytes,
            delay_us=churn.delay_us,
        )

    def replace(self, role: str) -> None:
        """Kill one and start its successor."""
        self.nodes[role].kill()
        self.kills[role] += 1
        self.nodes[role] = self._start(role)
        self.set_going(role)

    def wait(self, n_right: int, until: float) -> bool:
        """Wait until so many rows were right; False if that is not to come: something is wrong, or time is up."""
        while self.notes["right"] < n_right:
            if self.notes.is_broken or time.monotonic() >= until:
                return False
            time.sleep(0.002)  # the file tells nobody
        return not self.notes.is_broken


def hunt_rows(
    cluster: Cluster,
    folder: Path,
    churn: Churn,
    *,
    rows: int,
    seconds: float,
    n_kills: int,
    seed: int,
    settings: dict[str, Any] | None = None,
) -> Seen:
    """Have so many rows handed over, if that takes no longer, and kill a side ``n_kills`` times, by turns at first.

    ``settings`` are what both nodes have beside. After each killing rows have to come again: where none do, the hunt
    lasts as long as it may and has fewer rows than were wanted.
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    ends = _Ends(folder, cluster, churn, seed, settings or {})
    until = time.monotonic() + seconds
    cluster.meet(*ends.nodes.values())
    for role in ROLES:
        ends.set_going(role)
    victims = [*chance.sample(ROLES, 2), *chance.choices(ROLES, k=n_kills)][:n_kills]
    for number, victim in enumerate(victims):
        share = rows // (n_kills + 1)
        begun = max(ends.notes["right"], number * share)
        if not ends.wait(begun + chance.randint(1, max(1, share)), until):
            break
        ends.replace(victim)
    ends.wait(max(rows, ends.notes["right"] + 1), until)
    notes = ends.notes
    notes["over"] = 1
    ends.nodes["producer"].answer(30.0)
    told = ends.nodes["consumer"].answer(30.0)
    found = Seen(
        notes["right"],
        notes["not OK"],
        notes["wrong"] + notes["written late"],
        ends.kills,
        told["counters"]["p2pkv_direct_bytes_total"],
        told["counters"]["p2pkv_staged_to_device_bytes_total"],
        told["found"],
    )
    print(found)
    return found
