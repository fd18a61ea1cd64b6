"""Who there is around a router: instances that report, the routers beside it, and the nodes that are told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from p2pkv.address import reachable_host, split_address
from p2pkv.control.secret import ClusterKeys
from p2pkv.errors import ConfigError
from p2pkv_proxy.discovery import Discovery, Listener
from p2pkv_proxy.presence import Presence
from p2pkv_proxy.replicas import Replicas
from p2pkv_proxy.shared_load import Counts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What the command line says of it."""

    heartbeats: str
    """``HOST:PORT`` to take heartbeats and other routers' messages on."""
    keys: ClusterKeys
    has_own_secret: bool = True
    join: tuple[str, ...] = ()
    """Nodes that are asked for the others; all are told of this router."""
    replicas: tuple[str, ...] = ()
    """Heartbeat addresses of routers beside this one that nobody needs to name."""
    advertise: str = ""
    """The host that engines and other routers reach this one by, if not what it listens on."""

    def reached_at(self, bound: str) -> str:
        """Return where others reach ``bound``, on which messages are taken; empty if that can't be told."""
        host, port = split_address("heartbeats", bound)
        if self.advertise:
            host = self.advertise
        else:
            try:
                host = reachable_host(host, (*self.join, *self.replicas))
            except ConfigError:
                if self.join or self.replicas:
                    _log.warning(
                        "engines and other routers are not told where this one takes heartbeats: it listens on %s; "
                        "--advertise HOST says how they reach it",
                        bound,
                    )
                return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Neighbourhood:
    """Takes heartbeats to ``listener``, and shares loads with other routers. Run :meth:`work`, then :meth:`close`."""

    def __init__(
        self, around: Around, listener: Listener, own: Callable[[], Counts], tell: Callable[[Counts], None]
    ) -> None:
        """``own`` and ``tell`` as :class:`Replicas` has them. Raises :class:`ControlError`."""
        self._listener = listener
        with ExitStack() as undo:
            self.discovery = Discovery(
                around.heartbeats, around.keys, listener, has_own_secret=around.has_own_secret
            )
            undo.callback(self.discovery.close)
            address = around.reached_at(self.discovery.address)
            self.replicas = Replicas(around.keys, address, own, tell, named=around.replicas)
            undo.callback(self.replicas.close)
            listener.replicas = self.replicas
            if around.join and address:
                undo.callback(Presence(around.join, around.keys, address).close)
            self._undo = undo.pop_all()

    def work(self) -> Sequence[Coroutine[object, object, None]]:
        """Return what must run on the loop."""
        return self.discovery.run(), self.replicas.run()

    def close(self) -> None:
        """Leave. Idempotent; blocks for a second at most."""
        self._undo.close()
