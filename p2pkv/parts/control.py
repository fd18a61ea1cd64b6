"""The control plane of a node: its server and its clients, all behind the cluster's secret."""

from __future__ import annotations

from contextlib import ExitStack

import zmq

from p2pkv import _native
from p2pkv.address import split_address
from p2pkv.config import Config
from p2pkv.control.host_names import Names
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import MAX_SOCKETS, ControlClient, ControlServer, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.given_up import GivenUp
from p2pkv.peers.handshakes import Handshakes

_NAMES_S = 2.0
"""How long a start waits for the join addresses' names; the node goes on without those that take longer."""
_PEER_S = 0.3
"""How long who has the port of ``listen`` may take to answer; it is asked again."""
_MAX_SHARD_ENTRIES = 1 << 26


class ControlParts:
    """Answers peers from its making on."""

    def __init__(self, config: Config, undo: ExitStack) -> None:
        self.keys = keys = cluster_keys(config.secret_file, config.accepted_secret_files)
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
        self.history = _native.PageHistory()
        """It holds what became of pages lately, at this node."""
        self.shard = _native.Shard(_MAX_SHARD_ENTRIES, self.history)
        """This node's part of the directory; it stays empty where the node has no weight on the ring."""
        self.epochs = _native.NamespaceEpochs()
        """It holds what this node knows of the epochs of all namespaces."""
        self.given_up = GivenUp()
        """Who hears of bumps and of what is taken back, though it is no member."""
        self.server = ControlServer(
            context,
            keys,
            config.listen,
            self.shard,
            self.epochs,
            join=config.outward_addresses,
            names=names,
            is_peer=lambda address: self.gossip.ask(Request(address, Kind.PROBE), _PEER_S) is not None,
        )
        undo.callback(self.server.close)
        self.server.start()
        self.handshakes = Handshakes(self.client, self.server.loop)
        self.host, _ = split_address("listen", config.listen)
        """What data ports are bound to."""
        self.advertise, _ = split_address("address", self.server.address)
        """What peers reach them by."""

    def forget(self, address: str) -> None:
        """Hang up on a node that is gone."""
        self.client.forget(address)
        self.gossip.forget(address)

    def readings(self) -> dict[str, float]:
        """Return what is counted, by the names of the metrics."""
        loop = self.server.loop.stats()
        return {
            "p2pkv_control_requests_total": loop["requests"],
            "p2pkv_control_queued_requests": loop["queued_events"],
            "p2pkv_malformed_requests_total": loop["malformed"],
            "p2pkv_dropped_events_total": loop["dropped_events"],
            "p2pkv_refused_strangers_total": self.server.refused,
            "p2pkv_namespace_epoch": self.epochs.own,
            "p2pkv_bumps_total": self.epochs.n_raised,
        }
