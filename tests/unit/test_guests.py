"""What becomes of guests when words of their source are lost, late or of another run, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv import Config, Node, _native
from p2pkv.cache.guests import StoreStatus
from p2pkv.control.sockets import Request
from p2pkv.control.wire import TAKE_BACK, Kind
from p2pkv.page import LOCATION, as_bytes, as_locations

PAGE = 4096
SOURCE, LOG = 77, 9
EPOCH = 0


class Holder:
    """A node, and what a source of guests says to it."""

    def __init__(self) -> None:
        self.node = Node.start(Config(node_id="holder", pool_size=64 * PAGE, buffer_size=0, deadline=5.0))
        caching = self.node._parts.caching
        assert caching is not None
        self.guests, self.pool = caching.guests, caching.pool
        self.ids = caching.cache.hash(["a", "b", "c", "d"])[1]
        self.memory = np.arange(len(self.ids) * PAGE, dtype=np.uint8).reshape(len(self.ids), PAGE)

    def store(self, number: int, *, source: int = SOURCE, log: int = LOG, epoch: int = EPOCH) -> list[int]:
        """Store all pages as they were read when the source was at a number; return their statuses."""
        n = len(self.ids)
        addresses = self.memory.ctypes.data + np.arange(n, dtype=np.int64) * PAGE
        locations = np.zeros(n, LOCATION)
        locations["length"] = PAGE
        pieces = np.stack([addresses, np.full(n, PAGE)], axis=1).reshape(n, 1, 2)
        locations["checksum"] = _native.checksum_pages(pieces)
        origins = np.tile(np.array([source, log, number], np.uint64), (n, 1))
        statuses, where = self.guests.store(self.ids, addresses, origins, as_bytes(locations), epoch)
        assert (as_locations(where)["length"] == PAGE).all()
        return list(statuses.tolist())

    def take_back(self, before: int, number: int, n: int | None = None, *, log: int = LOG) -> None:
        """Hear that the source has taken back the first ``n`` pages, or all."""
        body = TAKE_BACK.pack(SOURCE, log, before, number, n is None)
        body += b"" if n is None else self.ids[:n].tobytes()
        request = Request(self.node.address, Kind.TAKE_BACK, body, count=n or 0)
        reply = self.node._parts.control.client.ask(request, 30.0)
        assert reply is not None
        assert reply.ok

    def there(self) -> list[int]:
        """Say which pages are in the pool."""
        return list(self.pool.lookup(self.ids)[0].tolist())


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.node.close()


STORED = [StoreStatus.STORED] * 4
TAKEN_BACK = [StoreStatus.TAKEN_BACK] * 4


def test_what_is_taken_back_goes_and_the_rest_stays(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    assert holder.store(5) == [StoreStatus.EXISTS] * 4
    holder.take_back(5, 6, 2)
    assert holder.there() == [0, 0, 1, 1]
    holder.take_back(6, 7)
    assert holder.there() == [0, 0, 0, 0]


def test_what_was_read_before_a_word_came_is_not_stored_after_it(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    holder.take_back(5, 6, 1)
    assert holder.store(5) == TAKEN_BACK
    assert holder.there() == [0, 0, 0, 0]
    holder.guests.followed(SOURCE, LOG, 6)
    assert holder.store(6) == STORED


def test_a_late_answer_does_not_make_a_word_unheard(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    holder.take_back(5, 6, 1)
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == TAKEN_BACK


def test_nothing_is_stored_of_who_is_not_followed(holder: Holder) -> None:
    assert holder.store(0) == TAKEN_BACK


def test_a_gap_between_words_costs_all_guests_of_their_source(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.take_back(6, 7, 1)
    assert holder.there() == [0, 0, 0, 0]
    assert holder.guests.stats()["sources_lost"] == 1


def test_words_that_come_twice_or_late_cost_nothing_more(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.take_back(5, 7, 1)
    holder.take_back(5, 6, 1)
    assert holder.there() == [0, 1, 1, 1]


def test_a_lost_word_is_noticed_when_the_source_is_asked_a_second_time(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG, 6)
    assert holder.there() == [1, 1, 1, 1]  # it may be on its way
    holder.guests.followed(SOURCE, LOG, 6)
    assert holder.there() == [0, 0, 0, 0]


def test_a_word_that_comes_between_two_questions_was_not_lost(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG, 6)
    holder.take_back(5, 6, 1)
    holder.guests.followed(SOURCE, LOG, 6)
    assert holder.there() == [0, 1, 1, 1]


@pytest.mark.parametrize(("number", "stay"), [(0, 1), (1, 0)])
def test_guests_of_an_earlier_run_stay_if_the_next_has_taken_nothing_back(
    holder: Holder, number: int, stay: int
) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG + 1, number)
    assert holder.there() == [stay] * 4


def test_guests_of_an_earlier_run_go_if_a_word_of_it_never_came(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG, 6)  # and ends before it is asked a second time
    holder.guests.followed(SOURCE, LOG + 1, 0)
    assert holder.there() == [0, 0, 0, 0]


def test_guests_of_an_earlier_run_stay_if_its_last_word_came_late(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG, 6)
    holder.take_back(5, 6, 1)
    holder.guests.followed(SOURCE, LOG + 1, 0)
    assert holder.there() == [0, 1, 1, 1]


def test_guests_of_an_earlier_run_go_if_this_process_has_slept_since_that_answered_last(
    holder: Holder,
) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.guests.followed(SOURCE, LOG + 1, 0, was_out_of_touch=True)
    assert holder.there() == [0, 0, 0, 0]


def test_a_word_of_another_run_costs_all_guests(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.take_back(0, 1, 1, log=LOG + 1)
    assert holder.there() == [0, 0, 0, 0]


def test_another_sources_guests_stay(holder: Holder) -> None:
    holder.guests.followed(SOURCE + 1, LOG, 5)
    assert holder.store(5, source=SOURCE + 1) == STORED
    holder.guests.followed(SOURCE, LOG, 5)
    holder.take_back(5, 6)
    assert holder.there() == [1, 1, 1, 1]
    assert holder.guests.sources() == [SOURCE + 1]


def test_nothing_is_stored_of_an_epoch_that_is_over(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5, epoch=EPOCH + 1) == TAKEN_BACK
    assert holder.there() == [0, 0, 0, 0]


def test_bytes_of_another_checksum_are_not_stored(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    n = len(holder.ids)
    addresses = holder.memory.ctypes.data + np.arange(n, dtype=np.int64) * PAGE
    locations = np.zeros(n, LOCATION)
    locations["length"] = PAGE
    origins = np.tile(np.array([SOURCE, LOG, 5], np.uint64), (n, 1))
    statuses, _ = holder.guests.store(holder.ids, addresses, origins, as_bytes(locations), EPOCH)
    assert statuses.tolist() == [StoreStatus.CHANGED] * n
    assert holder.there() == [0, 0, 0, 0]
    assert holder.pool.stats()["used"] == 0


def test_guests_that_were_evicted_are_forgotten(holder: Holder) -> None:
    holder.guests.followed(SOURCE, LOG, 5)
    assert holder.store(5) == STORED
    holder.pool.retract(holder.ids)
    assert holder.guests.stats()["pages"] == 4
    assert holder.guests.sources() == []
    assert holder.guests.stats()["pages"] == 0
