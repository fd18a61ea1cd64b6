"""The data path of an attached engine: it publishes through its host's node, and reads everybody's pool itself.

- *Publish*: the node pulls the pages out of the engine's memory into its own pool, and they are its pages from then on.
  Those in device memory come through memory that the engine copies them to (``device_publishing.py``).
  Its native thread tells its own shard of the directory; this engine tells the others, in the node's name and under the
  node's number, so that no call waits for the node's interpreter.
- *Fetch, exists*: as in a node, by the same code, with the host's node's pool in place of an own one: what lies there
  is found in its memory, whether or not the directory knows of it, and while the node is stopped or away.
- *Epochs*: the node shows a number that grows with every bump it hears of. Who sees another one asks before it hashes
  a key, so that a bump the node has heard of holds for its engines as well. While the node is no member, or does not
  say that it is awake, nobody hears for them: then each call asks another member first, and misses if none answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from p2pkv import _native
from p2pkv.attach.device_publishing import DevicePublishing, Stored, why_unstored
from p2pkv.attach.misfit import misfit
from p2pkv.attach.own_host import OwnHost
from p2pkv.attach.own_pages import OwnPages
from p2pkv.attach.unsettled import Unsettled
from p2pkv.cache.call import PageCall, check_call
from p2pkv.cache.page_cache import PageCache
from p2pkv.control.sockets import ControlClient, Request
from p2pkv.control.wire import Kind, pack_epochs, unpack_epochs
from p2pkv.directory.client import DirectoryClient
from p2pkv.errors import ControlError, UsageError
from p2pkv.memory.registrations import Registrations
from p2pkv.metrics import Metrics
from p2pkv.page import Keys, Outcomes, Pages, Whereabouts, as_locations

_ELSEWHERE_S = 0.2
"""How long a call waits for what another member knows of epochs, while the host's node is away; a guess."""


class AttachedCache:
    """Thread-safe. ``deadline`` is a time of ``time.monotonic()``; calls return by then."""

    def __init__(
        self,
        *,
        reader: PageCache,
        own_host: OwnHost,
        directory: DirectoryClient,
        client: ControlClient,
        registrations: Registrations,
        epochs: _native.NamespaceEpochs,
        learn_elsewhere: Callable[[float], bool | None],
        unsettled: Unsettled,
        own_pages: OwnPages,
        metrics: Metrics,
    ) -> None:
        """``reader`` fetches; it has a pool without pages.

        ``learn_elsewhere`` has some other member say what it knows of epochs, by a deadline: whether one has, and None
        if there is no other.
        """
        self._reader = reader
        self._from_devices = DevicePublishing(reader.device_pages, reader.locations)
        self._own_host = own_host
        self._directory = directory
        self._client = client
        self._registrations = registrations
        self._epochs = epochs
        self._learn_elsewhere = learn_elsewhere
        self._unsettled = unsettled
        self.own_pages = own_pages
        unsettled.node = lambda: own_host.attachment
        self._metrics = metrics
        self._known: tuple[_native.Attachment, int] | None = None
        """The node, and its number of bumps, as of when its epochs were asked for last."""
        self._deaf: _native.Attachment | None = None
        """The node, if it has not answered the last call that asked for its epochs."""
        self.is_host_member = True
        """Whether the view has the host's node as a member, so that no bump is over before it has heard of it."""

    def publish(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        deadline: float,
        *,
        stream: int | None = None,
        epoch: int | None = None,
    ) -> Outcomes:
        """Have the host's node store pages; ``HIT`` for those that any node can fetch now."""
        began = time.monotonic()
        attachment = self._own_host.attachment
        if attachment is not None:
            attachment.call_ahead()
        is_fresh = attachment is not None and self._learn_epochs(deadline)
        in_epoch, ids = self._reader.hash(keys)
        call = check_call(ids, pages, self._registrations.table, stream, writable=False)
        if attachment is None or not is_fresh:
            return self._unpublished("host", len(ids))
        if epoch is not None and epoch != in_epoch:
            return self._unpublished("epoch", len(ids))
        beside = self._directory.beside(attachment.node_key)
        stored = self._store(attachment, beside.table, call, deadline)
        published = stored.published
        if published.is_draining:
            return self._unpublished("draining", len(ids))
        outcomes = published.is_known()
        n_published = published.n_known
        now = self._directory.beside(attachment.node_key)
        if not published.is_told or beside is not now:
            beside = now
            outcomes = self._tell(attachment.node_key, call.ids, published, outcomes, deadline)
            n_published = int(np.count_nonzero(outcomes))
        # As all mostly are, none has to be picked out, which takes a while for many.
        is_all = n_published == len(call.ids)
        known = call.ids if is_all else call.ids[outcomes.astype(bool)]
        self._unsettled.add(known)
        self.own_pages.add(known)
        if beside is not self._directory.beside(attachment.node_key):
            self.tell_unsettled(deadline)  # the view has changed before they were among what is told then
        self._count(stored, n_published, began)
        return outcomes

    def _store(
        self, attachment: _native.Attachment, ring: _native.RingTable, call: PageCall, deadline: float
    ) -> Stored:
        if call.device_of is not None:
            return self._from_devices.publish(attachment, ring, call, deadline)
        left = deadline - time.monotonic()
        published = attachment.publish(call.ids, call.pieces, left, ring, self._reader.locations)
        page = published.misfit
        if page is not None:
            raise misfit(
                page, int(call.lengths[page]), int(as_locations(published.locations())["length"][page])
            )
        return Stored(published, published.stored_bytes, why_unstored(published))

    def tell_unsettled(self, deadline: float = math.inf) -> None:
        """Have the host's node see to what was told by an earlier view. To be called when another one is gone by."""
        self._unsettled.call_due()
        self._unsettled.tell_due(deadline - time.monotonic())

    def _tell(
        self,
        host: int,
        ids: Keys,
        published: _native.AttachedPublish,
        outcomes: Outcomes,
        deadline: float,
    ) -> Outcomes:
        """Tell the owners of entries that the node's own shard is not; return which pages some owner knows of."""
        there = np.flatnonzero(published.is_found())
        sequences, locations = published.sequences(), as_locations(published.locations())
        for sequence in np.unique(sequences[there]).tolist():  # one, but for a batch of several requests
            rows = there[sequences[there] == sequence]
            outcomes[rows] |= self._directory.put_beside(
                host, outcomes[rows], ids[rows], locations[rows], deadline, sequence=sequence
            )
        return outcomes

    def _count(self, stored: Stored, n_published: int, began: float) -> None:
        metrics = self._metrics
        for reason, n_pages in stored.unstored.items():
            metrics.count(metrics.unpublished_pages, reason, n_pages)
        metrics.count(metrics.unpublished_pages, "no_directory", stored.published.n_found - n_published)
        metrics.published_pages.inc(n_published)
        metrics.published_bytes.inc(stored.nbytes)
        metrics.timings.publishes.native.add(0, stored.nbytes, time.monotonic() - began)

    def _unpublished(self, reason: str, n_pages: int) -> Outcomes:
        self._metrics.count(self._metrics.unpublished_pages, reason, n_pages)
        return np.zeros(n_pages, np.uint8)

    def fetch(
        self, keys: Sequence[str | bytes], pages: Pages, deadline: float, *, stream: int | None = None
    ) -> Outcomes:
        """As :meth:`PageCache.fetch`."""
        had_pool = self._own_host.pool.get() is not None
        if not self._learn_epochs(deadline):
            return self._missed(len(self._reader.hash(keys)[1]))
        outcomes = self._reader.fetch(keys, pages, deadline, stream=stream)
        if not had_pool and self._own_host.pool.get() is not None:
            # the pool has come meanwhile, and whether the epochs were its own nobody had asked
            return self._missed(int(np.count_nonzero(outcomes)), of=len(outcomes))
        return outcomes

    def _missed(self, n_pages: int, *, of: int | None = None) -> Outcomes:
        self._metrics.count(self._metrics.missed_pages, "host", n_pages)
        return np.zeros(n_pages if of is None else of, np.uint8)

    def exists(self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False) -> Outcomes:
        """As :meth:`PageCache.exists`. A hint: it does not look whether the pool has come meanwhile."""
        if not self._learn_epochs(deadline):
            return np.zeros(len(self._reader.hash(keys)[1]), np.uint8)
        return self._reader.exists(keys, deadline, leading=leading)

    def whereabouts(
        self, keys: Sequence[str | bytes], deadline: float, *, leading: bool = False
    ) -> Whereabouts:
        """As :meth:`PageCache.whereabouts`."""
        if not self._learn_epochs(deadline):
            return Whereabouts.nowhere(len(self._reader.hash(keys)[1]))
        return self._reader.whereabouts(keys, deadline, leading=leading)

    def hash(self, keys: Sequence[str | bytes]) -> tuple[int, Keys]:
        """As :meth:`PageCache.hash`."""
        return self._reader.hash(keys)

    def retract(self, keys: Sequence[str | bytes], deadline: float) -> Outcomes:
        """Refuse: the pages are the node's, and may be other engines' as well."""
        raise unsupported("take pages back")

    def clear(self, deadline: float) -> int:
        """Refuse, as :meth:`retract` does."""
        raise unsupported("take all pages back")

    def _learn_epochs(self, deadline: float) -> bool:
        """Know every bump that the node has heard of; False if it knows of one and does not say which.

        Costs two loads of shared memory, unless there was a bump. While the node is away, or stopped for so long that a
        bump may be over without it, it is every bump that another member has heard of, and costs a question: what lies
        in the node's pool is found all the same.
        """
        attachment = self._own_host.attachment
        if attachment is not None:
            is_believed = self.is_host_member and attachment.is_believed
            if not self.learn_from(attachment, deadline):
                return False
            if is_believed:
                return True
        if self._own_host.pool.get() is None:
            return True  # nothing is read but pools of nodes that live, which take back what a bump names
        told = self._learn_elsewhere(min(deadline, time.monotonic() + _ELSEWHERE_S))
        if told is None:  # then nobody but the node can have heard of a bump
            return attachment is not None or self._known == self._own_host.lost
        return told or self._is_believed_again(attachment, deadline)

    def _is_believed_again(self, attachment: _native.Attachment | None, deadline: float) -> bool:
        """Rely on the node after all: it was late itself while nobody else has answered, on a busy machine."""
        return (
            attachment is not None
            and self.is_host_member
            and attachment.is_believed
            and self.learn_from(attachment, deadline)
        )

    def learn_from(self, attachment: _native.Attachment, deadline: float) -> bool:
        """Know every bump that this node has heard of; False if it does not say which in time."""
        version = attachment.epochs_version
        if self._known == (attachment, version):
            return True
        told = self._epochs.all()
        request = Request(attachment.address, Kind.EPOCHS, pack_epochs(told), count=len(told))
        patience = _ELSEWHERE_S if attachment is self._deaf else math.inf
        reply = self._client.ask(request, min(patience, max(0.0, deadline - time.monotonic())))
        if reply is None or not reply.ok:
            self._deaf = attachment  # by which others don't wait for all of their time as well
            return False
        self._deaf = None
        try:
            self._epochs.raise_to(unpack_epochs(reply.body, reply.count))
        except (ControlError, ValueError):
            return False
        self._known = (attachment, version)
        return True

    def drop_owner(self, owner: int) -> None:
        """Forget where pages of a node lie that has gone, or was restarted."""
        self._reader.locations.drop_owner(owner)

    def readings(self) -> dict[str, float]:
        """As :meth:`PageCache.readings`."""
        return {
            **self._reader.readings(),
            "p2pkv_fetched_guest_pages_total": self._reader.n_hosts_guests,
        }

    def close(self) -> None:
        """As :meth:`PageCache.close`."""
        self._reader.close()


def unsupported(what: str) -> UsageError:
    """Say that an attached engine can't do this."""
    return UsageError(
        f"an attached engine can't {what}: the pages are its host's node's; do it there (docs/attach.md has what an "
        "attached engine can do)"
    )
