"""What the directory says is there is there, and what is there is found, however nodes come and go: pools know.

Nodes with pools, shards and announcers in virtual time. They join and leave, which each of the others hears of a moment
later; some stand still for seconds, so that they miss what they are told; pages are published, evicted by others and
retracted. When all was quiet for a while, every node looks up every page there ever was. A page that is in a pool and
is not found breaks the promise; and so does, once all newcomers have settled, a location that leads to a page that was
taken back.
"""

from __future__ import annotations

import gc
import random

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv.directory.newcomers import SETTLING_S
from p2pkv.directory.view import node_key
from p2pkv.page import Keys, as_locations, row_pieces
from simulated_directory_nodes import NBYTES, DirectoryNode, DirectoryNodes

N_ACTIONS = 60
STEP = 0.1
"""Seconds between two sweeps of a stripe."""
QUIET = 2.0
"""Seconds within which all is told to whoever hears it."""
SETTLED = QUIET + SETTLING_S
QUIET_AFTER_STANDING = 9.0
"""To whom has missed it it is told again, after pauses of which each may be twice the one before."""
MOST_NODES = 7


class Cluster:
    """The nodes, and all pages that ever were."""

    def __init__(self, chance: random.Random, tally: Tally) -> None:
        self.chance = chance
        self.tally = tally
        self.nodes = DirectoryNodes("n0", "n1", "n2")
        self.present = ["n0", "n1", "n2"]
        self.n_nodes = 3
        self.keys: list[Keys] = []
        self.unheard: dict[str, float] = {}  # node -> when it hears who is present
        self.frozen: dict[str, float] = {}  # node -> until when it stands still
        self.story: list[str] = []

    def pass_time(self, seconds: float) -> None:
        end = self.nodes.now + seconds
        while self.nodes.now < end:
            self.nodes.run(STEP)
            now = self.nodes.now
            for node_id, node in self.nodes.nodes.items():
                if self.frozen.get(node_id, 0.0) > now:
                    continue
                node.is_stopped = False
                if self.unheard.get(node_id, now + 1.0) <= now:
                    del self.unheard[node_id]
                    self.nodes.show(node, *self.present)
                node.directory.confirm_view()
                node.shard.sweep()

    def hear(self) -> None:
        """Let every node hear who is present, each after a moment of its own."""
        for node_id in self.nodes.nodes:
            self.unheard[node_id] = self.nodes.now + self.chance.choice([0.0, 0.1, 0.3])

    def some_node(self) -> tuple[str, DirectoryNode] | None:
        awake = [n for n in self.present if self.frozen.get(n, 0.0) <= self.nodes.now]
        if not awake:
            return None
        node_id = self.chance.choice(awake)
        return node_id, self.nodes.nodes[node_id]

    def act(self) -> None:
        what = self.chance.choices(
            ["publish", "retract", "join", "leave", "freeze", "wait"], [6, 6, 3, 2, 0.5, 4]
        )[0]
        picked = self.some_node()
        if picked is None:
            return
        node_id, node = picked
        self.story.append(f"{self.nodes.now:.1f} {what} {node_id}")
        if what == "publish":
            self.keys.append(self.publish(node))
        elif what == "retract" and self.keys:
            self.retract(node)
        elif what == "join" and len(self.present) < MOST_NODES:
            newcomer = f"n{self.n_nodes}"
            self.n_nodes += 1
            self.nodes.add(newcomer)
            self.present.append(newcomer)
            self.hear()
            self.tally["joined"] += 1
        elif what == "leave" and len(self.present) > 2:
            self.present.remove(node_id)
            self.nodes.remove(node_id)
            self.hear()
            self.tally["left"] += 1
        elif what == "freeze":
            self.frozen[node_id] = self.nodes.now + self.chance.uniform(0.2, 2.0)
            node.is_stopped = True
            self.tally["frozen"] += 1
        self.pass_time(self.chance.choice([0.0, 0.0, 0.2, 1.0, 4.0]))

    def publish(self, node: DirectoryNode) -> Keys:
        """Publish new pages, or again what some node has or had."""
        if self.keys and self.chance.random() < 0.3:
            keys = self.chance.choice(self.keys)
            self.tally["published again"] += 1
        else:
            keys = np.frombuffer(self.chance.randbytes(16 * 40), np.uint8).reshape(40, 16)
        memory = np.zeros((len(keys), NBYTES), np.uint8)
        told = node.directory.publish(node.pool, keys, row_pieces(memory), node.clock.now + 1.0)
        self.tally["told nobody"] += int((told.is_told == 0).sum())
        return keys

    def retract(self, node: DirectoryNode) -> None:
        keys = self.chance.choice(self.keys)[self.chance.randrange(20) :]
        there, locations = node.pool.retract(keys)
        gone = there.astype(bool)
        if gone.any():
            node.directory.drop(keys[gone], locations[gone], node.clock.now + 1.0, by_owner=True)
            self.tally["taken back"] += int(gone.sum())

    def calm_down(self) -> None:
        """Let everybody be told of everything."""
        if self.frozen:
            self.pass_time(max(0.0, max(self.frozen.values()) - self.nodes.now) + QUIET_AFTER_STANDING)
            self.frozen.clear()
            return
        self.pass_time(QUIET)
        self.judge(has_settled=False)
        self.pass_time(SETTLED - QUIET)

    def judge(self, *, has_settled: bool = True) -> None:
        """Compare what every node finds with what pools have."""
        if not self.keys:
            return
        keys = np.unique(np.concatenate(self.keys), axis=0)
        members = {node_key(node_id): self.nodes.nodes[node_id] for node_id in self.present}
        held = {key: node.pool.lookup(keys) for key, node in members.items()}
        is_there = np.any([found for found, _ in held.values()], axis=0)
        for node_id in self.present:
            node = self.nodes.nodes[node_id]
            found, raw = node.directory.get(keys, node.clock.now + 1.0)
            locations = as_locations(raw)
            for row in np.flatnonzero(found):
                owner = int(locations["owner"][row])
                there, where = held.get(owner, (np.zeros(len(keys)), locations))
                if there[row] and where["generation"][row] == locations["generation"][row]:
                    continue
                self.tally["found in vain"] += 1
                if has_settled:
                    raise Broken(self.told(f"{node_id} finds a page that is gone", keys[row]))
            if (missed := np.flatnonzero(is_there & (found == 0))).size:
                raise Broken(self.told(f"{node_id} misses {missed.size} pages", keys[missed[0]]))
            self.tally["found"] += int(found.sum())
            self.tally["not found"] += int((found == 0).sum())

    def told(self, what: str, key: Keys) -> str:
        shards = [n for n in self.present if self.nodes.nodes[n].shard.get(key[None])[0][0]]
        pools = [n for n in self.present if self.nodes.nodes[n].pool.lookup(key[None])[0][0]]
        return "\n".join(
            [
                *self.story,
                f"{self.nodes.now:.1f} {what}: shards of {shards} know it, pools of {pools} have it",
            ]
        )


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    cluster = Cluster(chance, tally)
    try:
        for _ in range(N_ACTIONS):
            cluster.act()
            if chance.random() < 0.15:
                cluster.calm_down()
                cluster.judge()
            if stop():
                return
    finally:
        cluster.nodes.close()
        del cluster
        gc.collect()  # a node and its announcer know each other, and few objects hold much native memory


HUNT = Hunt(
    "taken_back",
    "What look-ups find is there, and what is there they find, while nodes come and go",
    run,
    effects=("joined", "left", "frozen", "published again", "taken back", "found", "not found"),
    enough=10,
)
