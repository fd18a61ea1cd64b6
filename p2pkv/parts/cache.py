"""The cache of a node: its pool, its disk, its part of the directory, and the calls that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from p2pkv import _native
from p2pkv.attach.host import Host
from p2pkv.cache.departures import Departures
from p2pkv.cache.drain import Drainer
from p2pkv.cache.drained import Drained
from p2pkv.cache.guests import Followers, Sources, TakingBack
from p2pkv.cache.hand_overs import HandOver, HandOvers
from p2pkv.cache.page_cache import PageCache
from p2pkv.cache.pins import Pins
from p2pkv.cache.prefetcher import Prefetcher
from p2pkv.cache.take_overs import Receiver, TakeOvers
from p2pkv.cache.touching import Touching
from p2pkv.cache.working_set import WorkingSetWatch
from p2pkv.config import Config
from p2pkv.directory.announcer import Announcer
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.view import Member, View, node_key
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ConfigError
from p2pkv.kv_events.feed import LOG_CAPACITY, EventFeed
from p2pkv.kv_events.messages import Hashes
from p2pkv.kv_events.publisher import EventPublisher
from p2pkv.memory import copies
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.metrics import Metrics, Readings
from p2pkv.page import Namespace, scopes
from p2pkv.parts.cache_figures import CacheFigures
from p2pkv.parts.control import ControlParts
from p2pkv.parts.hot_guests import start_hot_guests
from p2pkv.parts.kept_pool import KeptPool
from p2pkv.peers.connections import PeerConnections
from p2pkv.transports.base import Transport

OTHER_HOLDERS = 16384
"""Keys whose other holders are remembered: a quarter of the location cache's, 3.5 MiB once all are in use."""


class CacheParts:
    """Knows the directory from its making on, has a pool from :meth:`open_pool` on, answers from :meth:`serve` on."""

    def __init__(
        self,
        config: Config,
        own_key: int,
        namespace: Namespace,
        control: ControlParts,
        metrics: Metrics,
        undo: ExitStack,
    ) -> None:
        self._config = config
        self._own_key = own_key
        self._namespace = namespace
        self._control = control
        self._metrics = metrics
        self._is_serving = False
        self._boot = 0
        self.attach_host: Host | None = None  # what engines attach to, where `attach_listen` is set
        self.on_drain: Callable[[float], None] = lambda _: None
        """Called when this node begins to hand its pages over, to leave: it tells its peers."""
        self.on_settled: Callable[[], None] = lambda: None
        """Called when a pool that was gone on with is announced anew: its earlier boots are over."""
        self._departures = Departures()
        self._others: Mapping[int, Member] = {}  # the members that pages are read from, by their keys
        self.figures = CacheFigures(self, control, metrics, own_key)
        self._changes = _native.ChangeLog(LOG_CAPACITY if config.kv_events else 0, control.history)
        self.events: EventFeed | None = None
        """None where `kv_events` is not set, and before `serve`."""
        control.epochs.follow(scopes(config.namespace))
        try:
            self.directory_server = _native.directory_server(
                control.host, control.advertise, control.shard, config.data_port_range
            )
        except RuntimeError as error:
            raise ConfigError(f"cannot serve the directory: {error}{config.ports_advice}") from error
        undo.callback(self.directory_server.close)
        control.server.loop.serve_directory(self.directory_server)
        self.channels = DirectoryChannels(control.handshakes.connect, lambda: self.directory.ring.seated)
        undo.callback(self.channels.close)
        self._other_holders = _native.OtherHolders(OTHER_HOLDERS) if config.hedge else None
        self.directory = DirectoryClient(
            own_key=own_key,
            shard=control.shard,
            client=control.client,
            channels=self.channels,
            replicas=config.replicas,
            metrics=metrics,
            others=self._other_holders,
        )

    def open_pool(self, kept: KeptPool, transports: Sequence[Transport], undo: ExitStack) -> None:
        """Make the pool, and let peers read it. Before this node is a member: a large one takes a minute."""
        self.pool = kept.make(self._changes)
        self.kept = kept
        undo.callback(self._end_pool)
        undo.callback(self.pool.close)
        if kept.is_kept:
            # before a key is hashed: what a bump took back in the life before is not found in this one either
            self._control.epochs.raise_to(self.pool.native.first_epochs())
            self._control.epochs.keep_in(self.pool.native)
        self._left_epoch = self._control.epochs.own
        self.guests = _native.Guests(self.pool.native, self._control.epochs)
        """It knows which pages of the pool are other nodes', and who has pages of this one."""
        self._control.server.loop.await_guests()
        # before it has pages; memory that nobody has touched would say how fast the kernel clears it
        is_fresh = self._config.prefault != "behind" and not kept.n_adopted
        copies.choose(self._config.copy_kernel, self.pool.native if is_fresh else None)
        self._let_peers_read(transports, undo)
        self.directory_server.serve_touches(self.pool.native)
        undo.callback(self.directory_server.serve_touches, None)
        self._publisher = self._take_event_ports(undo)

    def serve(
        self,
        boot: int,
        registrations: Registrations,
        peers: PeerConnections,
        devices: DeviceMemory,
        registrar: Registrar,
        undo: ExitStack,
        disk_faults: _native.FaultyFiles | None = None,
    ) -> None:
        """Begin to answer calls and announce what is published, as a member under ``boot``."""
        config = self._config
        self._boot = boot
        self.pool.set_boot(boot)
        self.tier = self._open_disk(boot, undo, disk_faults) if config.disk_nbytes else None
        # Not before: without a boot nobody would believe where its pages lie, nor ask who knows it.
        tier = None if self.tier is None else self.tier.native
        self._control.shard.serve_held(self.pool.native, self.guests, tier)
        undo.callback(self._control.shard.serve_held, None)
        epochs = self._control.epochs
        epochs.take_back_from(self.pool.native, tier)
        undo.callback(epochs.take_back_from, None, None)
        if epochs.own != self._left_epoch:
            self.pool.purge()  # what was left is of before a bump that came while this node was away
        if self._publisher is not None:
            self._tell_events(self._publisher, boot, undo)
        self.followers = Followers(
            self._own_key,
            self.guests,
            self._control.client,
            self.members,
            self._metrics,
            self._control.given_up.recent,
        )
        self.followers.view_changed()
        taking_back = TakingBack(config.node_id)
        touches = _native.Touches() if config.touch else None
        self.cache = PageCache(
            namespace=self._namespace,
            pool=self.pool,
            directory=self.directory,
            peers=peers,
            registrations=registrations,
            shard=self._control.shard,
            own_key=self._own_key,
            check_sums=config.verify == "checksum",
            metrics=self._metrics,
            devices=devices,
            device_direct=config.device_direct_nbytes,
            tier=self.tier,
            guests=self.guests,
            followers=self.followers,
            taking_back=taking_back,
            history=self._control.history,
            others=self._other_holders,
            touches=touches,
        )
        undo.callback(self.cache.close)
        if touches is not None:
            touching = Touching(touches, self.directory, self._metrics)
            undo.callback(touching.close)
            touching.start()
        self.drainer = self._make_drainer(taking_back)
        undo.callback(self.drainer.close)
        self._serve_guests(registrar, undo)
        self.announcer = Announcer(
            self.pool, self.directory, self._metrics, self.tier, check_s=config.directory_check
        )
        self._is_serving = True
        undo.callback(self.announcer.close)
        if self.kept.has_adopted:
            self.announcer.on_announced = self._settle
            self.announcer.owe_everything()
        self.directory.on_missed = self.announcer.owe
        self.announcer.start()
        self.working_set = WorkingSetWatch(
            self._metrics.working_set, self.pool, self.figures.published_and_found
        )
        undo.callback(self.working_set.close)
        self.working_set.start()
        if config.attach_listen_path:
            self.attach_host = Host(config.attach_listen_path, self._start_host)
            undo.callback(self.attach_host.close)
        if self.kept.has_adopted:
            self.pool.native.map_behind()  # not before: what this start does would wait for it

    def _settle(self) -> None:
        """Have what was said of the pages in earlier lives count no more: they are announced anew, all that are there.

        A process that was killed had no time to take back what had just gone, and a guest of then is nobody's now.
        """
        self.pool.native.keep_boots(self._boot, self._boot)
        self.on_settled()

    def _end_pool(self) -> None:
        """Leave the memory to a successor, unless its pages were handed over: those are others' now."""
        has_handed_over = self._is_serving and self.drainer.has_begun
        self.kept.end(self.pool, is_left=not has_handed_over)

    def _start_host(self, listener: int) -> _native.AttachHost:
        return _native.AttachHost.start(
            listener,
            self.pool.native,
            self.guests,
            self._control.shard,
            self.directory.sequences,
            None if self.tier is None else self.tier.native,
            self._control.epochs,
            self._own_key,
            self._control.server.address,
            self._config.cluster,
            # a share of next to nothing is one, and not none
            share=max(
                int(self._config.attach_share > 0), int(self._config.attach_share * self.pool.largest_page)
            ),
            requests=self._config.attach_requests,
            takes_finds=bool(self._config.hot_share),
        )

    def _serve_guests(self, registrar: Registrar, undo: ExitStack) -> None:
        """Keep pages of other nodes, and have them and their own followers hear what is taken back."""
        config, loop, client = self._config, self._control.server.loop, self._control.client
        capacity = self.pool.largest_page
        self.pins = Pins(self.pool, int(config.pin_share * capacity), self._metrics)
        self.sources = Sources(
            self._own_key,
            self.guests,
            client,
            self.members,
            met_since=self.followers.met_since,
            epochs=self._control.epochs,
        )
        self.prefetcher = Prefetcher(
            pool=self.pool,
            tier=self.tier,
            own_key=self._own_key,
            native=self.guests,
            sources=self.sources,
            directory=self.directory,
            read=self.cache.read_located,
            register=lambda array: registrar.register(array, None, is_readable=False),
            room=int(config.prefetch_share * capacity),
            metrics=self._metrics,
            others=self._other_holders,
        )
        undo.callback(self.prefetcher.close)
        self.hot_guests = start_hot_guests(self, config, self._control.epochs, self._metrics, undo=undo)
        loop.serve_guests(self.guests)
        undo.callback(loop.serve_guests, None)
        self.hand_overs = HandOvers(
            loop,
            client,
            self.cache.namespace,
            self.prefetcher,
            lambda: self._control.epochs.own,
            self._metrics,
        )
        undo.callback(self.hand_overs.close)
        self._take_over(undo)

    def _make_drainer(self, taking_back: TakingBack) -> Drainer:
        return Drainer(
            pool=self.pool,
            namespace=self._namespace,
            own_key=self._own_key,
            boot=lambda: self._boot,
            client=self._control.client,
            members=self.members,
            departures=self._departures,
            followers=self.followers,
            taking_back=taking_back,
            directory=self.directory,
            retire=self._retire,
            fall_silent=lambda until: self.announcer.fall_silent(until),
            metrics=self._metrics,
        )

    def _retire(self, seconds: float) -> None:
        self.cache.drain()
        if self.attach_host is not None:
            self.attach_host.drain()
        self.on_drain(seconds)

    def _take_over(self, undo: ExitStack) -> None:
        """Take over the pages of nodes that are about to leave."""
        receiver = Receiver(
            pool=self.pool,
            tier=self.tier,
            guests=self.guests,
            prefetcher=self.prefetcher,
            directory=self.directory,
            namespace=self._namespace,
            epoch=lambda: self._control.epochs.own,
            members=self.members,
            is_draining=lambda: self.drainer.has_begun,
            metrics=self._metrics,
        )
        undo.callback(TakeOvers(self._control.server.loop, receiver).close)

    def _open_disk(self, boot: int, undo: ExitStack, faults: _native.FaultyFiles | None) -> DiskTier:
        tier = DiskTier(
            self._config,
            self.pool,
            own_key=self._own_key,
            boot=boot,
            faults=faults,
            changes=self._changes,
            guests=self.guests,
            has_adopted=self.kept.has_adopted,
        )
        undo.callback(tier.close)
        self._control.server.loop.serve_promotions(tier.native)
        return tier

    def _take_event_ports(self, undo: ExitStack) -> EventPublisher | None:
        """Take them before this node joins, as :class:`~p2pkv.parts.answers.HttpPorts` does."""
        config = self._config
        if not config.kv_events:
            return None
        publisher = EventPublisher(config.kv_events, config.kv_events_replay or None, config.kv_events_topic)
        undo.callback(publisher.close)
        return publisher

    def _tell_events(self, publisher: EventPublisher, boot: int, undo: ExitStack) -> None:
        # Boot epochs grow by nanoseconds: after a restart subscribers see a gap, never a number they have seen.
        publisher.begin(boot)
        epochs = self._control.epochs
        hashes = Hashes(self._config.kv_events_hashes)
        self.events = EventFeed(
            publisher, self._changes, self.pool, self.tier, lambda: epochs.own, hashes=hashes
        )
        undo.callback(self.events.close)
        self.events.start()

    def _let_peers_read(self, transports: Sequence[Transport], undo: ExitStack) -> None:
        regions: dict[str, bytes] = {}
        for transport in transports:
            region = transport.register_memory(self.pool, self.pool.address, self.pool.nbytes, readable=True)
            undo.callback(region.close)
            regions[transport.name] = region.describe()
        self._control.handshakes.serve(transports, regions)
        undo.callback(self._control.handshakes.close)

    @property
    def has_drained(self) -> bool:
        """Whether this node has handed its pages over, as far as it could."""
        return self._is_serving and self.drainer.drained is not None

    def members(self) -> Mapping[int, Member]:
        """Return those that pages are read from, by their keys."""
        return self._others

    @property
    def drained(self) -> Drained | None:
        """What became of this node's pages, once it has drained."""
        return self.drainer.drained

    def hand_over(self, keys: Sequence[str | bytes], to: str, deadline: float) -> HandOver:
        """Ask another node to prefetch those of the pages that this node has."""
        prefix = (
            self.cache.namespace.prefix
        )  # before they are hashed: of a bump between the two the other one knows
        _, ids = self.cache.hash(keys)
        there, _ = self.pool.lookup(ids) if self.tier is None else self.tier.locate(ids)
        here = ids[there.astype(bool)]
        n_absent = len(ids) - len(here)
        members = {member.node_id: member for member in self._others.values()}
        if to not in members:
            return HandOver(0, n_absent, f"no other live node is called {to!r}")
        n_accepted, refusal = self.hand_overs.ask(members[to], here, prefix, deadline)
        return HandOver(n_accepted, n_absent, refusal)

    def view_changed(self, new: View, gone: Sequence[Member]) -> None:
        """Ask the members of ``new`` from now on; those that are ``gone``, or were restarted, have nothing."""
        self.directory.set_view(new)
        # After that: whom nothing is read from any more need not hear what is taken back.
        self._others = {member.key: member for member in new.present() if member.key != self._own_key}
        self._departures.view_changed(self._others.values(), gone)
        if self._is_serving:
            for member in gone:
                self.cache.locations.drop_owner(node_key(member.node_id))
            self.followers.view_changed()
            self.announcer.ring_changed()

    def rebooted(self, boot: int) -> None:
        """Go on under a higher boot epoch: what is there is announced under it."""
        if self._is_serving:  # before, the pool gets the boot of that moment
            self._boot = boot
            if self.tier is not None:
                self.tier.set_boot(boot)
            else:
                self.pool.set_boot(boot)
            self.announcer.owe_everything()

    def resurrected(self) -> None:
        """Announce everything again: peers had dropped it."""
        if self._is_serving:
            self.announcer.owe_everything()

    def interrupt(self) -> None:
        """Stop announcing and prefetching, and end what asks the directory, and a drain."""
        self.announcer.stop()
        self.prefetcher.stop()
        self._control.client.close()
        self._departures.interrupt()
        self.channels.close()

    def looked_up(self) -> tuple[float, float]:
        """Return how many pages peers were asked for so far, and how many of them were found."""
        return self.directory.asked()

    def readings(self) -> Iterator[Readings]:
        """Yield what is counted, by the names of the metrics, in parts that take the interpreter for a moment each."""
        yield self.figures.of_pool
        yield self.figures.of_directory
        yield self.cache.readings
        yield self.working_set.readings
        yield self.kept.readings
        for part in (self.tier, self.events, self.attach_host, self.hot_guests):
            if part is not None:
                yield part.readings
