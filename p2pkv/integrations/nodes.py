"""Which node of an engine's process does what, where the engine attaches to its host's node.

By itself a process has one node, which does all. With ``attach`` the pages are the host's node's, and the process that
reads and publishes them is no member of the cluster: it has no offers, and nobody reads its memory. Whatever takes a
member is done by a second node beside it then, one without a pool. Which of the two does what, and which settings reach
it, is decided here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from p2pkv import _native
from p2pkv.address import is_loopback, split_address
from p2pkv.attach.auto import decided
from p2pkv.config import Config
from p2pkv.errors import ControlError
from p2pkv.node import Node

_log = logging.getLogger(__name__)

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}
_ANSWER_S = 5.0
"""How long the host's node may take to say where it is."""


@dataclass(frozen=True, slots=True)
class EngineNodes:
    """The nodes of one process; they are the same one unless the process is attached."""

    cache: Node
    """Publishes, looks up and fetches pages."""
    member: Node
    """Makes and takes offers, has memory that peers read, and is told of routers by these."""

    @classmethod
    def start(cls, config: Config, start_node: Callable[[Config], Node], *, has_pages: bool) -> EngineNodes:
        """Start them. ``has_pages`` says whether any are published or fetched; else a member is all that is needed.

        Raises the errors of :meth:`~p2pkv.node.Node.start`, and leaves nothing running then.
        """
        config = decided(config)
        if not config.attach:
            node = start_node(config)
            return cls(node, node)
        if not has_pages:
            node = start_node(member_beside(config))
            return cls(node, node)
        with ExitStack() as undo:
            cache = start_node(dataclasses.replace(config, node_id=f"{config.node_id}-pages"))
            undo.callback(cache.close)
            port = config.metrics_port and config.metrics_port + 1
            member = start_node(dataclasses.replace(member_beside(config), metrics_port=port))
            undo.pop_all()
        return cls(cache, member)

    @property
    def each(self) -> tuple[Node, ...]:
        """Those that there are, each once."""
        return (self.member,) if self.member is self.cache else (self.member, self.cache)

    def register_address(self, address: int, nbytes: int, owner: object, *, is_offered: bool) -> None:
        """Have all of them know memory that pages and rows lie in; ``is_offered``: peers read it."""
        for node in self.each:
            node.register_address(address, nbytes, owner, readable=is_offered and node is self.member)

    def take_back(self) -> None:
        """Take back what this process has published, to make room; what its host's node has is left to age there."""
        if not self.cache.config.attach:
            self.cache.clear()

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        for node in self.each:
            node.close()


def member_beside(config: Config) -> Config:
    """Return the settings of the member beside an attached engine; any others as they are.

    It is of the host's node's cluster unless ``cluster`` names one, and joins whom ``join`` or ``membership`` names.
    Without any it joins the host's node, by the address that the node says, and listens beside it unless ``listen``
    was set, which stays as it is. Raises :class:`~p2pkv.errors.ControlError` if there is no node to attach to.
    """
    config = decided(config)
    if not config.attach:
        return config
    node, cluster = _node_at(config.attach_path)
    changes: dict[str, Any] = {"attach": "", "pool_size": 0}
    if config.cluster == _DEFAULTS["cluster"]:  # as for the engine itself, whose pages are of that cluster
        changes["cluster"] = cluster
    if not config.join_addresses and config.store is None:
        changes["join"] = (node,)
        own, port = split_address("listen", config.listen)
        if is_loopback(own) and not is_loopback(split_address("join", node)[0]):
            # members of other hosts would look for it at their own loopback, and take it for dead
            if config.listen == _DEFAULTS["listen"]:
                changes["listen"] = f"{node.rpartition(':')[0]}:{port}"
                _log.info(
                    "attached to a node at %s: the member beside it listens at %s", node, changes["listen"]
                )
            else:
                _log.warning(
                    "listen is %s, where members of other hosts don't reach the member beside an engine of the node at "
                    "%s; leave listen out, or name an address of this host",
                    config.listen,
                    node,
                )
    return dataclasses.replace(config, **changes)


def _node_at(path: str) -> tuple[str, str]:
    """Return the address of the node that engines attach to at ``path``, and its cluster's name."""
    try:
        address, cluster, _ = _native.visit_attach_host(path, _ANSWER_S)
    except RuntimeError as error:
        raise ControlError(f"cannot attach to the node at 'unix:{path}': {error}") from error
    return address, cluster
