"""What a system does by itself, in a process of its own: how many pages its pool holds, how long it takes to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from p2pkv_bench.peer import Peer
from p2pkv_bench.peers.entrants import Guarded, Tell
from p2pkv_bench.peers.systems import OWN, System
from p2pkv_bench.plan import Plan
from p2pkv_bench.rounds import Contestant, take_turns
from p2pkv_bench.rows import MIB, Row, Target, make_row
from p2pkv_bench.starting import populate_ms

ROOM = "usable share of a pool of 512 MiB"
START = "start with 1 GiB"
_POOL_NBYTES = 512 * MIB
_PAGES = (int(4.5 * MIB), int(2.25 * MIB))
_LEAST_SHARE = 0.97
_START_NBYTES = 1024 * MIB
_POPULATE = "populate"


def room_rows(plan: Plan, systems: Sequence[System], say: Tell) -> Iterator[Row]:
    """Fill the pool of each system that has one, once: the share of its bytes that hold pages that are really there."""
    for page_nbytes in _PAGES:
        ours, size = OWN[0], f"{page_nbytes / MIB:g} MiB"
        shares = {ours.name: [_share(ours, page_nbytes)]}
        for system in systems:
            if not system.has_pool:
                continue
            plan.tell(f"{system.name}: its pool is filled with pages of {size}")
            share = Guarded(partial(_share, system, page_nbytes))
            value = share()
            if share.error:
                say(f"{system.name} is left out of usable share, {size}: {share.error}.")
            else:
                shares[system.name] = [value]
        yield make_row(
            shares,
            suite="peers",
            case=ROOM,
            unit="",
            page_nbytes=page_nbytes,
            target=Target(_LEAST_SHARE),
        )


def _share(system: System, page_nbytes: int) -> float:
    with Peer("p2pkv_bench.peers.worker") as process:
        n_kept: int = process.call(
            "n_kept",
            module=system.module,
            options=dict(system.options),
            pool_nbytes=_POOL_NBYTES,
            page_nbytes=page_nbytes,
        )
    return n_kept * page_nbytes / _POOL_NBYTES


def start_rows(plan: Plan, systems: Sequence[System], say: Tell) -> Iterator[Row]:
    """Start each system in a new process, in turns, beside the kernel's touching of as many bytes."""
    plan.tell(f"every system starts, {plan.rounds + 1} times in turns")
    ours: dict[str, Contestant] = {system.name: partial(_start_ms, system) for system in OWN}
    guarded = {system.name: Guarded(partial(_start_ms, system)) for system in systems}
    figures = take_turns({**ours, _POPULATE: partial(populate_ms, 1), **guarded}, plan.rounds)
    for name, contestant in guarded.items():
        if contestant.error:
            say(f"{name} is left out of start: {contestant.error}.")
            del figures[name]
    yield make_row(figures, suite="peers", case=START, unit="ms")


def _start_ms(system: System) -> float:
    with Peer("p2pkv_bench.peers.worker") as process:
        kind = "Pool" if system.has_pool else "Registered"
        milliseconds: float = process.call(
            "start_ms",
            module=system.module,
            kind=kind,
            options=dict(system.options),
            nbytes=_START_NBYTES,
        )
    return milliseconds
