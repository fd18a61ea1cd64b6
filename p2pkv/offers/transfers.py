"""Transfers of one node: offers of its memory, and pulls of what others offer.

Only calls are checked here, and the first connection to a peer is opened. Everything else is native
(``native/src/offers/transfers.h``): offers are made, told, pulled and proven while interpreters are busy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from numbers import Integral

import numpy as np

from p2pkv import _native
from p2pkv.config import Config
from p2pkv.directory.view import State, View
from p2pkv.errors import ConfigError, NotRegisteredError, UsageError
from p2pkv.lifetime import Gate
from p2pkv.limited_log import LimitedLog
from p2pkv.offers.handles import Grant, Offer, RowSpans, RowStatus, RowStatuses
from p2pkv.offers.meeting import DEATH_GRACE_S, Connect, Meeting

_log = logging.getLogger(__name__)

MAX_REQUEST_NAME = 512
MAX_SECONDS = 3600.0
_MAX_ROW = 2**32 - 1
"""Rows are numbered below it, on the wire as well. How many there are is nobody's business: what is too much for one
message goes in several."""
_UNREGISTERED = "lies in no registered memory"
"""How native/src/offers/transfers.cc ends what it says of a row outside every registered memory."""
_CONNECT_S = 1.0
"""What calls that return at once may wait for a peer's first connection."""


def start_offers(
    config: Config,
    ways: Sequence[tuple[int, str, _native.Transport]],
    peers: _native.PeerConnections,
    *,
    host: str,
    advertise: str,
) -> _native.Transfers:
    """Start the native part: listens on ``host``, and has the receive buffer and the buddy pool of ``config``.

    ``ways``: the transports that peers' memory is read over, by number and name, in order of preference; ``peers``
    lend the connections, and number the transports.
    """
    try:
        return _native.Transfers.start(
            host,
            advertise,
            list(ways),
            peers,
            buffer_nbytes=config.buffer_nbytes,
            buddy_pool_nbytes=config.buddy_pool_nbytes,
            staging_nbytes=config.device_staging_nbytes,
            keep_unclaimed_s=config.transfer_lease,
            is_validating=True,
            ports=config.data_port_range,
        )
    except RuntimeError as error:
        raise ConfigError(f"cannot start transfers: {error}{config.ports_advice}") from error


class Transfers:
    """Thread-safe; made by the node, as ``node.transfers``."""

    def __init__(
        self,
        native: _native.Transfers,
        connect: Connect,
        view: Callable[[], View],
        gate: Gate,
        config: Config,
    ) -> None:
        self._native = native
        self._meeting = Meeting(native, connect, view)
        self._gate = gate
        self._timeout = config.deadline
        self._lease = config.transfer_lease
        self._log = LimitedLog(_log)

    def meet(self, node_id: str, boot_epoch: int | None = None, *, timeout: float | None = None) -> bool:
        """Wait until a node is a member, in this boot if one is given, and connect to it; return whether it is one.

        One that has been started anew since is not waited for, and one that is unknown or dead for three seconds at
        most, by all callers together. What can't be connected to in time is there all the same; calls try it again.
        """
        with self._gate:
            deadline = time.monotonic() + self._seconds("timeout", timeout, self._timeout)
            return self._meeting.meet(_checked_node(node_id), boot_epoch, deadline)

    def interrupt(self) -> None:
        """Let nobody wait for a node any more: this one is being closed."""
        self._meeting.close()

    def offer(
        self,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        lease: float | None = None,
        stream: int | None = None,
    ) -> Offer:
        """Leave rows with this node, for whoever asks for ``request``, until one took them or the lease ends.

        Rows in device memory are read when everything queued on the CUDA stream ``stream`` before the call has been
        done; without it the caller has waited for that.
        """
        with self._gate:
            spans, seconds = (
                self._checked(request, spans, first_row),
                self._seconds("lease", lease, self._lease),
            )
            return self._offer(None, request, spans, first_row, seconds, stream)

    def put(
        self,
        node_id: str,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> RowStatuses:
        """Offer rows to one node and wait until it has them; what it has not by ``timeout`` is withdrawn.

        ``stream`` is as in :meth:`offer`.
        """
        with self._gate:
            deadline = time.monotonic() + self._seconds("timeout", timeout, self._timeout)
            spans = self._checked(request, spans, first_row)
            key = self._meeting.reach(_checked_node(node_id), deadline)
            left = max(0.0, deadline - time.monotonic())
            offer = self._offer(key, request, spans, first_row, left, stream)
        offer.wait(max(0.0, deadline - time.monotonic()))
        return offer.end(RowStatus.TIMED_OUT)

    def put_async(
        self,
        node_id: str,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        lease: float | None = None,
        stream: int | None = None,
    ) -> Offer:
        """Offer rows to one node; it pulls the offers of one request in the order in which they were made.

        Returns at once, except when the node is not connected yet: then within a second. ``stream`` is as in
        :meth:`offer`.
        """
        with self._gate:
            seconds = self._seconds("lease", lease, self._lease)
            spans = self._checked(request, spans, first_row)
            key = self._meeting.reach(_checked_node(node_id), time.monotonic() + min(seconds, _CONNECT_S))
            return self._offer(key, request, spans, first_row, seconds, stream)

    def grant(
        self,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Grant:
        """Let peers' puts of ``request`` go straight to these spans, until ``timeout``; takes what has come already.

        Nothing is written to device memory before everything queued on the CUDA stream ``stream`` before the call has
        been done; without it nothing queued anywhere may touch the spans.
        """
        with self._gate:
            seconds = self._seconds("timeout", timeout, self._timeout)
            spans = self._checked(request, spans, first_row)
            return self._grant(None, request, spans, first_row, seconds, stream)

    def receive(
        self,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> RowStatuses:
        """Bring rows that were or will be put to this node into these spans; blocks until all came, or the deadline.

        ``stream`` is as in :meth:`grant`.
        """
        seconds = self._seconds("timeout", timeout, self._timeout)
        grant = self.grant(request, spans, first_row=first_row, timeout=seconds, stream=stream)
        grant.wait(seconds)
        return grant.end(RowStatus.TIMED_OUT)

    def get(
        self,
        node_id: str,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> RowStatuses:
        """Bring rows that ``node_id`` offers into these spans, waiting for those it has not offered yet.

        ``stream`` is as in :meth:`grant`.
        """
        seconds = self._seconds("timeout", timeout, self._timeout)
        deadline = time.monotonic() + seconds
        grant = self._get(
            node_id,
            request,
            spans,
            first_row=first_row,
            connect_by=deadline,
            deadline=deadline,
            stream=stream,
        )
        grant.wait(max(0.0, deadline - time.monotonic()))
        return grant.end(RowStatus.TIMED_OUT)

    def get_async(
        self,
        node_id: str,
        request: str,
        spans: RowSpans,
        *,
        first_row: int = 0,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Grant:
        """Ask for rows as :meth:`get` does; returns at once, or, if the node is not connected yet, within a second."""
        seconds = self._seconds("timeout", timeout, self._timeout)
        now = time.monotonic()
        connect_by = now + min(seconds, _CONNECT_S)
        return self._get(
            node_id,
            request,
            spans,
            first_row=first_row,
            connect_by=connect_by,
            deadline=now + seconds,
            stream=stream,
        )

    def _get(
        self,
        node_id: str,
        request: str,
        spans: RowSpans,
        *,
        first_row: int,
        connect_by: float,
        deadline: float,
        stream: int | None,
    ) -> Grant:
        with self._gate:
            spans = self._checked(request, spans, first_row)
            key = self._meeting.reach(_checked_node(node_id), connect_by)
            left = max(0.0, deadline - time.monotonic())
            return self._grant(key, request, spans, first_row, left, stream)

    def set_view(self, old: View, new: View, *, grace: float = DEATH_GRACE_S) -> None:
        """Hang up on nodes that left or were restarted: their requests are lost at once.

        On those found dead after ``grace`` seconds only, for they may object; an ended process has hung up itself.
        """
        self._meeting.view_changed(new)
        for was in old.values():
            now = new.get(was.node_id)
            if now is None or now.boot_epoch != was.boot_epoch or now.state is State.LEFT:
                self._native.forget(was.key, was.boot_epoch, 0.0)
            elif now.state is State.DEAD and was.is_present:
                self._native.forget(was.key, was.boot_epoch, grace)
            elif now.is_present and was.state is State.DEAD:
                self._native.keep(was.key, was.boot_epoch)

    def _offer(
        self,
        key: int | None,
        request: str,
        spans: RowSpans,
        first_row: int,
        lease: float,
        stream: int | None,
    ) -> Offer:
        try:
            native = self._native.offer(key, request, first_row, spans, lease, stream)
            return Offer(native, request, len(spans), self._report)
        except ValueError as error:
            raise self._explained(error, spans, for_reading=True) from error

    def _grant(
        self,
        key: int | None,
        request: str,
        spans: RowSpans,
        first_row: int,
        timeout: float,
        stream: int | None,
    ) -> Grant:
        try:
            native = self._native.grant(key, request, first_row, spans, timeout, stream)
            return Grant(native, request, len(spans), self._report)
        except ValueError as error:
            raise self._explained(error, spans, for_reading=False) from error

    def _report(self) -> None:
        """Log why rows of devices failed."""
        if reason := self._native.device_failure():
            self._log.warning(reason, "rows in device memory failed: %s", reason)

    def _explained(self, error: ValueError, spans: RowSpans, *, for_reading: bool) -> UsageError:
        bad_row = self._native.find_unregistered(spans, for_reading)
        if bad_row < 0 and str(error).endswith(_UNREGISTERED):
            # it was closed, and is somebody else's by now
            return NotRegisteredError(f"{error}; register it first")
        if bad_row < 0:
            return UsageError(str(error))
        address, nbytes = (int(value) for value in spans[bad_row])
        kind = "readable" if for_reading else "writable"
        return NotRegisteredError(
            f"row {bad_row}, {nbytes} bytes at {address:#x}, lies in no {kind} registered memory; register it first"
            + (", with readable=True" if for_reading else "")
        )

    def _checked(self, request: str, spans: RowSpans, first_row: int) -> RowSpans:
        if not 1 <= _utf8_length(request) <= MAX_REQUEST_NAME:
            raise UsageError(
                f"a request's name must be a string of 1 to {MAX_REQUEST_NAME} bytes of UTF-8, not {request!r:.80}"
            )
        if not isinstance(spans, np.ndarray) or spans.dtype != np.int64 or spans.shape[1:] != (2,):
            raise UsageError("spans must be an (n, 2) int64 array of addresses and lengths")
        if not len(spans):
            raise UsageError("an offer or grant has one row at least")
        if not 0 <= _whole_number(first_row) <= 2**31:
            raise UsageError(f"first_row must be 0 to 2**31, not {first_row!r}")
        if first_row + len(spans) > _MAX_ROW:
            raise UsageError(f"rows are numbered below {_MAX_ROW}; these end at {first_row + len(spans)}")
        if int(spans.min()) <= 0:
            row = int(np.argmin(spans.min(axis=1)))
            raise UsageError(f"row {row} has address {spans[row, 0]} and length {spans[row, 1]}")
        return np.ascontiguousarray(spans)

    def _seconds(self, name: str, given: float | None, default: float) -> float:
        seconds = default if given is None else given
        if isinstance(seconds, (bool, str, bytes)) or not 0 < seconds <= MAX_SECONDS:
            raise UsageError(f"{name} must be above 0 and at most {MAX_SECONDS:g} seconds, not {seconds!r}")
        return seconds


def _checked_node(node_id: str) -> str:
    if _utf8_length(node_id) < 0:
        raise UsageError(f"a node's id must be a string of UTF-8, not {node_id!r:.80}")
    return node_id


def _utf8_length(text: object) -> int:
    """Return how many bytes of UTF-8 a string has; -1 for what is none, or holds half of a surrogate pair."""
    try:
        return len(text.encode()) if isinstance(text, str) else -1
    except UnicodeEncodeError:
        return -1


def _whole_number(value: object) -> int:
    """Return an integer of any kind; -1 for what is none."""
    return -1 if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
