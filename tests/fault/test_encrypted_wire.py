"""Two nodes that encrypt tcp, and somebody between them: he reads nothing, and what he changes is no page."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster import eventually
from p2pkv import transports
from p2pkv.testing.lateness import returns_within
from p2pkv.transports.native import TcpTransport
from pair import NBYTES, Pair
from wire_tap import DEEDS, Deed, Plan, WireTap, tapped

pytestmark = pytest.mark.skipif(
    (missing := TcpTransport.unavailable({"encrypt": True})) is not None, reason=str(missing)
)
SEED = int(os.environ.get("P2PKV_TEST_SEED", "1"))
DEADLINE = 0.3
FORGED = 'p2pkv_forged_records_total{transport="tcp"}'

N_TO_MEDDLE = {
    # A request of eight small pages is a header and its spans; the answer a header, the bytes, and the trailer. What
    # is repeated must not be the last: all has been said by then.
    False: {"flip": 2, "drop": 2, "repeat": 1, "swap": 2, "cut": 2},
    True: {"flip": 3, "drop": 3, "repeat": 2, "swap": 3, "cut": 3},
}
"""How many records each deed may be done to, so that no page comes: of the reader, and of the owner."""


def start(folder: Path, tap: WireTap, patch: pytest.MonkeyPatch, **settings: object) -> Pair:
    patch.setitem(transports.BUILT_IN, "tcp", tapped(tap))
    return Pair(folder, transports=["tcp"], **settings)


def n_forged(pair: Pair) -> float:
    return sum(node.counters()[FORGED] for node in pair.nodes)


def is_seen(tap: WireTap, pair: Pair) -> bool:
    """Whether some of the pages went by as they are."""
    return any(row.tobytes()[at : at + 16] in tap.seen for row in pair.source for at in range(0, NBYTES, 512))


@pytest.fixture
def tap() -> Iterator[WireTap]:
    with WireTap() as tap:
        yield tap


def test_pages_cross_and_are_not_seen_on_the_wire(
    tmp_path: Path, tap: WireTap, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(start(tmp_path, tap, monkeypatch, encrypt="tcp")) as pair:
        assert pair.fetch_is_right(pair.publish())
        assert len(tap.seen) > pair.source.nbytes
        assert not is_seen(tap, pair)
        assert n_forged(pair) == 0


def test_without_encryption_they_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WireTap(is_plain=True) as tap, closing(start(tmp_path, tap, monkeypatch)) as pair:
        assert pair.fetch_is_right(pair.publish())
        assert is_seen(tap, pair)


def _misses(pair: Pair, keys: list[str], told: str) -> bool:
    pair.destination[:] = 0
    with returns_within(DEADLINE + 0.1):
        outcomes = pair.reader.fetch(keys, pair.destination, timeout=DEADLINE)
    assert not outcomes.any(), told
    # Nothing lands that was not proven: whatever is there is right.
    assert ((pair.destination == 0) | (pair.destination == pair.source)).all(), told
    return True


@pytest.mark.parametrize("of_owner", [False, True], ids=["request", "answer"])
@pytest.mark.parametrize("deed", DEEDS)
def test_what_is_changed_on_the_wire_is_a_miss_by_the_deadline(
    tmp_path: Path, tap: WireTap, monkeypatch: pytest.MonkeyPatch, deed: Deed, of_owner: bool
) -> None:
    dice = random.Random(f"{SEED} {deed} {of_owner}")
    with closing(start(tmp_path, tap, monkeypatch, encrypt="tcp")) as pair:
        keys = pair.publish()
        assert pair.fetch_is_right(keys)
        tap.plan = Plan(deed, of_owner, dice.randrange(N_TO_MEDDLE[of_owner][deed]), dice)
        told = f"seed {SEED}, {tap.plan}"
        eventually(lambda: _misses(pair, keys, told) and tap.n_deeds > 0, 10.0)
        if deed in ("flip", "repeat"):
            eventually(lambda: n_forged(pair) > 0, 10.0)


def test_after_it_pages_come_again(tmp_path: Path, tap: WireTap, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(start(tmp_path, tap, monkeypatch, encrypt="tcp")) as pair:
        keys = pair.publish()
        tap.plan = Plan("flip", True, 0, random.Random(SEED))
        eventually(lambda: _misses(pair, keys, "flip") and tap.n_deeds > 0, 10.0)
        tap.plan = None
        eventually(lambda: pair.fetch_is_right(keys), 20.0)
