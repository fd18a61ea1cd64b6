"""What callers of transfers get wrong is refused, clearly, before anything happens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pkv import Config, ConfigError, Node, NotRegisteredError, TransportError, UsageError
from p2pkv.transports.local import LocalTransport
from transfer_pair import TransferPair

NBYTES = 4096


@pytest.fixture(scope="module")
def pair() -> Iterator[TransferPair]:
    pair = TransferPair(64, NBYTES)
    yield pair
    pair.close()


def test_wrong_calls_are_refused_before_anything_happens(pair: TransferPair) -> None:
    transfers, request, rows = pair.producer.transfers, pair.name(), pair.from_rows()
    outside = np.array([[rows[0, 0], NBYTES], [rows[-1, 0], NBYTES + 1]], np.int64)
    with pytest.raises(NotRegisteredError, match="row 1"):
        transfers.offer(request, outside)
    with pytest.raises(NotRegisteredError, match="readable=True"):
        pair.consumer.transfers.offer(request, pair.to_rows())
    for spans in (rows[:0], rows.astype(np.int32), rows[:, :1], rows.tolist(), np.zeros((1, 2), np.int64)):
        with pytest.raises(UsageError):
            transfers.offer(request, spans)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="numbered below"):
        transfers.offer(request, np.broadcast_to(rows[:1], (2**32, 2)))
    for name in ("", "x" * 513, "\ud800", 5):
        with pytest.raises(UsageError, match="name"):
            transfers.offer(name, rows)  # type: ignore[arg-type]
    for seconds in (0, -1, 3601, "1"):
        with pytest.raises(UsageError, match="lease"):
            transfers.offer(request, rows, lease=seconds)  # type: ignore[arg-type]
    for first_row in (-1, 2**31 + 1, 1.5, "1", None):
        with pytest.raises(UsageError, match="first_row"):
            transfers.offer(request, rows, first_row=first_row)  # type: ignore[arg-type]
    for node_id in ("\ud800", b"x", 5, None):
        for call in (transfers.put, transfers.put_async, transfers.get, transfers.get_async):
            with pytest.raises(UsageError, match="node's id"):
                call(node_id, request, rows)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="node's id"):
            transfers.meet(node_id)  # type: ignore[arg-type]


def test_rows_that_are_offered_already_are_refused(pair: TransferPair) -> None:
    request = pair.name()
    offer = pair.producer.transfers.offer(request, pair.from_rows(8, 8), first_row=8)
    for first in (1, 8, 15):
        with pytest.raises(UsageError, match="offered already"):
            pair.producer.transfers.offer(request, pair.from_rows(0, 8), first_row=first)
    for first in (0, 16):
        pair.producer.transfers.offer(request, pair.from_rows(0, 8), first_row=first).withdraw()
    offer.withdraw()


def test_a_request_has_one_open_grant(pair: TransferPair) -> None:
    request = pair.name()
    with (
        pair.consumer.transfers.grant(request, pair.to_rows()),
        pytest.raises(UsageError, match="open grant"),
    ):
        pair.consumer.transfers.grant(request, pair.to_rows())
    pair.consumer.transfers.grant(request, pair.to_rows()).revoke()


def test_memory_nobody_can_read_is_refused() -> None:
    config = Config(transports="shm", pool_size="1MiB")
    with Node.start(config) as node, pytest.raises(TransportError, match="shm"):
        node.register_memory(np.zeros(NBYTES, np.uint8), readable=True)


def test_transports_in_python_take_no_part_and_harm_none() -> None:
    config = Config(transports="tcp", pool_size="1MiB")
    with Node.start(config, extra_transports=[LocalTransport()]) as node:
        memory = node.register_memory(np.zeros(NBYTES, np.uint8), readable=True)
        memory.close()


@pytest.mark.parametrize(
    "settings",
    [{"buffer_size": -1}, {"buddy_pool_size": 2**50}, {"transfer_lease": 0}, {"transfer_lease": 1e9}],
)
def test_settings_are_checked(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Config(**settings)  # type: ignore[arg-type]
