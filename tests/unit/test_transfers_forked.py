"""A forked child leaves the transfers of its parent alone, whatever it was in the middle of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from forked import forked, leave
from p2pkv import ClosedError
from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair

N, NBYTES = 4, 4096


def _refuses(*calls: Callable[[], object]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            with pytest.raises(ClosedError, match="forked"):
                call()
        raise SystemExit(7)

    return call_all


def test_a_forked_child_that_leaves_its_parents_transfers_ends_none_of_them() -> None:
    pair = TransferPair(N, NBYTES)
    producer, consumer = pair.producer.transfers, pair.consumer.transfers
    memory = pair.consumer.register_memory(np.zeros(NBYTES, np.uint8), readable=True)
    grant = consumer.get_async(pair.producer.node_id, name := pair.name(), pair.to_rows(), timeout=60.0)
    offer = producer.offer(pair.name(), pair.from_rows(), lease=60.0)
    for in_child in (
        leave(grant),
        leave(memory),
        _refuses(grant.done, grant.statuses, grant.revoke, lambda: grant.wait(1.0)),
        _refuses(offer.done, offer.statuses, offer.withdraw, offer.stow, lambda: offer.wait(1.0)),
    ):
        assert forked(in_child) == 7
        # over the link of before, on which a word of the child's would be none of its parent's
        other = pair.name()
        producer.put_async(pair.consumer.node_id, other, pair.from_rows(), lease=60.0)
        assert (consumer.receive(other, pair.to_rows(), timeout=60.0) == RowStatus.OK).all()
        assert not offer.done()
    producer.offer(name, pair.from_rows())
    assert (grant.wait(60.0) == RowStatus.OK).all()
    assert pair.is_right(0, N)
    memory.close()
    pair.close()
