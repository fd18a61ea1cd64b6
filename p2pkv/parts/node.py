"""What a node is made of: built in order from a :class:`~p2pkv.config.Config`, closed in reverse, told of the view."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from p2pkv import transports
from p2pkv._native import FaultyFiles
from p2pkv.config import Config
from p2pkv.descriptors import raise_limit, require_descriptors
from p2pkv.directory.epochs import EpochKeeper
from p2pkv.directory.membership.base import Claim, Identity, Listeners, Membership
from p2pkv.directory.membership.control_network import ControlNetwork
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.routers import KnownRouters
from p2pkv.directory.view import Member, View, node_key
from p2pkv.disk.boot_file import BootFile
from p2pkv.disk.epochs_file import EpochsFile
from p2pkv.disk.tier import disk_folder
from p2pkv.errors import MembershipError
from p2pkv.explain.asking import Explainer
from p2pkv.explain.requests import Requests
from p2pkv.explain.witness import Witness
from p2pkv.lifetime import Gate
from p2pkv.memory import copies
from p2pkv.memory.available import available_memory, require_memory
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.memory.staging import use_library as use_cuda_library
from p2pkv.metrics import BoundedPeers, Metrics, Readings
from p2pkv.offers.transfers import Transfers, start_offers
from p2pkv.page import Keys, Namespace
from p2pkv.parts.answers import HttpPorts, answer_questions
from p2pkv.parts.cache import CacheParts
from p2pkv.parts.control import ControlParts
from p2pkv.parts.figures import Figures, meeting_places
from p2pkv.parts.kept_pool import KeptPool
from p2pkv.parts.tenants import Place, carry_records, membership_engine
from p2pkv.peers.connections import PeerConnections
from p2pkv.tracing import CALLS, STEPS, TRANSFERS, Spans
from p2pkv.transports.base import Transport, TransportSettings
from p2pkv.transports.native import native_ways

_log = logging.getLogger(__name__)

_JOIN_S = 5.0
_LINGER_S = 0.3
"""How long a node that has drained is read from after it has said good-bye: as long as others' interpreters may take to
hear of it, and a read that has begun by then. A guess."""
_LEARN_S = 1.0
"""How long a start waits for what peers know of epochs; each of three is one that knows."""


class NodeParts:
    """Everything that runs in a node."""

    def __init__(
        self,
        config: Config,
        gate: Gate,
        extra_transports: Sequence[Transport],
        clock: Clock,
        timing: Timing,
        disk_faults: FaultyFiles | None = None,
        place: Place | None = None,
    ) -> None:
        """Build, start and join; whatever fails, nothing is left running.

        ``gate`` stands around the calls of :attr:`transfers`. ``extra_transports`` come before the configured ones, and
        are closed with the rest.
        """
        self._config = config
        self._place = place or Place()
        self._disk_faults = disk_faults  # for tests: what the calls of the disk tier go through
        self.own_key = node_key(config.node_id)
        self.routers = KnownRouters()
        """Whoever serves requests before engines, and has told this node so."""
        self._started = time.time()
        self._has_met = threading.Event()  # another node
        self._gone = threading.Event()  # nobody sets it: what is waited for is time
        self._boot_file: BootFile | None = None
        self._epochs_file: EpochsFile | None = None
        if config.disk_nbytes:
            folder = disk_folder(config)
            makes_parents = config.disk_path is None
            self._boot_file = BootFile(folder, config.node_id, makes_parents=makes_parents)
            self._epochs_file = EpochsFile(folder, config.node_id, makes_parents=makes_parents)
        with ExitStack() as undo:
            for file in (self._boot_file, self._epochs_file):
                if file is not None:
                    undo.callback(file.close)
            self._build(undo, gate, extra_transports, clock, timing)
            self._undo = undo.pop_all()

    def _build(
        self, undo: ExitStack, gate: Gate, extra_transports: Sequence[Transport], clock: Clock, timing: Timing
    ) -> None:
        config = self._config
        self.metrics = Metrics()
        requests = Requests(self._ids)
        spans = self._make_spans(requests)
        if config.raise_nofile:
            raise_limit()
        require_descriptors()
        kept = KeptPool(config, self.own_key, undo)
        require_memory(config.registered_nbytes - kept.left_nbytes, available_memory())
        self._connect(undo, gate, extra_transports)
        self._make_cache(undo, kept, requests)
        # A port that is taken ends the start here, before anybody has heard of this node.
        http_ports = HttpPorts(self, config, undo)
        self.epochs = self._keep_epochs(undo)
        self.membership = self._join(undo, clock, timing)
        self.epochs.learn(time.monotonic() + _LEARN_S)  # before anything is published
        self.epochs.start()
        self._begin_serving(undo, spans)
        self._watch_figures()
        answer_questions(self, config, undo)
        self.indexer_port, self.metrics_port = http_ports.serve(undo)

    def _make_spans(self, requests: Requests) -> Spans | None:
        config = self._config
        if not config.tracing:
            return None
        attributes = {"p2pkv.node": config.node_id, "p2pkv.namespace": config.namespace}
        return Spans(attributes, self.metrics.timings.watch, requests.heard)

    def _connect(self, undo: ExitStack, gate: Gate, extra_transports: Sequence[Transport]) -> None:
        """Have what peers are spoken to with and read over, and memory for it."""
        config = self._config
        self.control = ControlParts(config, undo)
        self._engine = membership_engine(config, self.control.keys, self._place)
        self.records = carry_records(config, self.control, self._place, undo)
        self._start_transports(undo, extra_transports)
        self.peers = PeerConnections(self.transports, self.control.handshakes.connect, self.metrics)
        self.metrics.show_transports(self.peers.domains)
        undo.callback(self.peers.close)
        self._serve_offers(undo, gate)
        self._open_memory(undo)
        team = copies.hire(config.copy_threads)
        if team is not None:
            undo.callback(team.close)

    def _make_cache(self, undo: ExitStack, kept: KeptPool, requests: Requests) -> None:
        config = self._config
        namespace = Namespace(config.namespace, self.control.epochs)
        self.witness = Witness(
            config.node_id, namespace, self.control.epochs, self.control.shard, self.control.history, requests
        )
        self.explainer = Explainer(
            self.witness, self.control.client, lambda: self._others(self.membership.view())
        )
        self.caching = (
            CacheParts(config, self.own_key, namespace, self.control, self.metrics, undo)
            if config.pool_nbytes
            else None
        )
        """None where ``pool_size`` is 0: such a node makes and takes offers, and has no pages and no shard."""
        if self.caching is not None:
            self.caching.open_pool(kept, self.transports, undo)
        else:
            copies.choose(config.copy_kernel, None)

    def _begin_serving(self, undo: ExitStack, spans: Spans | None) -> None:
        """Offer and cache under this life's boot epoch; one that came meanwhile counts from the beginning."""
        boot = self.membership.boot_epoch
        self.offers.announce(self.own_key, boot)
        if self.caching is not None:
            self.caching.on_settled = self.membership.settle
            self.caching.serve(
                boot,
                self.registrations,
                self.peers,
                self.devices,
                self.registrar,
                undo,
                self._disk_faults,
            )
        if spans is not None:
            self._trace(spans)
        if self.membership.boot_epoch != boot:
            self._rebooted(self.membership.boot_epoch)

    def _watch_figures(self) -> None:
        figures = Figures(self._config, self.membership.view, self.transports, self._started)
        for read in self._readings(figures):
            self.metrics.watch(read)
        for read_labelled in (
            copies.metrics,
            figures.build_info,
            BoundedPeers(self.peers.traffic).read,
            figures.rails,
            figures.forged,
        ):
            self.metrics.watch_labelled(read_labelled)

    def _trace(self, spans: Spans) -> None:
        spans.trace(self.transfers, TRANSFERS)
        if self.caching is not None:
            spans.trace(self.caching.cache, CALLS | STEPS)

    def _ids(self, keys: Sequence[str | bytes]) -> Keys:
        assert self.caching is not None
        return self.caching.cache.hash(keys)[1]

    def not_ready(self) -> str | None:
        """Say why this node should not be given work, if it should not."""
        if self.membership.view().get(self._config.node_id) is None:
            return "this node is no member of its cluster: another one has its node_id"
        if self.caching is not None and self.caching.drainer.has_begun:
            return "this node is draining: it hands its pages over to others and is about to leave"
        if self.membership.is_alone:
            return (
                f"this node is alone: nobody answers at {meeting_places(self._config)}, and all that others have "
                "is a miss"
            )
        return None

    def _start_transports(self, undo: ExitStack, extra_transports: Sequence[Transport]) -> None:
        config = self._config
        wanted = "auto" if config.transport_names == ("auto",) else config.transport_names
        use_cuda_library(config.cuda_library)
        started = transports.create(
            wanted,
            TransportSettings(
                host=self.control.host,
                advertise=self.control.advertise,
                ports=config.data_port_range,
                registered_nbytes=config.registered_nbytes,
                options=config.options,
            ),
        )
        self.transports = [*extra_transports, *started]
        for transport in self.transports:
            undo.callback(transport.close)

    def _serve_offers(self, undo: ExitStack, gate: Gate) -> None:
        control, numbers = self.control, self.peers.numbers
        self.offers = start_offers(
            self._config,
            [(numbers[name], name, transport) for name, transport in native_ways(self.transports)],
            self.peers.native,
            host=control.host,
            advertise=control.advertise,
        )
        undo.callback(self.offers.close)
        control.server.loop.serve_transfers(self.offers)
        self.transfers = Transfers(
            self.offers, control.handshakes.connect, lambda: self.membership.view(), gate, self._config
        )
        """Offers and pulls of registered memory, from one named node to another."""

    def _open_memory(self, undo: ExitStack) -> None:
        refused = self.metrics.refused_device_memories
        self.registrations = Registrations(
            self.transports,
            self.offers,
            count_refused=lambda transport: self.metrics.count(refused, transport, 1),
        )
        undo.callback(self.registrations.close)
        self.devices = DeviceMemory(
            self.registrations, self._config.device_staging_nbytes, self._config.device_kernel_blocks
        )
        undo.callback(self.devices.close)
        self.registrar = Registrar(self.registrations, self.devices)

    def _keep_epochs(self, undo: ExitStack) -> EpochKeeper:
        """Know the epochs that the last run knew, and hear of those that peers know."""
        known, file = self.control.epochs, self._epochs_file
        if file is not None:
            file.read(known)
        keeper = EpochKeeper(
            known,
            self.control.gossip,  # whose connections are warm
            lambda: self._others(self.membership.view()),
            given_up=self.control.given_up.recent,
            remember=None if file is None else file.write,
            settle=() if file is None else (self._write_epochs, self._wait_cleared),
        )
        undo.callback(keeper.close)
        return keeper

    def _write_epochs(self, seconds: float) -> bool:
        assert self._epochs_file is not None
        return self._epochs_file.write(self.control.epochs.all, seconds)

    def _wait_cleared(self, seconds: float) -> bool:
        tier = None if self.caching is None else self.caching.tier
        return tier is None or tier.wait_cleared(seconds)

    def _others(self, view: View) -> list[Member]:
        return [member for member in view.present() if member.node_id != self._config.node_id]

    def _take_news(self, blob: bytes) -> bool:
        """Take a router's news, and have engines that are attached be told, or a tenant's; whether it was that."""
        if self.routers.take(blob):
            self.control.server.loop.set_routers(self.routers.pack())
            return True
        return self.records is not None and self.records.take(blob)

    def _join(self, undo: ExitStack, clock: Clock, timing: Timing) -> Membership:
        config, caching = self._config, self.caching
        self.control.epochs.keep_vigil(timing.surely_believed)
        confirmed = {} if caching is None else {"on_confirmed": caching.directory.confirm_view}
        membership = self._engine(
            ControlNetwork(self.control.server, self.control.gossip, self._take_news),
            Identity(
                config.node_id,
                self.peers.domains,
                weight=0.0 if caching is None else 1.0,
                cluster=config.cluster,
                last_boot_epoch=self._boot_file.read() if self._boot_file is not None else 0,
                kept=None if caching is None else caching.kept.boots(caching.pool),
            ),
            join=config.join_addresses,
            listeners=Listeners(
                on_change=self._view_changed,
                on_resurrected=self._resurrected,
                on_expelled=self._expelled,
                on_reboot=self._rebooted,
                on_claimed=self._claimed,
                **confirmed,
            ),
            clock=clock,
            timing=timing,
        )
        undo.callback(self._linger)
        undo.callback(membership.close)
        undo.callback(self._let_guests_go)
        membership.start(_JOIN_S)
        if config.must_join and not self._has_met.wait(_JOIN_S):
            raise MembershipError(
                f"must_join is set, and no other node of the cluster answers at {meeting_places(self._config)} "
                "(p2pkv doctor says why)"
            )
        return membership

    def _let_guests_go(self) -> None:
        """Have none while this node lingers: what their sources take back then it is not told."""
        if self.caching is not None and self.caching.has_drained:
            self.caching.guests.take_out_all()

    def _linger(self) -> None:
        """Serve a little longer, if this node has drained: others hear only now that it leaves, and may be reading."""
        if self.caching is not None and self.caching.has_drained and self._has_met.is_set():
            self._gone.wait(_LINGER_S)

    @property
    def own_epoch(self) -> int:
        """The epoch of this node's namespace."""
        return self.control.epochs.own

    @property
    def owner_id(self) -> str:
        """The id of this node, whose own the pages are that are published here."""
        return self._config.node_id

    @property
    def address(self) -> str:
        """``host:port`` of the control socket."""
        return self.control.server.address

    def view(self) -> View:
        """Return the members as this node knows them."""
        return self.membership.view()

    def interrupt(self) -> None:
        """Let the calls under way end at once, with misses or ClosedError."""
        if self.caching is not None:
            self.caching.interrupt()
        self.control.client.close()
        self.epochs.interrupt()
        self.peers.interrupt()
        self.devices.interrupt()
        self.transfers.interrupt()
        self.offers.close()

    def close(self) -> None:
        """Leave the cluster and release everything; no call may be under way."""
        self._undo.close()

    def _readings(self, figures: Figures) -> Iterator[Readings]:
        yield lambda: figures.of_membership(is_alone=self.membership.is_alone)
        yield self.control.readings
        if self.caching is not None:
            yield from self.caching.readings()
        yield self.membership.counters
        yield self.offers.readings
        yield self.devices.readings

    # --- what the membership engine's thread says ---

    def _view_changed(self, old: View, new: View) -> None:
        gone = [
            member
            for member in old.present()
            if (now := new.get(member.node_id)) is None
            or not now.is_present
            or now.boot_epoch != member.boot_epoch
        ]
        if len(new.present()) > 1:
            self._has_met.set()
        self.control.given_up.view_changed(new, gone)
        self.witness.met(new.values())
        if self.records is not None:
            self.records.set_view(new)
        self.peers.set_view(new)  # before anything is located at a member that it does not know
        if self.caching is not None:
            self.caching.view_changed(new, gone)
        self.transfers.set_view(old, new)
        before = {(member.node_id, member.boot_epoch) for member in old.present()}
        self.epochs.met(m for m in self._others(new) if (m.node_id, m.boot_epoch) not in before)
        for member in gone:
            self.control.forget(member.address)

    def _resurrected(self) -> None:
        self.control.epochs.was_given_up()
        if self.caching is not None:
            self.caching.resurrected()

    def _claimed(self, claim: Claim) -> None:
        if self._boot_file is not None:
            self._boot_file.write(claim.boot_epoch)
        if self.caching is not None:
            self.caching.pool.native.keep_boots(claim.kept_since, claim.boot_epoch)

    def _rebooted(self, boot: int) -> None:
        self.control.epochs.was_given_up()  # by those who knew a higher one
        self._claimed(Claim(boot, boot))
        self.offers.announce(self.own_key, boot)
        if self.caching is not None:
            self.caching.rebooted(boot)

    def _expelled(self, reason: str) -> None:
        _log.error("node %s is no member of its cluster any more: %s", self._config.node_id, reason)
        # Nobody is told of a page any more, so that no publish is taken for one; and nobody is asked.
        self._view_changed(self.membership.view(), View())
