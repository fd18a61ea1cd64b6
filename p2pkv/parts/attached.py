"""What an attached engine is made of: a node without pool, shard and membership, which its host's node has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import NoReturn

import numpy as np
import zmq

from p2pkv import _native, transports
from p2pkv.attach.cache import AttachedCache, unsupported
from p2pkv.attach.finding import Finding
from p2pkv.attach.following import Following
from p2pkv.attach.own_host import OwnHost
from p2pkv.attach.own_pages import OwnPages
from p2pkv.attach.sharing import SharingRegistrar
from p2pkv.attach.unsettled import Unsettled
from p2pkv.cache.guests import Followers, TakingBack
from p2pkv.cache.page_cache import PageCache
from p2pkv.cache.touching import Touching
from p2pkv.config import Config
from p2pkv.control.host_names import Names
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import MAX_SOCKETS, ControlClient, Socket
from p2pkv.descriptors import raise_limit, require_descriptors
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.client import DirectoryClient
from p2pkv.directory.epochs import EpochKeeper
from p2pkv.directory.given_up import GivenUp
from p2pkv.directory.routers import KnownRouters
from p2pkv.directory.view import DEFAULT_CLUSTER, Member, View, node_key
from p2pkv.kv_events.messages import MEMORY
from p2pkv.lifetime import weakly
from p2pkv.memory import copies
from p2pkv.memory.registrar import Registrar
from p2pkv.memory.registrations import Registrations
from p2pkv.memory.staging import DeviceMemory
from p2pkv.memory.staging import use_library as use_cuda_library
from p2pkv.metrics import BoundedPeers, Metrics
from p2pkv.page import Keys, Namespace, scopes
from p2pkv.parts.attached_caching import AttachedCaching
from p2pkv.parts.attached_figures import AttachedFigures
from p2pkv.parts.cache import OTHER_HOLDERS
from p2pkv.peers.connections import PeerConnections
from p2pkv.peers.handshakes import Handshakes
from p2pkv.pool import Pool
from p2pkv.tracing import CALLS, STEPS, Spans
from p2pkv.transports.base import Transport, TransportSettings

_MEET_S = 5.0
"""How long a start waits for what the host's node knows."""
_MISSED_S = 0.02
"""For telling the host's node of what an owner has missed: a call may be over its deadline by then."""
_ANY_BOOT = 0
_GRANULE = 4096


class AttachedParts:
    """Everything that runs in an attached engine. It is no member: nobody but its host's node knows of it."""

    def __init__(self, config: Config, extra_transports: Sequence[Transport]) -> None:
        """Build, start and attach; whatever fails, nothing is left running.

        Raises :class:`~p2pkv.errors.ControlError` if there is no node to attach to, and
        :class:`~p2pkv.errors.ConfigError` if that is of another cluster than ``cluster`` says.
        """
        self._config = config
        self._started = time.time()
        # Drawn: no member has it, and two engines of one node_id are two engines.
        self.own_key = secrets.randbits(64)
        self._host_key = 0
        self._lost_boot = 0
        """The boot of the host's node that has gone, whatever the view says; 0 if none has."""
        self._unsettled = Unsettled()
        self._reached = View()
        """The view without a node that is lost so."""
        self.metrics_port: int | None = None
        self.indexer_port: int | None = None
        self.records = None  # an engine has no tenants: its host's node may
        self.routers = KnownRouters()  # which tell members of themselves, so the host's node is asked
        with ExitStack() as undo:
            self._build(undo, extra_transports)
            self._undo = undo.pop_all()

    def _build(self, undo: ExitStack, extra_transports: Sequence[Transport]) -> None:
        config = self._config
        if config.raise_nofile:
            raise_limit()
        require_descriptors()
        use_cuda_library(config.cuda_library)
        self.metrics = Metrics()
        self.own_host = OwnHost(
            config.attach_path,
            node_key(config.node_id),
            weakly(self._attached_again),
            weakly(self._host_lost),
            # One that nobody has set says nothing: a tenant's node has a name that engines don't know.
            cluster=None if config.cluster == DEFAULT_CLUSTER else config.cluster,
        )
        undo.callback(self.own_host.close)
        self._open_control(undo)
        self._start_transports(undo, extra_transports)
        handshakes = Handshakes(self.client)
        self.peers = PeerConnections(self.transports, handshakes.connect, self.metrics)
        self.metrics.show_transports(self.peers.domains)
        undo.callback(self.peers.close)
        self._open_memory(undo)
        team = copies.hire(config.copy_threads)
        if team is not None:
            undo.callback(team.close)
        copies.choose(config.copy_kernel, None)
        self._given_up = GivenUp()
        self.epochs_known = _native.NamespaceEpochs()
        self.epochs_known.follow(scopes(config.namespace))
        self._open_directory(undo, handshakes)
        self.following = Following(
            self.client,
            weakly(self._view_changed),
            self.directory.confirm_view,
            self.routers.take_all,
            self._unsettled,
            cluster=self.own_host.cluster,
        )
        undo.callback(self.following.close)
        self.epochs = EpochKeeper(
            self.epochs_known,
            self.client,
            weakly(self._members),
            given_up=self._given_up.recent,
            look=self.following.look_again,
        )
        undo.callback(self.epochs.close)
        self.caching = AttachedCaching(self._make_cache(undo))
        attachment = self.own_host.attachment
        if attachment is not None:
            self._host_key = attachment.node_key
            self.following.look(attachment.address, _MEET_S)
            # so that calls know how much the node knew if it goes before the first of them
            self.caching.cache.learn_from(attachment, time.monotonic() + _MEET_S)
        self.epochs.learn(time.monotonic() + _MEET_S)
        self.epochs.start()
        self.following.is_attached = weakly(self._is_attached)
        self.following.start()
        self.own_host.start()
        self._show_metrics(undo)
        # Last: while a thread maps the pool in, which takes longer the larger it is, nobody else can map anything.
        self.own_host.map_in()

    def _open_control(self, undo: ExitStack) -> None:
        keys = cluster_keys(self._config.secret_file, self._config.accepted_secret_files)
        context: zmq.Context[Socket] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        undo.callback(context.destroy, 0)
        self.client = ControlClient(context, keys, Names())
        undo.callback(self.client.close)

    def _start_transports(self, undo: ExitStack, extra_transports: Sequence[Transport]) -> None:
        config = self._config
        wanted = "auto" if config.transport_names == ("auto",) else config.transport_names
        started = transports.create(
            wanted,
            TransportSettings(
                host="127.0.0.1",  # nothing of this process is read: who listens here lets nobody in
                advertise="127.0.0.1",
                ports=(0, 0),
                registered_nbytes=0,
                options=config.options,
            ),
        )
        self.transports = [*extra_transports, *started]
        for transport in self.transports:
            undo.callback(transport.close)

    def _open_memory(self, undo: ExitStack) -> None:
        self.registrations = Registrations(self.transports)
        undo.callback(self.registrations.close)
        self.devices = DeviceMemory(
            self.registrations,
            self._config.device_staging_nbytes,
            self._config.device_kernel_blocks,
            show=self.own_host.show,
        )
        undo.callback(self.devices.close)
        self.registrar = SharingRegistrar(Registrar(self.registrations, self.devices), self.own_host)

    def _open_directory(self, undo: ExitStack, handshakes: Handshakes) -> None:
        self.channels = DirectoryChannels(handshakes.connect, lambda: self.directory.ring.seated)
        undo.callback(self.channels.close)
        self._shard = _native.Shard(1 << 10)  # of no ring, so that it has no entries
        self._other_holders = _native.OtherHolders(OTHER_HOLDERS) if self._config.hedge else None
        self.directory = DirectoryClient(
            own_key=self.own_key,
            shard=self._shard,
            client=self.client,
            channels=self.channels,
            replicas=self._config.replicas,
            metrics=self.metrics,
            others=self._other_holders,
        )
        self.directory.on_missed = weakly(self._tell_missed)

    def _tell_missed(self, _node_id: str, keys: Keys) -> None:
        """Have the host's node tell an owner that did not take what this engine told it."""
        attachment = self.own_host.attachment
        if attachment is not None:
            attachment.tell_missed(keys, _MISSED_S)

    def _make_cache(self, undo: ExitStack) -> AttachedCache:
        config = self._config
        spans = (
            Spans(
                {"p2pkv.node": config.node_id, "p2pkv.namespace": config.namespace},
                self.metrics.timings.watch,
            )
            if config.tracing
            else None
        )
        pool = Pool(_GRANULE, owner=self.own_key, boot=0)
        undo.callback(pool.release_memory)
        guests = _native.Guests(pool.native, self.epochs_known)
        touches = _native.Touches() if config.touch else None
        reader = PageCache(
            namespace=Namespace(config.namespace, self.epochs_known),
            pool=pool,
            directory=self.directory,
            peers=self.peers,
            registrations=self.registrations,
            shard=self._shard,
            own_key=self.own_key,
            check_sums=config.verify == "checksum",
            metrics=self.metrics,
            devices=self.devices,
            guests=guests,
            followers=Followers(self.own_key, guests, self.client, weakly(self._by_key), self.metrics),
            taking_back=TakingBack(config.node_id),
            others=self._other_holders,
            touches=touches,
            of_host=self.own_host.pool,
        )
        mapped = self.own_host.pool
        own_pages = OwnPages(lambda keys: mapped.lookup_own(keys)[0].astype(np.bool_), MEMORY)
        undo.callback(own_pages.close)
        cache = AttachedCache(
            reader=reader,
            own_host=self.own_host,
            directory=self.directory,
            client=self.client,
            registrations=self.registrations,
            epochs=self.epochs_known,
            learn_elsewhere=weakly(self._learn_elsewhere),
            unsettled=self._unsettled,
            own_pages=own_pages,
            metrics=self.metrics,
        )
        undo.callback(cache.close)
        if touches is not None:
            touching = Touching(touches, self.directory, self.metrics)
            undo.callback(touching.close)
            touching.start()
        epochs = self.epochs_known
        self.finding = Finding(self.own_host, reader.finds, lambda: epochs.own)
        undo.callback(self.finding.close)
        self.finding.start()
        if spans is not None:
            spans.trace(reader, STEPS)
            spans.trace(cache, CALLS)
        return cache

    def _show_metrics(self, undo: ExitStack) -> None:
        self._figures = AttachedFigures(
            self._config,
            self.own_host,
            self.following,
            self.epochs_known,
            (self.caching.cache.readings, self.devices.readings),
            started=self._started,
        )
        self.metrics.watch(weakly(self._figures.readings))
        self.metrics.watch_labelled(copies.metrics)
        self.metrics.watch_labelled(weakly(self._figures.build_info))
        self.metrics.watch_labelled(BoundedPeers(self.peers.traffic).read)
        self.metrics_port = self._figures.serve(self.metrics, undo)

    def _is_attached(self) -> bool:
        return self.own_host.attachment is not None

    @property
    def transfers(self) -> NoReturn:
        """Refuse: offers are made and taken by members."""
        raise unsupported("make or take offers; use a node with pool_size 0 beside it")

    @property
    def explainer(self) -> NoReturn:
        """Refuse: only a node knows what became of its pages."""
        raise unsupported("explain a page; p2pkv explain asks all nodes")

    @property
    def own_epoch(self) -> int:
        """The epoch of the namespace, as far as it is known here."""
        return self.epochs_known.own

    @property
    def owner_id(self) -> str:
        """The id of the host's node; this engine's own as long as nobody has said which member that is."""
        host = self.following.view.by_key(self._host_key)
        return self._config.node_id if host is None else host.node_id

    @property
    def address(self) -> str:
        """Where the host's node lets this engine in."""
        return f"unix:{self.own_host.path}"

    def view(self) -> View:
        """Return what the host's node, or another one, has told of the members last."""
        return self.following.view

    def _members(self) -> Iterable[Member]:
        """Return who is told of bumps: also the host's node that was attached to before the view has it so."""
        present = list(self.following.view.present())
        attachment, pool = self.own_host.attachment, self.own_host.pool.get()
        if attachment is None or pool is None:
            return present
        host = (attachment.node_key, pool.boot)
        if any((member.key, member.boot_epoch) == host for member in present):
            return present
        others = [member for member in present if member.key != attachment.node_key]
        # a bump says by their ids who has heard of it
        known = self.following.view.by_key(attachment.node_key)
        node_id = attachment.address if known is None else known.node_id
        return [*others, Member(node_id, _ANY_BOOT, attachment.address)]

    def _by_key(self) -> Mapping[int, Member]:
        return {member.key: member for member in self.following.view.present()}

    def _learn_elsewhere(self, deadline: float) -> bool | None:
        # The own node, while it is attached to, is why others are asked: it says what it knows by itself.
        is_away = self.own_host.attachment is None
        others = [member for member in self._reached.present() if is_away or member.key != self._host_key]
        return self.epochs.learn_from_one(others, deadline) if others else None

    def _attached_again(self, attachment: _native.Attachment, boot: int) -> None:
        self._host_key = attachment.node_key
        if boot == self._lost_boot:  # the node had only hung up
            self._lost_boot = 0
            self.following.say_again()
        self.following.follow(attachment.address)

    def _host_lost(self, boot: int) -> None:
        """Leave the node out of the view until it is back: members notice later, and an only member never."""
        self._lost_boot = boot
        self.following.say_again()

    def _view_changed(self, _: View, new: View) -> None:
        old = self._reached
        reached = self._reached = View(member for member in new.values() if not self._is_lost(member))
        gone = [
            member
            for member in old.present()
            if (now := reached.get(member.node_id)) is None
            or not now.is_present
            or now.boot_epoch != member.boot_epoch
        ]
        self._given_up.view_changed(new, gone)
        self.peers.set_view(reached)  # before anything is located at a member that it does not know
        self.directory.set_view(reached)
        self.caching.cache.tell_unsettled()
        for member in gone:
            self.caching.cache.drop_owner(node_key(member.node_id))
            self.client.forget(member.address)
        host = reached.by_key(self._host_key)
        is_member = host is not None and host.is_present
        self.caching.cache.is_host_member = is_member
        self.own_host.pool.set_member(is_member)

    def _is_lost(self, member: Member) -> bool:
        return member.key == self._host_key and member.boot_epoch == self._lost_boot

    def interrupt(self) -> None:
        """Let the calls under way end at once, with misses or ClosedError."""
        self.own_host.interrupt()
        self.following.interrupt()
        self.client.close()
        self.channels.close()
        self.epochs.interrupt()
        self.peers.interrupt()
        self.devices.interrupt()

    def close(self) -> None:
        """Let go of the host's node and release everything; no call may be under way."""
        self._undo.close()
