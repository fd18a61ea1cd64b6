"""vLLM instances that share a model unequally hand prompts over, while requests are aborted and instances are lost.

One prefill instance and two decode instances at a time, each with tensor parallel, pipeline and block sizes of its own.
Ranks offer late or never, decode ranks ask late, not at all or twice, leases and deadlines are short, and an instance
that is lost is followed by another one of another shape. Blocks that are given back are wiped at once, as vLLM would
give them to the next request.

Oracle: a block that does not count as failed has the right bytes, and a hand-off that nothing befell is whole; every
load ends by its deadline, once, and soon if somebody else has what it asks for, and nothing is written to its blocks
afterwards; prefill has every block back when all is taken, or when the lease ends.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.unequal_instances import HandOver, Instance, Load
from p2pkv import Config, Node
from p2pkv.integrations.vllm_connector.messages import Pull, StepMetadata
from p2pkv.testing.lateness import Lateness
from p2pkv.testing.ports import free_port
from vllm_ranks import N_BLOCKS, Model, Shape

STAGES = [(3,), (1, 2), (2, 1), (1, 1, 1)]
MODELS = [Model(8), Model(2), Model(4), Model(8, is_mla=True), Model(4, is_hybrid=True)]
MOST_RANKS, MOST_OPEN, MOST_TOKENS = 4, 4, 16
HEALTHY_S, HEALTHY_LEASE_S = 3.0, 4.0
"""A load with so much time, of what is kept for longer, must not fail unless something befalls it."""
BUSY_S = HEALTHY_S / 2
"""A machine that is later than this is to blame for a load that fails."""
SLACK_S = 0.1
RELEASED_S = 2.0
"""So soon prefill has its blocks back; a guess that is generous on purpose, and below the healthy lease."""
MEET_S = 30.0
SOON_S = 1.5
"""So soon a load ends of what somebody else has; above the pause before a want is said again, below the deadline."""
_LOOK_S = 0.001

FAULTS = {
    "none": 8,
    "a rank offers late": 3,
    "a rank never offers": 2,
    "aborted": 4,
    "never asked for": 1,
    "refused": 1,
    "some ranks ask": 1,
    "two ask": 2,
    "prefill is lost": 1,
    "decode is lost": 1,
}

ASKS_LATE = "decode asks late"
HARMLESS = ("none", "a rank offers late", ASKS_LATE)


class World:
    """One schedule."""

    faults = FAULTS
    buddy_pool, stow_after = 0, 1.0
    """Of prefill instances, in bytes and seconds: without a buddy pool nothing is stowed."""

    def __init__(self, seed: int, tally: Tally, late: Lateness) -> None:
        self.chance, self.tally, self.late = random.Random(seed), tally, late
        self.model = self.chance.choice(MODELS)
        self.numbers = count(1)
        self.join = f"127.0.0.1:{free_port()}"
        self.story: list[str] = []
        self.seen = time.monotonic()
        self.due: list[tuple[float, int, HandOver, Callable[[], None]]] = []
        self.open: list[HandOver] = []
        self.lost: list[Instance] = []  # decode's
        self.prefill = self.start("kv_producer")
        self.decodes = [self.start("kv_consumer") for _ in range(2)]
        self.meet()

    def shape(self) -> Shape:
        while True:
            shape = Shape(
                self.chance.choice([1, 2, 4]),
                self.chance.choice([STAGES[0], *STAGES]),
                self.chance.choice([2, 4, 4, 6, 8]),
                self.chance.choice([1, 1, 2]),
            )
            if shape.n_ranks <= MOST_RANKS:
                return shape

    def start(self, role: str) -> Instance:
        lease = self.chance.choice([0.4, HEALTHY_LEASE_S, HEALTHY_LEASE_S])
        deadline = self.chance.choice([0.5, HEALTHY_S, HEALTHY_S])
        config = Config(join=[self.join], pool_size=0, transfer_lease=lease, buddy_pool_size=self.buddy_pool)
        instance = Instance(
            f"{role}-{next(self.numbers)}",
            role,
            self.shape(),
            self.model,
            lease=lease,
            deadline=deadline,
            start_node=lambda name: Node.start(replace(config, node_id=name)),
            buddy_pool_size=self.buddy_pool,
            stow_after=self.stow_after,
        )
        self.note(f"{instance} starts, lease {lease}, deadline {deadline}")
        return instance

    def living(self) -> list[Instance]:
        return [self.prefill, *self.decodes]

    def meet(self) -> None:
        """Wait until all know each other: what comes too early for that is another promise."""
        names = {node.node_id for instance in self.living() for node in instance.nodes}
        until = time.monotonic() + MEET_S
        for instance in self.living():
            for node in instance.nodes:
                while not names <= {member.node_id for member in node.members()}:
                    if time.monotonic() > until:
                        raise self.broken("the nodes don't meet")
                    self.turn()

    def note(self, what: str) -> None:
        self.story.append(f"{time.monotonic() % 1000:.3f} {what}")

    def broken(self, what: str) -> Broken:
        late = max(over.late.worst for over in self.open) if self.open else self.late.worst
        return Broken(
            "\n".join([f"{what} ({self.model}; the machine was late by {late:.3f} s)", *self.story[-60:]])
        )

    # what happens

    def run(self, stop: Stop) -> None:
        for _ in range(self.chance.randint(5, 12)):
            while len(self.open) >= MOST_OPEN:
                self.turn()
            self.begin()
            for _ in range(self.chance.choice([0, 1, 20])):
                self.turn()
            if stop():
                break
        while self.open:
            self.turn()
        self.check_inboxes()

    def begin(self) -> None:
        """Have a prompt computed, and plan what befalls it."""
        fault = self.chance.choices(list(self.faults), list(self.faults.values()))[0]
        seed, n_tokens = next(self.numbers), self.chance.randint(1, MOST_TOKENS)
        prefill, name = self.prefill, f"request-{seed}"
        tables = prefill.take(self.chance, n_tokens, self.model.n_kinds)
        if tables is None:
            return
        kv, handoff = self.model.kv(3, n_tokens, seed), prefill.server.handoff(name, n_tokens)
        over = HandOver(name, kv, prefill, handoff, tables, fault)
        over.is_spoilt = fault not in HARMLESS or prefill.lease < HEALTHY_LEASE_S
        self.note(f"{name} of {n_tokens} tokens, {prefill.name}: {fault}")
        self.open.append(over)
        odd_one = self.chance.choice(prefill.ranks)
        for number in prefill.ranks:
            if number == odd_one and fault == "a rank never offers":
                continue
            is_late = number == odd_one and fault in ("a rank offers late", "aborted")
            late = self.chance.uniform(0.05, 0.8) if is_late else 0.0
            self.after(late, over, partial(self.offer, over, number))
        if fault == ASKS_LATE:
            self.after(self.chance.uniform(0.1, 1.5), over, partial(self.ask_soon, over))
        elif fault != "never asked for":
            self.ask_soon(over)
        if fault == "prefill is lost":
            self.after(self.chance.choice([0.0, 0.01, 0.1, 0.5]), over, partial(self.lose, prefill))

    def offer(self, over: HandOver, number: int) -> None:
        if not over.prefill.is_lost:
            rank = over.prefill.server.ranks[number]
            rank.write(over.kv, over.tables)
            over.prefill.kept[number][over.name] = over.tables
            over.offered_at = time.monotonic()
            over.prefill.server.offer(rank, over.name, over.handoff, over.tables)

    def ask_soon(self, over: HandOver) -> None:
        decodes = self.decodes if over.fault == "two ask" else [self.chance.choice(self.decodes)]
        for decode in decodes:
            tables = decode.take(self.chance, over.kv.shape[2], self.model.n_kinds)
            if tables is None:
                over.is_spoilt = True
                continue
            load = Load(f"{over.name}-for-{decode.name}", over, decode, tables, {})
            over.loads.append(load)
            decode.loads[load.request_id] = load
            if decode.deadline < HEALTHY_S or not self.is_possible(over.prefill, decode):
                over.is_spoilt = True
            asking = list(decode.ranks)
            if over.fault == "some ranks ask":
                asking = self.chance.sample(asking, self.chance.randint(1, len(asking)))
            for number in asking:
                self.after(self.chance.choice([0.0, 0.0, 0.02]), over, partial(self.ask, load, number))
            if over.fault == "aborted":
                self.after(self.chance.choice([0.0, 0.02, 0.05, 0.2]), over, partial(self.abort, load))
            if over.fault == "decode is lost":
                self.after(self.chance.choice([0.0, 0.01, 0.1]), over, partial(self.lose, decode))

    def is_possible(self, prefill: Instance, decode: Instance) -> bool:
        """Whether the tokens that lie side by side on one side are a part of those on the other."""
        tiles = [each.shape.block // each.shape.n_tiles for each in (prefill, decode)]
        return max(tiles) % min(tiles) == 0

    def ask(self, load: Load, number: int) -> None:
        if load.decode.is_lost:
            return
        is_refused = load.of.fault == "refused"
        blocks = () if is_refused else load.decode.server.needed(load.of.kv.shape[2], load.tables)
        pull = Pull(load.request_id, load.of.handoff, "", blocks, is_awaited=not is_refused)
        if not is_refused:
            load.waiting[number] = time.monotonic()
        load.decode.server.ranks[number].side.load(StepMetadata(pulls=[pull]))

    def abort(self, load: Load) -> None:
        if not load.decode.is_lost:
            self.note(f"{load.request_id} is aborted")
            self.tally["aborted"] += 1
            for rank in load.decode.server.ranks:
                rank.side.before_forward(StepMetadata(revoked=[load.request_id]))

    def lose(self, instance: Instance) -> None:
        """End an instance, and start another one in its place."""
        if instance.is_lost:
            return
        self.note(f"{instance.name} is lost")
        self.tally["instances lost"] += 1
        for over in self.open:
            if over.prefill is instance or any(load.decode is instance for load in over.loads):
                over.is_spoilt = True
        instance.close()
        if instance is self.prefill:
            self.prefill = self.start("kv_producer")
        else:
            self.lost.append(instance)
            for rank in instance.server.ranks:
                rank.wipe(range(N_BLOCKS))
            self.decodes[self.decodes.index(instance)] = self.start("kv_consumer")
        self.meet()

    def after(self, seconds: float, over: HandOver, do: Callable[[], None]) -> None:
        """Have something happen to a hand-off later on."""
        over.n_planned += 1
        heapq.heappush(self.due, (time.monotonic() + seconds, next(self.numbers), over, do))

    # what is seen

    def turn(self) -> None:
        """Do what is due, and look at all that may have ended."""
        while self.due and self.due[0][0] <= time.monotonic():
            *_, over, do = heapq.heappop(self.due)
            over.n_planned -= 1
            do()
        seen, self.seen = self.seen, time.monotonic()
        for decode in self.decodes:
            for number, rank in enumerate(decode.server.ranks):
                for request_id, failed in rank.side._loads.take_done().items():
                    self.ended(decode, number, request_id, failed, seen)
        for number, rank in enumerate(self.prefill.server.ranks):
            for request_id in rank.side.take_done()[0]:
                self.released(number, request_id)
        self.open = [over for over in self.open if not self.is_over(over)]
        time.sleep(_LOOK_S)  # between two looks

    def ended(
        self, decode: Instance, number: int, request_id: str, failed: set[int] | None, seen: float
    ) -> None:
        """Judge a rank's load that ended after ``seen``."""
        load = decode.loads.get(request_id)
        if load is None or number not in load.waiting:
            raise self.broken(f"rank {number} of {decode.name} ends {request_id} again")
        took = seen - load.waiting.pop(number)
        if took > decode.deadline + SLACK_S + load.of.late.worst:
            raise self.broken(f"{request_id} ended on rank {number} after {took:.2f} s")
        rank, of = decode.server.ranks[number], load.of
        self.tally["loads right" if failed is None else "loads failed"] += 1
        load.n_right += failed is None
        if load.n_right == len(decode.ranks) and of.had_at is None:
            of.had_at = self.seen
        self.judge(load, number, failed)
        rank.wipe({block for table in load.tables for block in table})

    def judge(self, load: Load, number: int, failed: set[int] | None) -> None:
        """Compare what a rank has with what it should have."""
        rank, of = load.decode.server.ranks[number], load.of
        if failed is not None and not of.is_spoilt and of.late.worst < BUSY_S:
            raise self.broken(f"{load.request_id} failed on rank {number}, and nothing had befallen it")
        if not rank.holds(of.kv, load.tables, besides=failed or ()):
            raise self.broken(f"rank {number} has wrong bytes of {load.request_id}; failed are {failed}")
        if failed and len(failed) < len({block for table in load.tables for block in table}):
            self.tally["loads in part"] += 1

    def released(self, number: int, request_id: str) -> None:
        tables = self.prefill.kept[number].pop(request_id, None)
        if tables is None:
            raise self.broken(f"rank {number} of {self.prefill.name} gives {request_id} back again")
        self.prefill.server.ranks[number].wipe({block for table in tables for block in table})
        self.tally["blocks back"] += 1

    def is_over(self, over: HandOver) -> bool:
        """Whether nothing is to be expected of it any more; if so its blocks are there for others."""
        if over.n_planned:
            return False
        running = [load for load in over.loads if load.waiting and not load.decode.is_lost]
        for load in running:
            took = self.seen - max(load.waiting.values())
            if took > load.decode.deadline + RELEASED_S + over.late.worst:
                raise self.broken(f"{load.request_id} does not end on ranks {list(load.waiting)}")
            if over.had_at is not None and not over.prefill.is_lost:
                waits = self.seen - max(over.had_at, *load.waiting.values())
                if waits > SOON_S + over.late.worst:
                    raise self.broken(f"{load.request_id} waits {waits:.2f} s for what somebody else has")
        if running:
            return False
        if over.taken_at is None:
            over.taken_at = time.monotonic()
        kept = [n for n in over.prefill.ranks if over.name in over.prefill.kept[n]]
        if kept and not over.prefill.is_lost:
            lease_ends = over.offered_at + over.prefill.lease
            until = max(over.taken_at, lease_ends) if over.is_spoilt else over.taken_at
            if self.seen - until > RELEASED_S + over.late.worst:
                raise self.broken(f"{over.name} is kept by ranks {kept} of {over.prefill}")
            return False
        for load in over.loads:
            del load.decode.loads[load.request_id]
            load.decode.give_back(load.tables)
            self.check_untouched(load.decode)
        over.prefill.give_back(over.tables)
        return True

    def check_untouched(self, decode: Instance) -> None:
        """Nothing has been written to blocks that are nobody's."""
        for number, rank in enumerate(decode.server.ranks):
            if not rank.touches_only(set() if decode.is_lost else decode.used()):
                raise self.broken(f"free blocks of rank {number} of {decode.name} were written to")
        self.tally["blocks untouched"] += 1

    def check_all_untouched(self) -> None:
        """The same of instances that have ended."""
        for decode in (*self.decodes, *self.lost):
            self.check_untouched(decode)

    def check_inboxes(self) -> None:
        """What wants were waited for in is there for others again."""
        # what is stowed may be there until its lease ends
        until = time.monotonic() + RELEASED_S + (self.prefill.lease if self.buddy_pool else 0)
        for number, rank in enumerate(self.prefill.server.ranks):
            leaving = rank.side._leaving
            while leaving._seen or len(leaving._slots) != len(leaving._rows):
                if time.monotonic() > until + self.late.worst:
                    raise self.broken(
                        f"rank {number} keeps {len(leaving._rows) - len(leaving._slots)} inboxes"
                    )
                time.sleep(_LOOK_S)  # between two looks

    def close(self) -> None:
        for instance in self.living():
            if not instance.is_lost:
                instance.close()


def run_in(make: Callable[[int, Tally, Lateness], World], seed: int, tally: Tally, stop: Stop) -> None:
    """Hand prompts over in a world of that kind, and have them befallen."""
    with Lateness() as late:
        world = make(seed, tally, late)
        try:
            world.run(stop)
        finally:
            world.close()
    world.check_all_untouched()
    del world
    gc.collect()  # nodes are in cycles, and keep their descriptors until those are found


HUNT = Hunt(
    name="vllm_unequal",
    promise="a hand-off between unequal vLLM instances has the right bytes or fails, ends in time, and leaks no block",
    run=partial(run_in, World),
    effects=("loads right", "loads failed", "loads in part", "aborted", "instances lost", "blocks back"),
    enough=20,
)
