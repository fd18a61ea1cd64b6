"""``auto`` in place of a path: where a node listens then, and how an engine finds the node of its host.

What it comes to is decided once, when a process starts, before anything goes by whether it is attached: an engine that
finds a node attaches to it, and stays attached when that goes; one that finds none is a node by itself, and stays one
when another comes.

Nodes and engines meet in a folder of their user's, under a name that follows from the secret: so tenants' nodes, and
those of other secrets, are in nobody's way. An engine also looks under the name that nodes are told in the
manifests and in the documentation, where it finds out whose it is by asking.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from p2pkv import _native
from p2pkv.config import AUTO, Config
from p2pkv.control.host_names import Names
from p2pkv.control.secret import ClusterKeys, cluster_keys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.view import DEFAULT_CLUSTER
from p2pkv.errors import ConfigError
from p2pkv.transports.base import Resource

_log = logging.getLogger(__name__)

_DECIDE_S = 5.0
"""How long an engine looks for a node altogether; one that is stopped, or has another secret, is silent for so long."""
_SECRET_S = 2.0
"""How long a node may take to answer who has its secret, of that: a handshake and a question, on a busy machine."""
_VISIT_S = 1.0
"""How long who listens at one path may take to say who he is, of that: one that hangs leaves time for the others."""
_GIVEN = "host"
"""What nodes' sockets are called in the manifests and in the documentation."""
_SERVICES = Path("/run/p2pkv")
"""The folder of a service that is called so (``RuntimeDirectory`` of systemd), and of a container's volume."""
_USERS = Path("/run/user")
"""It has a folder for each user who has logged in, which ``XDG_RUNTIME_DIR`` names in his sessions."""


def decided(config: Config) -> Config:
    """Return the settings with paths, or nothing, in place of ``auto``; they themselves where that is nowhere.

    Blocks for five seconds at most. Raises :class:`~p2pkv.errors.ConfigError` where there is no folder to listen in,
    and for a secret that can't be read.
    """
    if config.attach_listen == AUTO:
        return dataclasses.replace(config, attach_listen=f"unix:{listening_path(config)}")
    if config.attach == AUTO:
        return dataclasses.replace(config, attach=_find(config))
    return config


def listening_path(config: Config) -> Path:
    """Return where a node with these settings listens if it is told ``auto``. Raises as :func:`decided`."""
    keys = cluster_keys(config.secret_file, config.accepted_secret_files)
    for folder in _folders():
        if _is_own(folder) or (not os.path.lexists(folder) and _is_own(folder.parent)):
            return folder / _name_for(keys)
    raise ConfigError(
        f"attach_listen is {AUTO!r}, and none of the folders for that is there, or can be made, "
        f"{', '.join(map(str, _folders()))}: set XDG_RUNTIME_DIR to a folder of this user's, or attach_listen to "
        "unix:/PATH in one"
    )


def _folders() -> list[Path]:
    """Return where sockets may lie, first where a node prefers to."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    folders = [Path(given) / "p2pkv"] if os.path.isabs(given) else []
    return list(dict.fromkeys([*folders, _SERVICES, _USERS / str(os.geteuid()) / "p2pkv"]))


def _name_for(keys: ClusterKeys) -> str:
    # of the public key, which tells nobody the secret
    return f"{_GIVEN}-{hashlib.blake2b(keys.public_raw, digest_size=8, person=b'p2pkv-attach-1').hexdigest()}"


def _is_own(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _find(config: Config) -> str:
    """Return what ``attach`` is: the path of a node that lets this process in, or nothing; the log says which."""
    path, refusals = look_for_node(config)
    if path is not None:
        _log.info("attach is %r: this process attaches to the node at unix:%s", AUTO, path)
        return f"unix:{path}"
    if refusals:
        _log.warning(
            "attach is %r, and this process is a node by itself, for as long as it lives: %s",
            AUTO,
            "; ".join(refusals),
        )
    else:
        _log.info(
            "attach is %r, and this process is a node by itself, for as long as it lives: %s",
            AUTO,
            nobody_listens(),
        )
    return ""


def look_for_node(config: Config) -> tuple[Path | None, list[str]]:
    """Return where a node lets this process in that is told ``auto``, if one does, and why others do not."""
    keys = cluster_keys(config.secret_file, config.accepted_secret_files)
    refusals: list[str] = []
    with _Search(config, keys) as search:
        for path in _places(keys, refusals):
            why = search.why_apart(path)
            if why is None:
                return path, refusals
            if why:
                refusals.append(f"{path}: {why}")
    return None, refusals


def nobody_listens() -> str:
    """Say where was looked, and in vain."""
    return f"no node of this user listens in {' or '.join(map(str, _folders()))}"


def why_apart(config: Config, path: Path) -> str | None:
    """Say why the node at ``path`` does not let this process in; None if it does, and empty if nobody listens."""
    with _Search(config, cluster_keys(config.secret_file, config.accepted_secret_files)) as search:
        return search.why_apart(path)


def _places(keys: ClusterKeys, refusals: list[str]) -> Iterator[Path]:
    """Yield paths at which a node may listen; what keeps this user from looking is added to ``refusals``."""
    names = [*(_name_for(pair) for pair in keys.all), _GIVEN]
    for folder in _folders():
        try:
            owner = folder.stat().st_uid
        except FileNotFoundError:
            continue
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror}; run the node and its engines as one user")
            continue
        if owner != os.geteuid():
            refusals.append(
                f"{folder} is a folder of user {owner}, and this is user {os.geteuid()}; run the node and its engines "
                "as one user"
            )
            continue
        yield from (path for name in names if os.path.lexists(path := folder / name))


def has_listener(path: Path) -> bool:
    """Whether somebody listens there, be it one who lets nobody in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False  # it was left by a node that was killed
        except OSError:
            return True
        return True


class _Search(Resource):
    """Asks who listens somewhere, and whether he has the secret; all of it within one deadline."""

    def __init__(self, config: Config, keys: ClusterKeys) -> None:
        self._cluster = config.cluster
        self._deadline = time.monotonic() + _DECIDE_S
        self._context: zmq.Context[Socket] = zmq.Context()
        self._client = ControlClient(self._context, keys, Names())

    def why_apart(self, path: Path) -> str | None:
        """Say why this process does not attach to the node at ``path``; None if it does, and empty: there is none."""
        if not self._left:
            return "nobody was asked there, since the time was over"
        try:
            address, cluster, n_places = _native.visit_attach_host(str(path), min(_VISIT_S, self._left))
        except RuntimeError as error:
            return str(error) if has_listener(path) else ""
        if not n_places:
            return "the node there has let in as many engines as it takes"
        # as for an engine that is told the path: the cluster that nobody has named says nothing
        if self._cluster not in (cluster, DEFAULT_CLUSTER):
            return f"the node there is of cluster {cluster!r}, and this process of {self._cluster!r}"
        reply = self._client.ask(Request(address, Kind.PROBE), min(_SECRET_S, self._left))
        if reply is None or not reply.ok:
            return (
                f"the node there, at {address}, does not answer who has this secret; it has another secret_file, or "
                "hangs"
            )
        return None

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def close(self) -> None:
        self._client.close()
        self._context.destroy(0)
