"""A member's record as it lies in a store that others can read and write: whole, or not taken for one.

A sealed record is ``p2pkv``, a version byte, 32 bytes of BLAKE2b under a key that follows from the cluster's secret,
and the record as a view of one member (:mod:`p2pkv.directory.view`). Whoever lacks the secret can neither make one nor
change one. What he can do is to delete them, and to put old ones back; so a record alone makes nobody a member
(:mod:`p2pkv.directory.membership.registered`). ``docs/membership.md`` describes the format.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.view import Member, decode, encode
from p2pkv.errors import VersionError, ViewError

MAGIC = b"p2pkv"
VERSION = 1
_SUM = 32
_HEAD = len(MAGIC) + 1 + _SUM
MAX_RECORD_BYTES = 8192
"""More than any record whose every field is at its limit."""


class Seal:
    """Seals and opens the records of one cluster. Has no state: any thread may use it.

    What was sealed with a secret that is accepted besides is opened too.
    """

    def __init__(self, keys: ClusterKeys, cluster: str) -> None:
        self._keys = tuple(
            blake2b(pair.private, digest_size=32, person=b"p2pkv-record-1").digest() for pair in keys.all
        )
        self._cluster = cluster

    def close(self, member: Member) -> bytes:
        """Return the sealed record of a member, told by itself."""
        blob = encode(member.node_id, [member], cluster=self._cluster)
        return MAGIC + bytes([VERSION]) + _sum(self._keys[0], blob) + blob

    def open(self, sealed: bytes) -> Member:
        """Return the member of a sealed record.

        Raises :class:`~p2pkv.errors.VersionError` for one of another version, and
        :class:`~p2pkv.errors.ViewError` for anything that no node with the secret has written.
        """
        if not sealed.startswith(MAGIC) or not _HEAD < len(sealed) <= MAX_RECORD_BYTES:
            raise ViewError(f"it is no record of p2pkv ({len(sealed)} bytes)")
        version = sealed[len(MAGIC)]
        if version != VERSION:
            raise VersionError(
                f"it is a record of version {version}, and this node reads {VERSION}: upgrade one of the two"
            )
        blob = sealed[_HEAD:]
        told = sealed[len(MAGIC) + 1 : _HEAD]
        if not any(hmac.compare_digest(_sum(key, blob), told) for key in self._keys):
            raise ViewError(
                "it was not sealed with this cluster's secret; have all nodes the same secret_file?"
            )
        report = decode(blob)
        if report.cluster != self._cluster:
            raise ViewError(f"it is of cluster {report.cluster!r}, this node of {self._cluster!r}")
        if len(report.members) != 1 or report.members[0].node_id != report.sender:
            raise ViewError("it is not what one node says of itself")
        return report.members[0]


def _sum(key: bytes, blob: bytes) -> bytes:
    return blake2b(blob, key=key, digest_size=_SUM).digest()
