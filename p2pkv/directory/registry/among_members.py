"""A registry without a store: the members of one cluster carry the records of smaller ones, those of tenants.

A node with tenants tells its fellow members, in news that nodes without tenants read as a view of nobody, the sealed
record of each tenant's node in it. Who has the same tenant opens the record with that tenant's secret; everybody else
drops it, unread and unkept. So a tenant's nodes find each other wherever the nodes around them do, and what is said of
them costs nothing to those whom it does not concern.

A record that nobody has acknowledged is told again; what somebody lost later, a few random members are told anew all
the time, and gossip among the tenant's nodes does the rest.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from secrets import randbits

import msgspec

from p2pkv.directory.membership.base import ProbeReply
from p2pkv.directory.registry.seal import MAX_RECORD_BYTES, Seal
from p2pkv.directory.registry.store import Listing, Outranks, Registry
from p2pkv.directory.view import VIEW_VERSION, Member, View
from p2pkv.errors import VersionError, ViewError
from p2pkv.limited_log import LimitedLog
from p2pkv.message_types import worked_out
from p2pkv.page import name_digest

_log = logging.getLogger(__name__)

SENDER = "p2pkv-tenant"
"""What such news call their sender: it speaks for a tenant, and as no member."""
_MAX_NEWS = MAX_RECORD_BYTES + 256
_TELL_S = 0.5
_AGAIN_S = 0.5
"""Until who did not answer is told once more."""
_ANEW_S = 5.0
"""How often a few members are told what they have acknowledged before."""
_FEW = 3
_FIRST_S = 0.5
"""How long a tenant's node that starts waits for the first record of another one; most have come by then."""

Tell = Callable[[Sequence[tuple[str, bytes]], float], Sequence[ProbeReply | None]]
"""Hands messages to addresses, as :meth:`p2pkv.directory.membership.base.Network.tell` does."""


class TenantNews(msgspec.Struct, frozen=True):
    """A tenant's node says where it is, to those who can open its record."""

    name: bytes
    """The digest of the tenant's name."""
    record: bytes


class _News(msgspec.Struct):
    tenant: TenantNews | None = None


@worked_out
class _Told(msgspec.Struct):
    """A view without members: what nodes that know of no tenants read."""

    tenant: TenantNews
    version: int = VIEW_VERSION
    sender: str = SENDER
    members: tuple[()] = ()


_decoder = msgspec.msgpack.Decoder(_News)


class TenantRegistry(Registry):
    """One tenant's records, as the members around this node carry them. Thread-safe."""

    def __init__(
        self, seal: Seal, where: str, changed: Callable[[], None], has_others: Callable[[], bool]
    ) -> None:
        self._seal = seal
        self._where = where
        self._changed = changed
        self._has_others = has_others
        self._condition = threading.Condition()  # it guards the records, and is notified when one comes
        self._records: dict[str, tuple[Member, bytes]] = {}
        self._listing = Listing({}, is_current=True)
        self._on_change: Callable[[], None] = lambda: None
        self._n_refused = 0
        self._limited = LimitedLog(_log)
        self.own: bytes | None = None
        """The record of this node, as it is told to others; None: there is none."""

    @property
    def where(self) -> str:
        return self._where

    def open(self, name: str, outranks: Outranks, on_change: Callable[[], None], deadline_s: float) -> None:
        with self._condition:
            self._on_change = on_change
            if self._has_others():
                self._condition.wait_for(lambda: bool(self._records), min(_FIRST_S, deadline_s))

    def listing(self) -> Listing:
        return self._listing

    def claim(self, value: bytes, over: Collection[bytes], deadline_s: float) -> bytes | None:
        """Have the record told; whose an id is, the tenant's nodes settle as those of any cluster do."""
        self.publish(value)
        return None

    def publish(self, value: bytes | None) -> None:
        self.own = value
        self._changed()

    def counters(self) -> dict[str, int]:
        return {"p2pkv_registry_up": 1, "p2pkv_registry_failures_total": self._n_refused}

    def close(self) -> None:
        self.own = None

    def take(self, record: bytes) -> None:
        """Take a record that a member has brought; one that the tenant's secret has not sealed changes nothing."""
        try:
            member = self._seal.open(record)
        except (ViewError, VersionError) as error:
            self._n_refused += 1
            self._limited.warning("refused", "a record among %s is refused: %s", self._where, error)
            return
        with self._condition:
            known = self._records.get(member.node_id)
            if known is not None and known[0].precedence >= member.precedence:
                return
            self._records[member.node_id] = (member, record)
            self._list()
            on_change = self._on_change
        on_change()

    def forget(self, node_ids: Collection[str]) -> None:
        """Drop the records of nodes that were members and are gone."""
        with self._condition:
            gone = self._records.keys() & node_ids
            if not gone:
                return
            for node_id in gone:
                del self._records[node_id]
            self._list()
            on_change = self._on_change
        on_change()

    def _list(self) -> None:
        self._listing = Listing(
            {name: record for name, (_, record) in self._records.items()}, is_current=True
        )
        self._condition.notify_all()


class RecordExchange:
    """A member's part in carrying records: it takes those of its own tenants, and tells its own. Thread-safe.

    The thread ``p2pkv-tenants`` runs from construction to :meth:`close`.
    """

    def __init__(self, seals: Mapping[str, Seal], cluster: str, own_id: str, tell: Tell) -> None:
        """``seals``: by the names of this node's tenants, what their records are sealed with."""
        self._own_id = own_id
        self._tell = tell
        self._random = Random(randbits(64))  # noqa: S311 - whom to tell anew, nothing secret
        self._view = View()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._told: set[tuple[str, int, bytes, bytes]] = set()
        self._limited = LimitedLog(_log)
        self._registries = {
            name: TenantRegistry(
                seal,
                f"the members of cluster {cluster!r}",
                self._changed.set,
                lambda: len(self._others()) > 0,
            )
            for name, seal in seals.items()
        }
        self._by_digest = {name_digest(name): registry for name, registry in self._registries.items()}
        self._thread = threading.Thread(target=self._run, name="p2pkv-tenants", daemon=True)
        self._thread.start()

    def registry(self, tenant: str) -> TenantRegistry:
        """Return where the node of this tenant finds its fellows."""
        return self._registries[tenant]

    def take(self, blob: bytes) -> bool:
        """Take what a peer has handed to this node, if it is a tenant's news; whether it was."""
        if len(blob) > _MAX_NEWS:
            return False
        try:
            news = _decoder.decode(blob).tenant
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False  # whoever reads it as a view says so
        if news is None:
            return False
        registry = self._by_digest.get(news.name)
        if registry is not None:
            registry.take(news.record)
        return True

    def set_view(self, view: View) -> None:
        """Tell those who have come, and forget what those said who are gone."""
        present = {member.node_id for member in view.present()}
        gone = {member.node_id for member in self._view.present()} - present
        self._view = view
        for registry in self._registries.values():
            registry.forget(gone)
        self._changed.set()

    def close(self) -> None:
        """Carry no more; waits for the thread. Idempotent."""
        self._closing.set()
        self._changed.set()
        self._thread.join()

    def _others(self) -> list[Member]:
        return [member for member in self._view.present() if member.node_id != self._own_id]

    def _run(self) -> None:
        wait, anew_at = math.inf, time.monotonic() + _ANEW_S
        while not self._closing.is_set():
            self._changed.wait(max(0.0, min(wait, anew_at - time.monotonic())))
            self._changed.clear()
            if self._closing.is_set():
                break
            is_anew = time.monotonic() >= anew_at
            if is_anew:
                anew_at = time.monotonic() + _ANEW_S
            try:
                wait = math.inf if self._tell_others(is_anew=is_anew) else _AGAIN_S
            except Exception as error:  # noqa: BLE001 - the top of a thread's loop; it is logged
                self._limited.error(
                    "turn", "the records of tenants could not be told; it is tried again", exc_info=error
                )
                wait = _AGAIN_S

    def _tell_others(self, *, is_anew: bool) -> bool:
        """Tell each member each record that it has not acknowledged; whether all have acknowledged all."""
        others = self._others()
        again = {m.node_id for m in self._random.sample(others, min(_FEW, len(others)))} if is_anew else set()
        wanted = {
            (member.node_id, member.boot_epoch, digest, record): member.address
            for member in others
            for digest, registry in self._by_digest.items()
            if (record := registry.own) is not None
        }
        self._told = {told for told in self._told if told in wanted and told[0] not in again}
        missing = [told for told in wanted if told not in self._told]
        if not missing:
            return True
        messages = [(wanted[told], _packed(told[2], told[3])) for told in missing]
        replies = self._tell(messages, _TELL_S)
        self._told.update(told for told, reply in zip(missing, replies, strict=True) if reply is not None)
        return len(self._told) == len(wanted)


def _packed(digest: bytes, record: bytes) -> bytes:
    return msgspec.msgpack.encode(_Told(TenantNews(digest, record)))
