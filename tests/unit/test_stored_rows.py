"""Rows that came before their grant: whoever looks after the grant copies them, by its deadline."""

from __future__ import annotations

import numpy as np

from p2pkv.transfers import RowStatus
from transfer_pair import TransferPair

N_ROWS, NBYTES = 1024, 65536
BLINK = 0.001
"""In which no processor copies 64 MiB."""


def test_stored_rows_are_copied_until_the_deadline_and_the_rest_is_there_for_the_next_grant() -> None:
    pair = TransferPair(N_ROWS, NBYTES, buffer_size=N_ROWS * NBYTES)
    try:
        name = pair.name()
        put = pair.producer.transfers.put(pair.consumer.node_id, name, pair.from_rows(), timeout=30.0)
        assert (put == RowStatus.OK).all()
        late = pair.consumer.transfers.grant(name, pair.to_rows(), timeout=BLINK)
        statuses = late.wait(30.0)
        assert statuses[-1] == RowStatus.TIMED_OUT
        first = int(np.argmax(statuses != RowStatus.OK))
        assert (statuses[first:] == RowStatus.TIMED_OUT).all()
        rest = pair.consumer.transfers.grant(name, pair.to_rows(first), first_row=first, timeout=30.0)
        while not rest.done():
            rest.wait(BLINK)  # each goes on where the one before has stopped
        assert (rest.statuses() == RowStatus.OK).all()
        assert pair.is_right()
        assert pair.counter("p2pkv_receive_buffer_used_bytes") == 0
    finally:
        pair.close()
