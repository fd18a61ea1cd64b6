"""Transfers of more rows than one message has, with faults in their middle: what is said of one is said of all of it.

A producer in a process of its own offers or puts; a node of this process asks or grants, with more rows than a message
holds, and looks at the handle all the while. Meanwhile it revokes, the producer withdraws, the connection is cut, or
the producer is killed. What was cut off is asked for once more: no part of it may have become lost on the way.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from cluster import NodeProcess
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.timing import check_time
from p2pkv import Config, Node
from p2pkv.directory.view import State, View
from p2pkv.offers.handles import Grant, RowStatuses
from p2pkv.testing.lateness import Lateness
from p2pkv.transfers import RowStatus
from transfer_pair import random_rows, spans_of

PART = 32768
"""Rows of a message."""
NBYTES = 16
N_REQUESTS = 5
FAR_S = 60.0
"""A deadline that nothing may need."""
END_S = 0.25
"""For a revocation, which waits for nobody."""
POISON = 0xA5
_FAULTS = ("none", "none", "revoked", "withdrawn", "cut", "killed")


class Pair:
    """The two nodes of one schedule."""

    def __init__(self, seed: int, tally: Tally, undo: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.tally = tally
        transport = self.rng.choice(["tcp", "shm"])
        settings = {
            "transports": [transport],
            "pool_size": 0,
            "buffer_size": self.rng.choice([0, "4MiB"]),
            "deadline": FAR_S,
        }
        self.most = self.rng.choice([PART + 1, 2 * PART, 3 * PART + 100])
        self.node = Node.start(Config(node_id=f"{seed}-here", **settings))
        undo.callback(self.node.close)
        self.rows = np.zeros((self.most, NBYTES), np.uint8)
        self.node.register_memory(self.rows)
        self.producer = NodeProcess(
            config=settings | {"node_id": f"{seed}-there", "join": [self.node.address]},
            memory=self.most * NBYTES,
            readable=True,
            in_memfd=transport == "shm",
        )
        undo.callback(self.producer.close)
        self.producer.start()
        self.is_alive = True

    def meet(self) -> None:
        """Have this node connected to the producer's."""
        if not self.node.transfers.meet(self.producer.node_id, timeout=FAR_S):
            raise Broken("a node that is there was not met")

    def greet(self) -> None:
        """Have the two connected in both directions: a put has a second for that, which a busy machine may not have.

        It writes to the producer's memory: nothing may be offered that lies there.
        """
        self.meet()
        for attempt in range(30):
            name = f"hello {attempt} {self.rng.getrandbits(60)}"
            with self.node.transfers.grant(name, spans_of(self.rows)[:1], timeout=FAR_S) as grant:
                self.producer.call("offer", request=name, n=1, nbytes=NBYTES, seed=1, to=self.node.node_id)
                if self.producer.call("wait", request=name, timeout=FAR_S)["statuses"] == ["OK"]:
                    grant.wait(FAR_S)
                    return
        raise Broken("a node that is there was not connected to")


class Request:
    """One long transfer, and what is done to it."""

    def __init__(self, pair: Pair, number: int) -> None:
        rng = pair.rng
        self.pair, self.rng = pair, rng
        self.name = f"request {number}"
        self.seed = rng.getrandbits(30)
        self.n = rng.randint(PART + 1, pair.most)
        self.is_put = rng.random() < 0.5
        self.fault = rng.choice(_FAULTS)
        self.right = random_rows(self.n, NBYTES, self.seed)
        # a get may ask for some of the rows: of one part, or over the bound of two
        self.first, self.n_wanted = 0, self.n
        if not self.is_put and self.fault == "none" and rng.random() < 0.5:
            self.first = rng.choice([0, PART - 1, PART, rng.randrange(self.n)])
            self.n_wanted = rng.randint(1, self.n - self.first)
        self.had = np.zeros(self.n, bool)

    def run(self) -> None:
        self.pair.greet()
        asks_first = self.rng.random() < 0.5
        grant = self._ask() if asks_first else None
        where = {"to": self.pair.node.node_id} if self.is_put else {}
        self.pair.producer.send("offer", request=self.name, n=self.n, nbytes=NBYTES, seed=self.seed, **where)
        if self.fault != "killed" or self.rng.random() < 0.8:
            self.pair.producer.answer()
        grant = grant or self._ask()
        if self.fault == "none":
            self._watch(grant, FAR_S)
        else:
            # when some rows are there, however long that takes on this machine, or some time after the beginning
            is_begun = self.rng.random() < 0.7
            self._watch(grant, FAR_S if is_begun else self.rng.choice([0.0, 0.003, 0.03]), is_begun=is_begun)
            getattr(self, f"_be_{self.fault}")(grant)
        self._end(grant)

    def _ask(self) -> Grant:
        rows = self.pair.rows[: self.n_wanted]
        rows[:] = 0
        transfers, producer = self.pair.node.transfers, self.pair.producer.node_id
        if self.is_put:
            return transfers.grant(self.name, spans_of(rows), timeout=FAR_S)
        return transfers.get_async(producer, self.name, spans_of(rows), first_row=self.first, timeout=FAR_S)

    def _watch(self, grant: Grant, seconds: float, *, is_begun: bool = False) -> None:
        """Look at it, with ``is_begun`` until some rows are there: it is not over before each of its rows is."""
        until = time.monotonic() + seconds
        while True:
            is_done = grant.done()
            if is_done:
                self._check(grant.statuses(), is_done=True)
            is_begun_now = is_begun and (grant.statuses() == RowStatus.OK).any()
            if is_done or is_begun_now or time.monotonic() >= until:
                break
        self._check(grant.statuses(), is_done=is_done)
        self.pair.tally["looked at while under way"] += not is_done

    def _check(self, statuses: RowStatuses, *, is_done: bool) -> None:
        """Demand a word on each row, and that those that are said to be right are."""
        if len(statuses) != self.n_wanted:
            raise Broken(f"{self.name} has {self.n_wanted} rows, and words on {len(statuses)}")
        if is_done and (statuses == RowStatus.PENDING).any():
            n = int((statuses == RowStatus.PENDING).sum())
            raise Broken(f"{self.name} is said to be done, and {n} of its {self.n_wanted} rows are pending")
        is_right = (self.pair.rows[: self.n_wanted] == self._wanted()).all(axis=1)
        wrong = np.flatnonzero((statuses == RowStatus.OK) & ~is_right)
        if wrong.size:
            raise Broken(f"{wrong.size} rows of {self.name} are OK and wrong, row {wrong[0]} is the first")

    def _wanted(self) -> np.ndarray:
        return self.right[self.first : self.first + self.n_wanted]

    def _be_revoked(self, grant: Grant) -> None:
        with Lateness() as late:
            grant.revoke()
        check_time(f"revoking {self.name}", END_S, late)

    def _be_withdrawn(self, grant: Grant) -> None:
        self.pair.producer.call("withdraw", request=self.name)
        # what was not told of by then is not known here, and the grant would wait for it
        grant.wait(0.1)

    def _be_cut(self, grant: Grant) -> None:
        alive = View(self.pair.node.members())
        dead = alive.replacing([replace(alive[self.pair.producer.node_id], state=State.DEAD)])
        self.pair.node.transfers.set_view(alive, dead, grace=0.0)
        if not self.is_put:
            with Lateness() as late:
                grant.wait(FAR_S)
            check_time(f"{self.name} after the connection was cut", 5.0, late)

    def _be_killed(self, grant: Grant) -> None:
        self.pair.producer.kill()
        self.pair.is_alive = False
        if not self.is_put:
            with Lateness() as late:
                grant.wait(FAR_S)
            check_time(f"{self.name} after its producer was killed", 5.0, late)

    def _end(self, grant: Grant) -> None:
        """Revoke what is left, give its memory to somebody else, and see what the producer thinks."""
        got = grant.revoke()
        self._check(got, is_done=True)
        n_right = int((got == RowStatus.OK).sum())
        tally = self.pair.tally
        tally["rows right"] += n_right
        tally["wholes"] += n_right == self.n
        tally[f"{self.fault} in the middle"] += self.fault != "none" and 0 < n_right < self.n
        if self.fault == "none" and n_right != self.n_wanted:
            raise Broken(f"nothing happened to {self.name}, and {self.n_wanted - n_right} rows did not come")
        self.pair.rows[:] = POISON
        if not self.pair.is_alive:
            return
        if self.fault == "cut":
            self.pair.meet()
        n_had = n_right
        if self.fault in ("cut", "revoked") and not self.is_put:
            n_had += self._ask_again(got)
        self._ask_the_producer(n_had)
        tally["memories untouched"] += 1

    def _ask_again(self, got: RowStatuses) -> int:
        """Demand that what was not taken is still offered; return how many more rows have come."""
        again = self.pair.node.transfers.get(
            self.pair.producer.node_id, self.name, spans_of(self.pair.rows[: self.n]), timeout=FAR_S
        )
        self._check(again, is_done=True)
        had, has = got == RowStatus.OK, again == RowStatus.OK
        if (had & has).any():
            raise Broken(f"{int((had & has).sum())} rows of {self.name} came twice")
        if ((again != RowStatus.GONE) & ~has).any():
            names = sorted({RowStatus(int(s)).name for s in again})
            raise Broken(f"{self.name} was offered, and asked for once more it has {names}")
        self.pair.tally["rows right when asked for again"] += int(has.sum())
        self.pair.rows[:] = POISON
        return int(has.sum())

    def _ask_the_producer(self, n_had: int) -> None:
        producer = self.pair.producer
        is_over = self.fault in ("none", "withdrawn") or (
            self.fault in ("cut", "revoked") and not self.is_put
        )
        told = producer.call("wait", request=self.name, timeout=FAR_S if is_over else 0.0)
        if is_over and "PENDING" in told["statuses"]:
            raise Broken(f"{self.name} is over, and its producer is not told: {told}")
        if told["n_ok"] < n_had:
            raise Broken(f"{n_had} rows of {self.name} are here, and its producer says {told}")
        producer.call("withdraw", request=self.name)
        if (self.pair.rows != POISON).any():
            raise Broken(f"{self.name} was over, and its memory was written to")


def run(seed: int, tally: Tally, stop: Stop) -> None:
    with ExitStack() as undo:
        pair = Pair(seed, tally, undo)
        for number in range(N_REQUESTS):
            Request(pair, number).run()
            tally["requests"] += 1
            if not pair.is_alive or stop():
                break
    gc.collect()  # nodes are in cycles, and keep their descriptors until those are found


HUNT = Hunt(
    "long_transfers",
    "a transfer of more rows than a message has is one: over when all of it is, and no part of it is lost",
    run,
    effects=(
        "wholes",
        "looked at while under way",
        "revoked in the middle",
        "withdrawn in the middle",
        "cut in the middle",
        "killed in the middle",
        "rows right when asked for again",
    ),
)
