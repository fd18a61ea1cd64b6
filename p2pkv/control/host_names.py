"""Host names of peers' addresses, looked up where nobody waits for them.

Whoever connects a ZMQ socket by name has ZMQ look that name up, on the one thread that moves all messages of the node:
a resolver that hangs for ten seconds then makes the node as good as dead to its peers. So ZMQ is given numbers only.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from p2pkv.address import split_address
from p2pkv.errors import ConfigError

_log = logging.getLogger(__name__)

_FRESH_S = 30.0
"""Until a name is looked up again; meanwhile, and for as long as that takes, what it was last is used."""
_RETRY_S = 2.0
"""So soon a name is looked up again that nobody knew, or by which nobody answers: its host may have another number."""
_MAX_LOOK_UPS = 16
"""Under way at a time: addresses come from peers too."""
_MAX_NAMES = 4096


def look_up(host: str) -> list[str]:
    """Return the numbers of a host, as its machine prefers them but IPv4 first. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # a name of both kinds, as localhost, mostly stands for nodes that listen as we do by default: on IPv4
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Names:
    """Thread-safe; nothing here waits but :meth:`wait_for`.

    Names are looked up on threads that nobody joins, since nothing can break off a look-up that hangs. They touch
    this table alone.
    """

    def __init__(self, look_up: Callable[[str], list[str]] = look_up, *, fresh_s: float = _FRESH_S) -> None:
        """``fresh_s``: until a name that was found is looked up again."""
        self._look_up = look_up
        self._fresh_s = fresh_s
        # guards all below; reentrant, since a signal's handler may close the node wherever a thread is
        self._lock = threading.RLock()
        self._found: dict[str, list[str]] = {}
        self._due: dict[str, float] = {}
        self._looked_up_at: dict[str, float] = {}
        self._under_way: dict[str, threading.Event] = {}

    def numeric(self, address: str) -> str | None:
        """Return ``address`` with a number for its host; None if that is not known yet, or nobody's."""
        return next(iter(self.numbers(address)), None)

    def numbers(self, address: str) -> list[str]:
        """Return ``address`` with each number that its host has now; none if that is not known yet."""
        try:
            host, port = split_address("address", address)
        except ConfigError:
            return []
        hosts = [host]
        if not _is_number(host):
            with self._lock:
                self._begin(host)
                hosts = self._found.get(host, [])
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    def doubt(self, address: str) -> None:
        """Have the name in an address by which nobody answers looked up again soon; until then it is what it was last.

        A node that was started again on another host, under a name that it has kept, would else be taken for dead, and
        come back, as often as that fits into the time that a name is believed for.
        """
        try:
            host, _ = split_address("address", address)
        except ConfigError:
            return
        with self._lock:
            looked_up_at = self._looked_up_at.get(host)
            if looked_up_at is not None:
                self._due[host] = min(self._due[host], looked_up_at + _RETRY_S)
                self._begin(host)

    def wait_for(self, addresses: Iterable[str], timeout: float) -> None:
        """Wait until the names among ``addresses`` have been looked up, at most ``timeout`` seconds."""
        until = time.monotonic() + timeout
        hosts = []
        for address in addresses:
            self.numeric(address)
            with suppress(ConfigError):  # it stands for nobody
                hosts.append(split_address("address", address)[0])
        with self._lock:
            under_way = [event for host in hosts if (event := self._under_way.get(host)) is not None]
        for event in under_way:
            event.wait(max(0.0, until - time.monotonic()))

    def _begin(self, host: str) -> None:
        """With the lock: have ``host`` looked up, if it is time."""
        now = time.monotonic()
        if now < self._due.get(host, 0.0) or host in self._under_way or len(self._under_way) >= _MAX_LOOK_UPS:
            return
        if host not in self._due and len(self._due) >= _MAX_NAMES:
            self._due.clear()
            self._found.clear()
            self._looked_up_at.clear()
        self._under_way[host] = threading.Event()
        try:
            threading.Thread(target=self._run, args=(host,), name="p2pkv-names", daemon=True).start()
        except RuntimeError:  # no thread is to be had now
            del self._under_way[host]

    def _run(self, host: str) -> None:
        numbers: list[str] = []
        problem: Exception | None = None
        try:
            numbers = self._look_up(host)
        except Exception as error:  # noqa: BLE001  # the top of a thread: a name that breaks the look-up is nobody's
            problem = error
        with self._lock:
            is_news = problem is not None and host not in self._due
            now = self._looked_up_at[host] = time.monotonic()
            self._due[host] = now + (self._fresh_s if numbers else _RETRY_S)
            if numbers:
                self._found[host] = numbers
            self._under_way.pop(host).set()
        if is_news:
            _log.warning("host name %s can't be looked up: %s", host, problem)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
