"""systemd as the keeper: it holds a service's descriptors while the service is restarted.

The unit needs ``FileDescriptorStoreMax=2``, two more for each tenant of the node, and ``NotifyAccess=main``, which lets
the service's main process hand them over. What is kept comes back as descriptors 3 and on, with the names that they
were given.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from collections.abc import MutableMapping, Sequence

from p2pkv.errors import ConfigError
from p2pkv.keeper.memory import Keeper, PoolMemory

_log = logging.getLogger(__name__)

_FIRST = 3
"""systemd's first descriptor."""
_taking = threading.Lock()  # guards the next
_handed_over: dict[str, int] = {}
"""It holds what systemd has handed to this process and nobody has taken, by name: a tenant's node has its own pool."""


class SystemdKeeper(Keeper):
    """One pool's memory in the descriptor store of the service that this process is."""

    def __init__(self, name: str, environ: MutableMapping[str, str] | None = None) -> None:
        """``name`` is the pool's: letters, digits and dashes."""
        self._names = (f"p2pkv-pool-{name}", f"p2pkv-records-{name}")
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        if not self._address:
            raise ConfigError(
                "keeper is 'systemd', but this process is no service of systemd that may notify it; the unit needs "
                "NotifyAccess=main and FileDescriptorStoreMax=2, and two more for each tenant"
            )
        self._received = _taken(environ, self._names)
        self._is_keeping = False

    @property
    def is_keeping(self) -> bool:
        return self._is_keeping

    def take(self) -> PoolMemory | None:
        found = [self._received.get(name) for name in self._names]
        if any(fd is None for fd in found):
            return None
        self._is_keeping = True
        return PoolMemory(*(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST) for fd in found if fd is not None))

    def keep(self, memory: PoolMemory) -> None:
        self.drop()
        for name, fd in zip(self._names, memory, strict=True):
            self._notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])
        self._is_keeping = True

    def drop(self) -> None:
        self._is_keeping = False
        for name in self._names:
            self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}", [])

    def _notify(self, text: str, fds: list[int]) -> None:
        try:
            _tell(self._address, text, fds)
        except OSError as error:
            raise ConfigError(
                f"keeper is 'systemd', and systemd can't be told of the pool at {self._address}: {error}"
            ) from error

    def close(self) -> None:
        """Let go of what was received. Idempotent."""
        while self._received:
            os.close(self._received.popitem()[1])


def drop_unclaimed(environ: MutableMapping[str, str] | None = None) -> list[str]:
    """Have systemd keep no more what nobody in this process has taken; return its names.

    It is memory of a pool that no node has any more: of a tenant that was left out of the settings, or another
    ``node_id``. To be called when all nodes of the process have started. What can't be told stays for the next start.
    """
    environ = os.environ if environ is None else environ
    dropped = []
    with _taking:
        while _handed_over:
            name, fd = _handed_over.popitem()
            os.close(fd)
            try:
                _tell(environ.get("NOTIFY_SOCKET", ""), f"FDSTOREREMOVE=1\nFDNAME={name}", [])
            except OSError as error:
                _log.warning("systemd can't be told to keep %s no more: %s", name, error)
            else:
                dropped.append(name)
    return dropped


def _tell(socket_address: str, text: str, fds: list[int]) -> None:
    address = f"\0{socket_address[1:]}" if socket_address.startswith("@") else socket_address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
        notify.connect(address)
        socket.send_fds(notify, [text.encode()], fds)


def _taken(environ: MutableMapping[str, str], names: Sequence[str]) -> dict[str, int]:
    """Take what systemd has handed to this process under these names; what is others' stays for them."""
    with _taking:
        _handed_over.update(_received(environ))
        return {name: _handed_over.pop(name) for name in names if name in _handed_over}


def _received(environ: MutableMapping[str, str]) -> dict[str, int]:
    """Return what systemd has handed to this process, which is told once."""
    if environ.pop("LISTEN_PID", "") != str(os.getpid()):
        return {}
    n, names = int(environ.pop("LISTEN_FDS", "0")), environ.pop("LISTEN_FDNAMES", "").split(":")
    found: dict[str, int] = {}
    for fd, name in zip(range(_FIRST, _FIRST + n), names, strict=False):
        os.set_inheritable(fd, False)
        if name.startswith("p2pkv-"):
            found[name] = fd
    return found
