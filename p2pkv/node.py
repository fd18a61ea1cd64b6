"""A node: builds the parts from a :class:`~p2pkv.config.Config`, starts them in order and closes them in reverse."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import zmq

from p2pkv import _native, lifetime, transports
from p2pkv.address import split_address
from p2pkv.arrays.host import HostArray, SupportsCudaArray
from p2pkv.cache.page_cache import PageCache
from p2pkv.config import Config
from p2pkv.control.counters import CountersServer
from p2pkv.control.host_names import Names
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import MAX_SOCKETS, ControlClient, ControlServer, Socket
from p2pkv.descriptors import raise_limit, require_descriptors
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.membership.base import Identity, Listeners, Membership
from p2pkv.directory.membership.control_network import ControlNetwork
from p2pkv.directory.membership.embedded import EmbeddedMembership
from p2pkv.directory.membership.static import StaticMembership
from p2pkv.directory.membership.timing import Clock, SystemClock, Timing
from p2pkv.directory.view import Member, View, node_key
from p2pkv.disk.boot_file import BootFile
from p2pkv.disk.tier import DiskTier, disk_folder
from p2pkv.errors import UsageError
from p2pkv.lifetime import Gate
from p2pkv.memory.registered import Memory
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.memory.staging import use_library as use_cuda_library
from p2pkv.metrics import Metrics
from p2pkv.offers.transfers import Transfers, start_offers
from p2pkv.page import Namespace, Outcomes, Pages
from p2pkv.peers.connections import PeerConnections, PeerTraffic
from p2pkv.peers.handshakes import Handshakes
from p2pkv.pool import Pool
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.native import native_ways
from p2pkv.transports.ucx import use_library as use_ucx_library

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_NAMES_S = 2.0
"""How long a start waits for the join addresses' names; the node goes on without those that take longer."""
_MAX_SHARD_ENTRIES = 1 << 26
_GRANULE = 4096
"""The pool's smallest block: a page of memory."""


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE


class Node:
    """One process's part of a cluster: a pool of published pages, a shard of the directory, and ways to the peers.

    Make one with :meth:`start`. Every method may be called from any thread; calls take at most ``timeout`` seconds
    (the configured ``deadline`` by default) plus 100 ms, whatever hangs, and after they have returned nothing writes
    to the caller's memory any more.
    """

    _clock: Clock = SystemClock()  # tests set it back
    _timing = Timing()  # and are more patient where a machine is emulated

    def __init__(self, config: Config, extra_transports: Sequence[Transport] = ()) -> None:
        """Build without joining; use :meth:`start`."""
        self.config = config
        self._gate = Gate(f"node {config.node_id}")
        self._key = node_key(config.node_id)
        with ExitStack() as undo:
            self._build(undo, extra_transports)
            self._undo = undo.pop_all()
        lifetime.watch(self, self._gate)

    @classmethod
    def start(cls, config: Config, *, extra_transports: Sequence[Transport] = ()) -> Self:
        """Start a node and join its cluster; blocks until it is a member, a few seconds at most.

        ``extra_transports`` come before the configured ones in the order of preference; the node closes them.
        Raises :class:`~p2pkv.errors.ConfigError`, :class:`~p2pkv.errors.DuplicateNodeError` if a live node has this
        id, and :class:`~p2pkv.errors.ControlError` if the address can't be listened on.
        """
        return cls(config, extra_transports)

    def _build(self, undo: ExitStack, extra_transports: Sequence[Transport]) -> None:
        config = self.config
        if config.raise_nofile:
            raise_limit()
        require_descriptors()
        self.metrics = Metrics()
        undo.callback(self.metrics.close)
        self._open_control(undo)
        host, _ = split_address("listen", config.listen)
        advertise, _ = split_address("address", self._server.address)
        self._start_transports(undo, extra_transports, host, advertise)
        self._serve_offers(undo, host, advertise)
        self._open_memory(undo)
        self._open_directory(undo, host, advertise)
        self._announcer: Announcer | None = None
        self._cache: PageCache | None = None
        self._boot_file: BootFile | None = None
        self._membership = self._join(undo)
        self._serve_pool(undo)
        self.metrics.watch(self._readings)
        undo.callback(CountersServer(self._server.loop, self.metrics.counters).close)
        if config.metrics_port is not None:
            self.metrics_port = self.metrics.serve(host, config.metrics_port)

    def _open_control(self, undo: ExitStack) -> None:
        config = self.config
        keys = cluster_keys(config.secret_file)
        context: zmq.Context[Socket] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        # Not `term`, which waits for sockets that a call lost when it was interrupted. By then nobody uses any.
        undo.callback(context.destroy, 0)
        # Membership has a client of its own: closing cuts calls short, but still says good-bye to the peers.
        names = Names()
        names.wait_for(config.join_addresses, _NAMES_S)
        self._gossip = ControlClient(context, keys, names)
        undo.callback(self._gossip.close)
        self._client = ControlClient(context, keys, names)
        undo.callback(self._client.close)
        self._shard = _native.Shard(_MAX_SHARD_ENTRIES)
        self._server = ControlServer(
            context, keys, config.listen, self._shard, join=config.join_addresses, names=names
        )
        undo.callback(self._server.close)
        self._server.start()
        self._handshakes = Handshakes(self._client, self._server.loop)

    def _start_transports(
        self, undo: ExitStack, extra_transports: Sequence[Transport], host: str, advertise: str
    ) -> None:
        config = self.config
        wanted = "auto" if config.transport_names == ("auto",) else config.transport_names
        use_ucx_library(config.ucx_library)
        use_cuda_library(config.cuda_library)
        started = transports.create(
            wanted,
            TransportSettings(
                host=host,
                advertise=advertise,
                registered_nbytes=config.registered_nbytes,
                verbs_devices=tuple(config.verbs_devices),
                ucx_trust_network=bool(config.ucx_trust_network),
            ),
        )
        self._transports = [*extra_transports, *started]
        for transport in self._transports:
            undo.callback(transport.close)

    def _serve_offers(self, undo: ExitStack, host: str, advertise: str) -> None:
        self._offers = start_offers(
            self.config, native_ways(self._transports), host=host, advertise=advertise
        )
        undo.callback(self._offers.close)
        self._server.loop.serve_transfers(self._offers)
        self.transfers = Transfers(
            self._offers, self._handshakes.connect, lambda: self._membership.view(), self._gate, self.config
        )
        """Offers and pulls of registered memory, from one named node to another."""

    def _open_memory(self, undo: ExitStack) -> None:
        self._registrations = Registrations(self._transports, self._offers)
        undo.callback(self._registrations.close)
        self._peers = PeerConnections(self._transports, self._handshakes.connect, self.metrics)
        undo.callback(self._peers.close)
        self._devices = DeviceMemory(self._registrations, self.config.device_staging_nbytes)
        undo.callback(self._devices.close)
        self._registrar = Registrar(self._registrations, self._devices)

    def _open_directory(self, undo: ExitStack, host: str, advertise: str) -> None:
        self._directory_server = _native.directory_server(host, advertise, self._shard)
        undo.callback(self._directory_server.close)
        self._server.loop.serve_directory(self._directory_server)
        self._channels = DirectoryChannels(self._handshakes.connect)
        undo.callback(self._channels.close)
        self._directory = DirectoryClient(
            own_key=self._key,
            shard=self._shard,
            client=self._client,
            channels=self._channels,
            replicas=self.config.replicas,
            metrics=self.metrics,
        )

    def _join(self, undo: ExitStack) -> Membership:
        config = self.config
        if config.disk_nbytes:
            folder = disk_folder(config)
            self._boot_file = BootFile(folder, config.node_id, makes_parents=config.disk_path is None)
        engine = EmbeddedMembership if config.membership == "embedded" else StaticMembership
        membership = engine(
            ControlNetwork(self._server, self._gossip),
            Identity(
                config.node_id,
                self._peers.domains,
                cluster=config.cluster,
                last_boot_epoch=self._boot_file.read() if self._boot_file is not None else 0,
            ),
            join=config.join_addresses,
            listeners=Listeners(
                on_change=self._view_changed,
                on_resurrected=self._resurrected,
                on_expelled=self._expelled,
                on_reboot=self._rebooted,
                on_claimed=self._remember_boot,
                on_confirmed=self._directory.confirm_view,
            ),
            clock=self._clock,
            timing=self._timing,
        )
        undo.callback(membership.close)
        membership.start(_JOIN_S)
        return membership

    def _serve_pool(self, undo: ExitStack) -> None:
        config = self.config
        boot = self._membership.boot_epoch
        self._offers.announce(self._key, boot)
        pool_nbytes = _whole_granules(config.pool_nbytes)
        has_disk = bool(config.disk_nbytes)
        self._pool = Pool(pool_nbytes, granule=_GRANULE, owner=self._key, boot=boot, has_disk=has_disk)
        undo.callback(self._pool.close)
        self._tier = self._open_disk(undo) if has_disk else None
        regions: dict[str, bytes] = {}
        for transport in self._transports:
            region = transport.register_memory(
                self._pool, self._pool.address, self._pool.nbytes, readable=True
            )
            undo.callback(region.close)
            regions[transport.name] = region.describe()
        self._handshakes.serve(self._transports, regions)
        undo.callback(self._handshakes.close)
        self._cache = PageCache(
            namespace=Namespace(config.namespace),
            pool=self._pool,
            directory=self._directory,
            peers=self._peers,
            registrations=self._registrations,
            shard=self._shard,
            view=self._membership.view,
            own_key=self._key,
            check_sums=config.verify == "checksum",
            metrics=self.metrics,
            devices=self._devices,
            tier=self._tier,
        )
        undo.callback(self._cache.close)
        self._announcer = Announcer(
            self._pool, self._directory, self.metrics, self._tier, check_s=self.config.directory_check
        )
        undo.callback(self._announcer.close)
        self._announcer.start()
        self._directory.on_missed = self._announcer.owe
        if self._membership.boot_epoch != boot:
            self._rebooted(self._membership.boot_epoch)

    def _open_disk(self, undo: ExitStack) -> DiskTier:
        tier = DiskTier(self.config, self._pool, own_key=self._key, boot=self._membership.boot_epoch)
        undo.callback(tier.close)
        self._server.loop.serve_promotions(tier.native)
        return tier

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
            return self._registrar.register(buffer, nbytes, is_readable=readable)

    def register_address(
        self, address: int, nbytes: int, owner: object = None, *, readable: bool = False
    ) -> Memory:
        """Let calls read and write ``nbytes`` at ``address``, and with ``readable`` let peers read them.

        The address may be one of CUDA device memory, which is then as in :meth:`register_memory`.
        The memory must stay valid until the result is closed; ``owner``, if given, is kept alive until then. If
        ``owner`` is a :class:`~p2pkv._native.SharedRegion` and this is all of it, it is readable over shm as well.
        """
        with self._gate:
            return self._registrar.register_address(address, nbytes, owner, is_readable=readable)

    def publish(
        self,
        keys: Sequence[str | bytes],
        pages: Pages,
        *,
        timeout: float | None = None,
        stream: int | None = None,
    ) -> Outcomes:
        """Copy pages into this node's pool and announce them; blocks until the directory knows.

        ``pages`` lies in registered memory: an array whose row ``i`` is page ``i``, or :class:`Pieces`. Pages of one
        namespace and key always have the same bytes: a key that is published already is not copied again. Returns
        ``(n,)`` uint8: ``Outcome.HIT`` for each page that any node can fetch now. When the pool is full, the least
        recently used pages go; if a batch is larger than the pool, its first pages are kept.

        Pages in device memory are read when everything queued on the CUDA stream ``stream`` before the call has been
        done (0: the legacy default stream). Without one, an array's own protocol says what comes first; of
        :class:`Pieces` the caller must know that their bytes are there.

        Raises :class:`~p2pkv.errors.UsageError`, before anything is stored, for an empty batch, a key twice, a page
        that no pool of this size holds, a length that differs from the published one, and memory that is not
        registered.
        """
        with self._gate:
            return self._started.publish(keys, pages, self._deadline(timeout), stream=stream)

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
            return self._started.fetch(keys, pages, self._deadline(timeout), stream=stream)

    def exists(self, keys: Sequence[str | bytes], *, timeout: float | None = None) -> Outcomes:
        """Say which pages some live node has: ``(n,)`` uint8 of :class:`Outcome`. A hint: pages may be evicted."""
        with self._gate:
            return self._started.exists(keys, self._deadline(timeout))

    def retract(self, keys: Sequence[str | bytes], *, timeout: float | None = None) -> Outcomes:
        """Take back pages that this node published: ``Outcome.HIT`` for those it had."""
        with self._gate:
            return self._started.retract(keys, self._deadline(timeout))

    def clear(self) -> int:
        """Take back every page that this node published; return their number. The directory hears of it soon."""
        with self._gate:
            return self._started.clear(self._deadline(None))

    def members(self) -> list[Member]:
        """Return a record for each live node, this one included: id, boot epoch, state, addresses."""
        with self._gate:
            return sorted(self._membership.view().present(), key=lambda member: member.node_id)

    def peers(self) -> list[PeerTraffic]:
        """Return what this node has read from whom, over which transport."""
        with self._gate:
            return self._peers.traffic()

    def counters(self) -> dict[str, float]:
        """Return every counter and reading by the name of its metric, labels in braces."""
        with self._gate:
            return self.metrics.counters()

    def _readings(self) -> dict[str, float]:
        pool, shard, loop = self._pool.stats(), self._shard.stats(), self._server.loop.stats()
        directory = self._directory_server.stats()
        return {
            "p2pkv_members": len(self._membership.view().present()),
            "p2pkv_pool_capacity_bytes": pool["capacity"],
            "p2pkv_pool_used_bytes": pool["used"],
            "p2pkv_pool_pinned_bytes": pool["pinned_bytes"],
            "p2pkv_pool_pages": pool["pages"],
            "p2pkv_stored_pages_total": pool["stored_pages"],
            "p2pkv_evicted_pages_total": pool["evicted_pages"],
            "p2pkv_no_room_pages_total": pool["no_room_pages"],
            "p2pkv_dropped_evictions_total": pool["dropped_evictions"],
            "p2pkv_shard_entries": shard["entries"],
            "p2pkv_shard_tombstones": shard["tombstones"],
            "p2pkv_shard_bytes": shard["nbytes"],
            "p2pkv_control_requests_total": loop["requests"],
            "p2pkv_directory_requests_total": directory["requests"],
            "p2pkv_directory_channels": directory["channels"],
            "p2pkv_malformed_requests_total": loop["malformed"],
            "p2pkv_dropped_events_total": loop["dropped_events"],
            "p2pkv_refused_strangers_total": self._server.refused,
            **self._membership.counters(),
            **self._offers.readings(),
            **(self._tier.readings() if self._tier is not None else {}),
            **self._devices.readings(),
        }

    @property
    def node_id(self) -> str:
        """The id this node has in the cluster."""
        return self.config.node_id

    @property
    def address(self) -> str:
        """``host:port`` of the control socket."""
        return self._server.address

    def close(self) -> None:
        """Leave the cluster and release everything. Idempotent.

        Calls under way end at once, with misses or :class:`~p2pkv.errors.ClosedError`. A signal's handler may close a
        node in the middle of a call; then the end of that call releases everything. A node that is not closed when
        the interpreter ends is closed then. In a forked child it is closed from the beginning; the parent's goes on.
        """
        if self._gate.shut():
            lifetime.forget(self)
            if self._announcer is not None:
                self._announcer.stop()
            self._client.close()
            self._channels.close()
            self._peers.interrupt()
            self._devices.interrupt()
            self._offers.close()
            self._gate.drain(self._undo.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _started(self) -> PageCache:
        assert self._cache is not None
        return self._cache

    def _deadline(self, timeout: float | None) -> float:
        seconds = self.config.deadline if timeout is None else timeout
        if isinstance(seconds, (bool, str, bytes)) or not 0 < seconds <= 3600:
            raise UsageError(f"timeout must be above 0 and at most 3600 seconds, not {seconds!r}")
        return time.monotonic() + seconds

    def _view_changed(self, old: View, new: View) -> None:
        self._directory.set_view(new)
        self._peers.set_view(new)
        self.transfers.set_view(old, new)
        for member in old.present():
            now = new.get(member.node_id)
            if now is None or not now.is_present or now.boot_epoch != member.boot_epoch:
                self._client.forget(member.address)
                self._gossip.forget(member.address)
                if self._cache is not None:
                    self._cache.locations.drop_owner(node_key(member.node_id))
        if self._announcer is not None:
            self._announcer.ring_changed()

    def _resurrected(self) -> None:
        if self._announcer is not None:
            self._announcer.owe_everything()

    def _remember_boot(self, boot: int) -> None:
        if self._boot_file is not None:
            self._boot_file.write(boot)

    def _rebooted(self, boot: int) -> None:
        self._remember_boot(boot)
        self._offers.announce(self._key, boot)
        if self._announcer is not None:  # before it is there, the pool is made with the boot of that moment
            if self._tier is not None:
                self._tier.set_boot(boot)
            else:
                self._pool.set_boot(boot)
            self._announcer.owe_everything()

    def _expelled(self, reason: str) -> None:
        _log.error("node %s is no member of its cluster any more: %s", self.config.node_id, reason)
        # Nobody is told of a page any more, so that no publish is taken for one; and nobody is asked.
        self._view_changed(self._membership.view(), View())
