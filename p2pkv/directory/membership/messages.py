"""What membership says and hears, as messages: of one cluster only, and never longer than a message may be."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from random import Random

from p2pkv.control.wire import HEADER, MAX_MESSAGE
from p2pkv.directory.view import Doubt, Member, Proof, Report, decode, encode
from p2pkv.errors import VersionError, ViewError

log = logging.getLogger(__name__)

MAX_BODY = MAX_MESSAGE - HEADER.size
"""Of a longer one the reader hears nothing: ZMQ ends the connection."""


class Messages:
    """Writes and reads for one node. Owned by the engine's thread."""

    def __init__(self, node_id: str, cluster: str, random: Random) -> None:
        self._node_id = node_id
        self._cluster = cluster
        self._random = random
        self.foreign: set[str] = set()
        """The names of other clusters whose nodes were met."""
        self.counts = dict.fromkeys(("malformed_views", "refused_clusters", "cut_views"), 0)

    def news(
        self,
        members: Iterable[Member] = (),
        *,
        doubts: Iterable[Doubt] = (),
        proofs: Iterable[Proof] = (),
    ) -> bytes:
        """Return a message about some members."""
        return encode(self._node_id, members, cluster=self._cluster, doubts=doubts, proofs=proofs)

    def view(self, members: Iterable[Member]) -> bytes:
        """Return a whole view; of one that does not fit as much as does, drawn anew each time.

        The dead go first. Whoever is told other parts each time knows all of it in the end.
        """
        members = list(members)
        blob = self.news(members)
        if len(blob) <= MAX_BODY:
            return blob
        if self.counts["cut_views"] == 0:
            log.error(
                "the view of %d members takes %d bytes, more than the %d of a message: peers are told parts of it; "
                "make node ids, addresses or clusters smaller",
                len(members),
                len(blob),
                MAX_BODY,
            )
        self.counts["cut_views"] += 1
        while len(blob) > MAX_BODY:
            present = [member for member in members if member.is_present]
            if len(present) == len(members):
                n = int(len(members) * MAX_BODY / len(blob) * 0.95)
                own = [member for member in members if member.node_id == self._node_id]
                present = [*self._random.sample(members, n), *own]
            members = list({member.node_id: member for member in present}.values())
            blob = self.news(members)
        return blob

    def read(self, blob: bytes) -> Report | None:
        """Return what a peer told; None for what can't be read, and for another cluster's."""
        try:
            report = decode(blob)
        except (ViewError, VersionError) as error:
            if self.counts["malformed_views"] == 0:  # a broken peer sends many; the counter tells how many
                log.warning("dropped %s", error)
            self.counts["malformed_views"] += 1
            return None
        if report.cluster == self._cluster or not (report.members or report.doubts or report.proofs):
            return report
        self.counts["refused_clusters"] += 1
        if report.cluster not in self.foreign:
            self.foreign.add(report.cluster)
            log.error(
                "refused node %s: it is of cluster %r, this node of cluster %r; the two stay apart. If they should be "
                "one, give both the same `cluster`; if not, take the address of one out of the other's `join`",
                report.sender,
                report.cluster,
                self._cluster,
            )
        return None
