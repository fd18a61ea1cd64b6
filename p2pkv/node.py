"""A node: the calls that everything else is built upon. What it is made of stands in ``p2pkv/parts``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from p2pkv import lifetime
from p2pkv._native import FaultyFiles
from p2pkv.arrays.host import HostArray, SupportsCudaArray
from p2pkv.attach.auto import decided
from p2pkv.attach.cache import AttachedCache
from p2pkv.cache.call_limit import LimitedCache
from p2pkv.cache.drained import DRAIN_SLACK_S, MAX_DRAIN_S, Drained
from p2pkv.cache.hand_overs import HandOver
from p2pkv.cache.page_cache import PageCache
from p2pkv.cache.pins import Pin
from p2pkv.cache.prefetch import MAX_TIMEOUT_S, Prefetch
from p2pkv.config import Config
from p2pkv.directory.epochs import Bump
from p2pkv.directory.membership.timing import Clock, SystemClock, Timing
from p2pkv.directory.view import Member
from p2pkv.errors import ConfigError, UsageError
from p2pkv.explain.asking import question_about
from p2pkv.explain.explanation import Explanation
from p2pkv.lifetime import Gate
from p2pkv.memory.registered import Memory
from p2pkv.offers.transfers import Transfers
from p2pkv.page import Outcomes, Pages, Whereabouts
from p2pkv.parts.attached import AttachedParts
from p2pkv.parts.attached_caching import AttachedCaching
from p2pkv.parts.cache import CacheParts
from p2pkv.parts.node import NodeParts
from p2pkv.parts.tenants import Place, TenantNodes, limited, plan_tenants, reached_as
from p2pkv.peers.connections import PeerTraffic
from p2pkv.transports.base import Transport

if TYPE_CHECKING:
    from typing_extensions import Self


class Node:
    """One process's part of a cluster: a pool of published pages, a shard of the directory, and its connections.

    Make one with :meth:`start`. Every method may be called from any thread; calls take at most ``timeout`` seconds
    (the configured ``deadline`` by default) plus 100 ms, whatever hangs, and after they have returned nothing writes
    to the caller's memory any more.
    """

    _clock: Clock = SystemClock()  # tests set it back
    _timing = Timing()  # and are more patient where a machine is emulated
    _disk_faults: FaultyFiles | None = None  # and have disks fail

    def __init__(
        self, config: Config, extra_transports: Sequence[Transport] = (), place: Place | None = None
    ) -> None:
        """Build without joining; use :meth:`start`. A tenant's node has a ``place`` in the node around it."""
        self.config = config = decided(config)
        """The settings as given, but that what was ``auto`` of attaching is decided."""
        self._gate = Gate(f"node {config.node_id}")
        self._is_closed = False
        place = place or Place(plan_tenants(config))
        with ExitStack() as undo:
            self._parts = self._build(extra_transports, place)
            undo.callback(self._parts.close)
            self._tenants = TenantNodes(
                place.tenants,
                self._parts.records,
                lambda config, place: Node(reached_as(config, self._parts.address), place=place),
            )
            undo.pop_all()
        self.metrics = self._parts.metrics
        self._limit, self._limited = place.limit, None
        if isinstance(self._parts, NodeParts):
            self._tenants.attend(self._parts)
            if self._limit is not None and self._parts.caching is not None:
                self._limited = limited(self._parts.caching.cache, self._limit, self.metrics)
        self.metrics_port = self._parts.metrics_port
        """Where metrics are served, if anywhere."""
        self.indexer_port = self._parts.indexer_port
        """Where indexer queries are answered, if anywhere."""
        events = None if self._parts.caching is None else self._parts.caching.events
        self.kv_events_endpoint = None if events is None else events.endpoint
        """Where KV events are published, with the port that was taken; None without ``kv_events``."""
        self.kv_events_replay_endpoint = None if events is None else events.replay_endpoint
        """Where missed ones are asked for; None without ``kv_events_replay``."""
        lifetime.watch(self, self._gate)

    def _build(self, extra_transports: Sequence[Transport], place: Place) -> NodeParts | AttachedParts:
        if self.config.attach:
            return AttachedParts(self.config, extra_transports)
        return NodeParts(
            self.config,
            self._gate,
            extra_transports,
            self._clock,
            self._timing,
            self._disk_faults,
            place,
        )

    @classmethod
    def start(cls, config: Config, *, extra_transports: Sequence[Transport] = ()) -> Self:
        """Start a node and join its cluster; blocks until it is a member, a few seconds at most.

        ``extra_transports`` come before the configured ones in the order of preference; the node closes them.
        Raises :class:`~p2pkv.errors.ConfigError`, :class:`~p2pkv.errors.DuplicateNodeError` if a live node has this
        id, and :class:`~p2pkv.errors.ControlError` if the address can't be listened on.
        """
        if not isinstance(config, Config):
            raise ConfigError(
                f"Node.start takes a Config, not {type(config).__name__}; Config.load(...) makes one of a mapping or "
                "of a JSON file"
            )
        return cls(config, extra_transports)

    def tenant(self, name: str) -> Node:
        """Return the node of a tenant: its calls are those of this node, in the tenant's namespace and pool.

        It has memory registered with it by itself, and ends with this node. Raises
        :class:`~p2pkv.errors.UsageError` if the setting ``tenants`` has no such name: this node lacks its secret.
        """
        tenant = self._tenants.by_name.get(name)
        if tenant is None:
            names = ", ".join(self._tenants.by_name) or "none"
            raise UsageError(
                f"node {self.node_id} has no tenant {name!r}, it has {names}; give it the tenant's secret_file in the "
                "setting tenants"
            )
        return tenant

    def register_memory(
        self, buffer: HostArray | SupportsCudaArray, *, nbytes: int | None = None, readable: bool = False
    ) -> Memory:
        """Let calls read and write ``buffer``, a C-contiguous array; it is kept alive until the result is closed.

        Takes a numpy array, or memory of anything with DLPack or ``__cuda_array_interface__``: tensors of torch, arrays
        of CuPy, on a CPU or a CUDA device. What is on a device goes through page-locked host memory, which the first
        such call makes (``device_staging_size``; docs/transports.md, GPU memory).

        ``nbytes`` registers only its beginning. ``readable`` memory can be offered to peers, who then may read it all.
        Registrations must not overlap. Raises :class:`~p2pkv.errors.TransportError` if no transport can do it, and
        :class:`~p2pkv.errors.DeviceError` if the device or its driver can't.
        """
        with self._gate:
            return self._parts.registrar.register(buffer, nbytes, is_readable=readable)

    def register_address(
        self, address: int, nbytes: int, owner: object = None, *, readable: bool = False
    ) -> Memory:
        """Let calls read and write ``nbytes`` at ``address``, and with ``readable`` let peers read them.

        The address may be one of CUDA device memory, which is then as in :meth:`register_memory`.
        The memory must stay valid until the result is closed; ``owner``, if given, is kept alive until then. If
        ``owner`` is a :class:`~p2pkv.SharedRegion` and this is all of it, peers of this host can map it.
        """
        with self._gate:
            return self._parts.registrar.register_address(address, nbytes, owner, is_readable=readable)

    def publish(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        *,
        timeout: float | None = None,
        stream: int | None = None,
        epoch: int | None = None,
    ) -> Outcomes:
        """Copy pages into this node's pool and announce them; blocks until the directory knows.

        ``pages`` lies in registered memory: an array whose row ``i`` is page ``i``, or :class:`Pieces`. Pages of one
        namespace and key always have the same bytes: a key that is published already is not copied again. Returns
        ``(n,)`` uint8: ``Outcome.HIT`` for each page that any node can fetch now. When the pool is full, the least
        recently used pages go; if a batch is larger than the pool, its first pages are kept.

        Pages in device memory are read when everything queued on the CUDA stream ``stream`` before the call has been
        done (0: the legacy default stream). Without one, an array's own protocol says what comes first; of
        :class:`Pieces` the caller must know that their bytes are there.

        ``epoch`` is that of the pages, :attr:`epoch` as it was when what they were computed from was current: if the
        namespace was bumped since, none of them is published. Without it they are of the epoch at the call.

        Raises :class:`~p2pkv.errors.UsageError`, before anything is stored, for an empty batch, a key twice, a page
        that no pool of this size holds, a length that differs from the published one, and memory that is not
        registered.
        """
        with self._gate:
            return self._cache.publish(keys, pages, self._deadline(timeout), stream=stream, epoch=epoch)

    def fetch(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        *,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Outcomes:
        """Bring pages into registered memory, from whichever node has them.

        Returns ``(n,)`` uint8: ``Outcome.HIT`` where the memory holds exactly the published bytes; the memory of a
        ``MISS`` holds anything. ``pages``, ``stream`` and errors are as in :meth:`publish`: device memory is written
        when what is queued on the stream has been done, and kernels launched after the return see it.
        """
        with self._gate:
            return self._cache.fetch(keys, pages, self._deadline(timeout), stream=stream)

    def exists(
        self, keys: Sequence[str | bytes], *, leading: bool = False, timeout: float | None = None
    ) -> Outcomes:
        """Say which pages some live node has: ``(n,)`` uint8 of :class:`Outcome`. A hint: pages may be evicted.

        With ``leading`` it is asked how many come without a gap from the first on: those after the first ``MISS`` may
        be said to be missing, which saves a large cluster most of its questions about pages that nobody has.
        """
        with self._gate:
            return self._cache.exists(keys, self._deadline(timeout), leading=leading)

    def whereabouts(
        self, keys: Sequence[str | bytes], *, leading: bool = False, timeout: float | None = None
    ) -> Whereabouts:
        """Say as :meth:`exists` does which pages some live node has, and which one, in memory or on disk."""
        with self._gate:
            return self._cache.whereabouts(keys, self._deadline(timeout), leading=leading)

    def retract(self, keys: Sequence[str | bytes], *, timeout: float | None = None) -> Outcomes:
        """Take back pages that this node published: ``Outcome.HIT`` for those it had.

        What others have prefetched of them goes as well, by the end of the call where its holders answer in time.
        """
        with self._gate:
            return self._cache.retract(keys, self._deadline(timeout))

    def prefetch(self, keys: Sequence[str | bytes], *, timeout: float = 30.0) -> Prefetch:
        """Begin to bring pages that other nodes have, in memory or on disk, into this node's pool.

        Returns at once; what comes of it stands in the result, which can be waited for, polled and closed. Pages are
        brought front first, in the background, for ``timeout`` seconds at most, after the prefetches that wait already:
        those that are here stay, those on this node's own disk come back, and others are read from their owners. One
        prefetch fills ``prefetch_share`` of the pool at most, in the place of what was used longest ago.

        What was brought is found here as what was published here is, by others too, and stays when its owner evicts
        it or dies. If the owner takes it back (:meth:`retract`, :meth:`clear`), or the namespace is bumped, it goes
        here as well. It does not go to this node's disk, and is not prefetched from here by a third node.

        Raises :class:`~p2pkv.errors.UsageError` for an empty batch, a key twice and a timeout that is none.
        """
        with self._gate:
            if isinstance(timeout, (bool, str, bytes)) or not 0 < timeout <= MAX_TIMEOUT_S:
                raise UsageError(
                    f"timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, not {timeout!r}"
                )
            epoch, ids = self._cache.hash(keys)
            return self._caching.prefetcher.submit(ids, epoch, time.monotonic() + timeout)

    def pin(self, keys: Sequence[str | bytes], ttl: float) -> Pin:
        """Keep pages in this node's pool for ``ttl`` seconds (a day at most), whatever is published meanwhile.

        Only what is in the pool now can be pinned: prefetch first. All pins together hold ``pin_share`` of the pool
        at most, the front of the batch first; the result says which pages were pinned, and releases them.
        A pinned page can be taken back. Never blocks.

        Raises :class:`~p2pkv.errors.UsageError` for an empty batch, a key twice and a ttl that is none.
        """
        with self._gate:
            return self._caching.pins.pin(self._cache.hash(keys)[1], ttl)

    def hand_over(self, keys: Sequence[str | bytes], to: str, *, timeout: float | None = None) -> HandOver:
        """Ask the node ``to`` to prefetch pages that this node has; that node reads them when it has time.

        Blocks for its answer only, which says how many it accepts, and why no more if that is not all: it has as many
        prefetches waiting as it takes, is of another namespace, of a p2pkv that knows no hand-overs, or not there.

        Raises :class:`~p2pkv.errors.UsageError` for an empty batch, a key twice, and this node's own id.
        """
        with self._gate:
            if to == self.node_id:
                raise UsageError(f"{to!r} is this node itself; name another one to hand pages over to")
            return self._caching.hand_over(keys, to, self._deadline(timeout))

    def drain(self, seconds: float) -> Drained:
        """Hand this node's pages over to others, those used last first, before it is closed; blocks until that is done.

        It takes ``seconds`` at most. From the call on this node stores nothing that is published, which is a ``MISS``
        and counts as ``draining`` in ``p2pkv_unpublished_pages_total``, and holds no part of the directory; it serves
        what it has until it is closed. At the end it lets go of its pages: who has them owns them as if he had
        published them, and :meth:`retract` and :meth:`clear` raise :class:`~p2pkv.errors.ClosedError` here. A bump
        holds for them as for all pages. What only its disk has stays there, for the next run of this node.

        Others take pages into the room that they have free, and beyond it each in the place of a share of its own pool,
        one part of as many as there are pools, those used longest ago. Whoever calls again gets the same answer, and
        who calls before that is known waits for his ``seconds`` at most, and is told so.

        Raises :class:`~p2pkv.errors.UsageError` for a time that is none.
        """
        with self._gate:
            drainer = self._caching.drainer
            deadline = time.monotonic() + _drain_seconds(seconds) + DRAIN_SLACK_S
            self._tenants.begin_drain(seconds)
            return self._tenants.drain_with(drainer.drain(seconds), deadline)

    def begin_drain(self, seconds: float) -> None:
        """Do the same in the background: :attr:`drained` says when it is done. Never blocks. So do tenants' nodes."""
        with self._gate:
            drainer = self._caching.drainer
            self._tenants.begin_drain(_drain_seconds(seconds))
            drainer.begin(seconds)

    @property
    def drained(self) -> Drained | None:
        """What became of this node's pages, once it has drained, whoever asked it to; None before.

        Those of tenants' nodes are counted in.
        """
        caching = self._parts.caching
        return None if caching is None else self._tenants.drained(caching.drained)

    @property
    def draining_within(self) -> float | None:
        """Seconds within which this node was told to hand its pages over, whoever told it; None: nobody has."""
        caching = self._parts.caching
        return None if caching is None else caching.drainer.seconds

    def clear(self) -> int:
        """Take back every page that this node published; return their number. The directory hears of it soon."""
        with self._gate:
            return self._cache.clear(self._deadline(None))

    @property
    def epoch(self) -> int:
        """The epoch of this node's namespace: what :meth:`bump` raises; 0 before the first."""
        return self._parts.own_epoch

    def bump(self, namespace: str | None = None, *, timeout: float | None = None) -> Bump:
        """Have nothing that was published in a namespace so far be found any more, by any node, in memory or on disk.

        For when the same keys will stand for other bytes: the weights of a model were replaced under its name. Of a
        namespace that others are made from, as integrations do, all of them are meant: ``"prod"`` is for
        ``"prod vllm model=..."`` too. The default is this node's own.

        Blocks until every member has taken back what it had, or for ``timeout`` seconds; the result says who has and
        who has not. When it returns, no call that begins later on a node that has heard finds a page of before, and a
        call that began earlier may. Pages that are published by then may be lost, which is a miss.
        Raises :class:`~p2pkv.errors.UsageError` for an empty name.
        """
        with self._gate:
            name = self.config.namespace if namespace is None else namespace
            if not isinstance(name, str) or not name:
                raise UsageError(f"a namespace is called by a text that is not empty, not {namespace!r}")
            tenant = self._tenants.by_name.get(name.split(" ")[0])
            if tenant is not None:
                return tenant.bump(name, timeout=timeout)
            return self._parts.epochs.bump(name, self._deadline(timeout))

    def explain(self, key: str | bytes, *, timeout: float | None = None) -> Explanation:
        """Say where a page is, or why it is not there, as all members know it: for people, not for the hot path.

        Blocks until every member has answered, or for ``timeout`` seconds. What nodes remember of pages that went is
        bounded (65,536 of them each), and gone when they are restarted: ``remembers_since`` says how far it reaches.
        """
        with self._gate:
            seconds = self._deadline(timeout) - time.monotonic()
            return self._parts.explainer.explain(question_about(key), seconds)

    def follow_kv_events(self, follower: Callable[[str, str, Sequence[bytes]], None]) -> None:
        """Have ``follower`` told in this process what ``kv_events`` tells subscribers, from all that is there on.

        It is called in order by a thread of the node, and must neither block nor raise: ``follower("BlockStored",
        "CPU", keys)``, ``("BlockRemoved", "STORAGE", keys)``, or ``("AllBlocksCleared", "", ())``.
        Of an attached engine it is told of the pages in memory that this very engine publishes from then on, and needs
        no setting: of all others, and of disks, the host's node tells.
        Raises :class:`~p2pkv.errors.UsageError` without ``kv_events``.
        """
        with self._gate:
            events = None if self._parts.caching is None else self._parts.caching.events
            if events is None:
                raise UsageError("there are no KV events to follow; set kv_events")
            events.follow(follower)

    def members(self) -> list[Member]:
        """Return a record for each live node, this one included: id, boot epoch, state, addresses."""
        with self._gate:
            return sorted(self._parts.view().present(), key=lambda member: member.node_id)

    def routers(self) -> Sequence[str]:
        """Return the heartbeat addresses of the routers that have told this node that they are there.

        They tell members; an attached engine hears of them from its host's node, some seconds later.
        """
        return self._parts.routers.addresses()

    def peers(self) -> list[PeerTraffic]:
        """Return what this node has read from whom, over which transport."""
        with self._gate:
            return self._parts.peers.traffic()

    def counters(self) -> dict[str, float]:
        """Return every counter and reading by the name of its metric, labels in braces."""
        with self._gate:
            return self.metrics.counters()

    @property
    def node_id(self) -> str:
        """The id this node has in the cluster."""
        return self.config.node_id

    @property
    def owner_id(self) -> str:
        """The id of the node that has what is published here: this one, or an attached engine's host's node."""
        return self._parts.owner_id

    @property
    def address(self) -> str:
        """``host:port`` of the control socket."""
        return self._parts.address

    def close(self) -> None:
        """Leave the cluster and release everything. Idempotent.

        Calls under way end at once, with misses or :class:`~p2pkv.errors.ClosedError`. A signal's handler may close a
        node in the middle of a call; then the end of that call releases everything. A node that is not closed when
        the interpreter ends is closed then. In a forked child it is closed from the beginning; the parent's goes on.
        """
        if self._gate.shut():
            lifetime.forget(self)
            self._parts.interrupt()
            self._is_closed = True
            if self._limit is not None:
                self._limit.close()
            try:
                self._tenants.close()
            finally:
                self._gate.drain(self._parts.close)

    @property
    def is_closed(self) -> bool:
        """Whether this node has left its cluster, or is about to."""
        return self._is_closed

    def __repr__(self) -> str:
        return f"<p2pkv.Node {self.node_id!r} at {self.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def transfers(self) -> Transfers:
        """Offers and pulls of registered memory, from one named node to another."""
        return self._parts.transfers

    @property
    def _cache(self) -> PageCache | AttachedCache | LimitedCache:
        if self._limited is not None:
            return self._limited
        caching = self._parts.caching
        if caching is None:
            raise self._without_cache()
        return caching.cache

    @property
    def _caching(self) -> CacheParts | AttachedCaching:
        caching = self._parts.caching
        if caching is None:
            raise self._without_cache()
        return caching

    def _without_cache(self) -> UsageError:
        return UsageError(
            f"node {self.node_id} has no cache, because its pool_size is 0: it makes and takes offers only; set "
            "pool_size to publish and fetch pages"
        )

    def _deadline(self, timeout: float | None) -> float:
        seconds = self.config.deadline if timeout is None else timeout
        if isinstance(seconds, (bool, str, bytes)) or not 0 < seconds <= 3600:
            raise UsageError(f"timeout must be above 0 and at most 3600 seconds, not {seconds!r}")
        return time.monotonic() + seconds


def _drain_seconds(seconds: float) -> float:
    if isinstance(seconds, (bool, str, bytes)) or not 0 <= seconds <= MAX_DRAIN_S:
        raise UsageError(f"seconds must be 0 to {MAX_DRAIN_S:.0f}, not {seconds!r}")
    return seconds
