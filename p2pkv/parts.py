"""What a node is made of: built in order from a :class:`~p2pkv.config.Config`, closed in reverse, told of the view."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import zmq

from p2pkv import _native, transports
from p2pkv.address import split_address
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
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import View, node_key
from p2pkv.disk.boot_file import BootFile
from p2pkv.disk.tier import DiskTier, disk_folder
from p2pkv.lifetime import Gate
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.memory.staging import use_library as use_cuda_library
from p2pkv.metrics import Metrics
from p2pkv.offers.transfers import Transfers, start_offers
from p2pkv.page import Namespace
from p2pkv.peers.connections import PeerConnections
from p2pkv.peers.handshakes import Handshakes
from p2pkv.pool import Pool
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.native import native_ways
from p2pkv.transports.ucx import use_library as use_ucx_library

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_NAMES_S = 2.0
"""How long a start waits for the join addresses' names; the node goes on without those that take longer."""
_MAX_SHARD_ENTRIES = 1 << 26
_GRANULE = 4096
"""The pool's smallest block: a page of memory."""


def _whole_granules(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE


class Parts:
    """Everything that runs in a node. The methods below ``close`` are called by the membership engine's thread."""

    def __init__(
        self, config: Config, gate: Gate, extra_transports: Sequence[Transport], clock: Clock, timing: Timing
    ) -> None:
        """Build, start and join; whatever fails, nothing is left running.

        ``gate`` stands around the calls of :attr:`transfers`. ``extra_transports`` come before the configured ones, and
        are closed with the rest.
        """
        self.config = config
        self.own_key = node_key(config.node_id)
        self._boot_file: BootFile | None = None
        self.metrics_port: int | None = None
        self._is_serving = False
        """Whether there are a pool, a cache and an announcer; the view changes before."""
        with ExitStack() as undo:
            self._build(undo, gate, extra_transports, clock, timing)
            self._undo = undo.pop_all()

    def interrupt(self) -> None:
        """Let the calls under way end at once, with misses or ClosedError."""
        self.announcer.stop()
        self.client.close()
        self.channels.close()
        self.peers.interrupt()
        self.devices.interrupt()
        self.offers.close()

    def close(self) -> None:
        """Leave the cluster and release everything; no call may be under way."""
        self._undo.close()

    def _build(
        self, undo: ExitStack, gate: Gate, extra_transports: Sequence[Transport], clock: Clock, timing: Timing
    ) -> None:
        config = self.config
        if config.raise_nofile:
            raise_limit()
        require_descriptors()
        self.metrics = Metrics()
        undo.callback(self.metrics.close)
        self._open_control(undo)
        host, _ = split_address("listen", config.listen)
        advertise, _ = split_address("address", self.server.address)
        self._start_transports(undo, extra_transports, host, advertise)
        self._serve_offers(undo, gate, host, advertise)
        self._open_memory(undo)
        self._open_directory(undo, host, advertise)
        self.membership = self._join(undo, clock, timing)
        self._serve_pool(undo)
        self.metrics.watch(self._readings)
        undo.callback(CountersServer(self.server.loop, self.metrics.counters).close)
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
        self.gossip = ControlClient(context, keys, names)
        undo.callback(self.gossip.close)
        self.client = ControlClient(context, keys, names)
        undo.callback(self.client.close)
        self.shard = _native.Shard(_MAX_SHARD_ENTRIES)
        self.server = ControlServer(
            context, keys, config.listen, self.shard, join=config.join_addresses, names=names
        )
        undo.callback(self.server.close)
        self.server.start()
        self.handshakes = Handshakes(self.client, self.server.loop)

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
        self.transports = [*extra_transports, *started]
        for transport in self.transports:
            undo.callback(transport.close)

    def _serve_offers(self, undo: ExitStack, gate: Gate, host: str, advertise: str) -> None:
        self.offers = start_offers(self.config, native_ways(self.transports), host=host, advertise=advertise)
        undo.callback(self.offers.close)
        self.server.loop.serve_transfers(self.offers)
        self.transfers = Transfers(
            self.offers, self.handshakes.connect, lambda: self.membership.view(), gate, self.config
        )
        """Offers and pulls of registered memory, from one named node to another."""

    def _open_memory(self, undo: ExitStack) -> None:
        self.registrations = Registrations(self.transports, self.offers)
        undo.callback(self.registrations.close)
        self.peers = PeerConnections(self.transports, self.handshakes.connect, self.metrics)
        undo.callback(self.peers.close)
        self.devices = DeviceMemory(self.registrations, self.config.device_staging_nbytes)
        undo.callback(self.devices.close)
        self.registrar = Registrar(self.registrations, self.devices)

    def _open_directory(self, undo: ExitStack, host: str, advertise: str) -> None:
        self.directory_server = _native.directory_server(host, advertise, self.shard)
        undo.callback(self.directory_server.close)
        self.server.loop.serve_directory(self.directory_server)
        self.channels = DirectoryChannels(self.handshakes.connect)
        undo.callback(self.channels.close)
        self.directory = DirectoryClient(
            own_key=self.own_key,
            shard=self.shard,
            client=self.client,
            channels=self.channels,
            replicas=self.config.replicas,
            metrics=self.metrics,
        )

    def _join(self, undo: ExitStack, clock: Clock, timing: Timing) -> Membership:
        config = self.config
        if config.disk_nbytes:
            folder = disk_folder(config)
            self._boot_file = BootFile(folder, config.node_id, makes_parents=config.disk_path is None)
        engine = EmbeddedMembership if config.membership == "embedded" else StaticMembership
        membership = engine(
            ControlNetwork(self.server, self.gossip),
            Identity(
                config.node_id,
                self.peers.domains,
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
                on_confirmed=self.directory.confirm_view,
            ),
            clock=clock,
            timing=timing,
        )
        undo.callback(membership.close)
        membership.start(_JOIN_S)
        return membership

    def _serve_pool(self, undo: ExitStack) -> None:
        config = self.config
        boot = self.membership.boot_epoch
        self.offers.announce(self.own_key, boot)
        pool_nbytes = _whole_granules(config.pool_nbytes)
        has_disk = bool(config.disk_nbytes)
        self.pool = Pool(pool_nbytes, granule=_GRANULE, owner=self.own_key, boot=boot, has_disk=has_disk)
        undo.callback(self.pool.close)
        self.tier = self._open_disk(undo) if has_disk else None
        regions: dict[str, bytes] = {}
        for transport in self.transports:
            region = transport.register_memory(self.pool, self.pool.address, self.pool.nbytes, readable=True)
            undo.callback(region.close)
            regions[transport.name] = region.describe()
        self.handshakes.serve(self.transports, regions)
        undo.callback(self.handshakes.close)
        self.cache = PageCache(
            namespace=Namespace(config.namespace),
            pool=self.pool,
            directory=self.directory,
            peers=self.peers,
            registrations=self.registrations,
            shard=self.shard,
            view=self.membership.view,
            own_key=self.own_key,
            check_sums=config.verify == "checksum",
            metrics=self.metrics,
            devices=self.devices,
            tier=self.tier,
        )
        undo.callback(self.cache.close)
        self.announcer = Announcer(
            self.pool, self.directory, self.metrics, self.tier, check_s=self.config.directory_check
        )
        self._is_serving = True
        undo.callback(self.announcer.close)
        self.announcer.start()
        self.directory.on_missed = self.announcer.owe
        if self.membership.boot_epoch != boot:
            self._rebooted(self.membership.boot_epoch)

    def _open_disk(self, undo: ExitStack) -> DiskTier:
        tier = DiskTier(self.config, self.pool, own_key=self.own_key, boot=self.membership.boot_epoch)
        undo.callback(tier.close)
        self.server.loop.serve_promotions(tier.native)
        return tier

    def _readings(self) -> dict[str, float]:
        pool, shard, loop = self.pool.stats(), self.shard.stats(), self.server.loop.stats()
        directory = self.directory_server.stats()
        return {
            "p2pkv_members": len(self.membership.view().present()),
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
            "p2pkv_refused_strangers_total": self.server.refused,
            **self.membership.counters(),
            **self.offers.readings(),
            **(self.tier.readings() if self.tier is not None else {}),
            **self.devices.readings(),
        }

    def _view_changed(self, old: View, new: View) -> None:
        self.directory.set_view(new)
        self.peers.set_view(new)
        self.transfers.set_view(old, new)
        for member in old.present():
            now = new.get(member.node_id)
            if now is None or not now.is_present or now.boot_epoch != member.boot_epoch:
                self.client.forget(member.address)
                self.gossip.forget(member.address)
                if self._is_serving:
                    self.cache.locations.drop_owner(node_key(member.node_id))
        if self._is_serving:
            self.announcer.ring_changed()

    def _resurrected(self) -> None:
        if self._is_serving:
            self.announcer.owe_everything()

    def _remember_boot(self, boot: int) -> None:
        if self._boot_file is not None:
            self._boot_file.write(boot)

    def _rebooted(self, boot: int) -> None:
        self._remember_boot(boot)
        self.offers.announce(self.own_key, boot)
        if self._is_serving:  # before, the pool is made with the boot of that moment
            if self.tier is not None:
                self.tier.set_boot(boot)
            else:
                self.pool.set_boot(boot)
            self.announcer.owe_everything()

    def _expelled(self, reason: str) -> None:
        _log.error("node %s is no member of its cluster any more: %s", self.config.node_id, reason)
        # Nobody is told of a page any more, so that no publish is taken for one; and nobody is asked.
        self._view_changed(self.membership.view(), View())
