"""Entering a cluster: a boot epoch above all earlier ones of this id, and no live node under the same id."""

from __future__ import annotations

from collections.abc import Sequence

from p2pkv.directory.membership.base import Claim, Identity, Network
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import LAST_EPOCH, Member, Report, State, flaw, node_key
from p2pkv.errors import ConfigError, DuplicateNodeError, MembershipError


def claim_boot_epoch(
    network: Network,
    identity: Identity,
    reports: Sequence[Report],
    address: str,
    *,
    clock: Clock,
    timing: Timing,
    deadline: float,
) -> Claim:
    """Return what to start as, given what the cluster says.

    A pool whose memory is that of earlier boots has the places of then only if nobody was this node in between, with
    another memory.

    Raises :class:`~p2pkv.errors.DuplicateNodeError` if a node of this id answers, and
    :class:`~p2pkv.errors.MembershipError` if another id has the same key. A predecessor that doesn't answer
    is replaced: whether it is dead or only stopped, it will find itself expelled.
    """
    records = [member for report in reports for member in report.members]
    key = node_key(identity.node_id)
    for member in records:
        if member.key == key and member.node_id != identity.node_id:
            raise MembershipError(
                f"node id {identity.node_id!r} has the same key as node {member.node_id!r} "
                f"at {member.address}; choose another node_id"
            )
    earlier = [member for member in records if member.node_id == identity.node_id]
    kept = identity.kept
    ended = kept.last if kept is not None else 0
    # at our own address nobody but us can answer; those who left said so themselves
    rivals = [m for m in earlier if m.address != address and m.state is not State.LEFT]
    # The last process that had the pool has ended, or this one would not have it: whoever has its boot is another, who
    # answers soon, or nobody.
    is_over = all(ended and rival.boot_epoch == ended for rival in rivals)
    left = max(0.0, deadline - clock.monotonic())
    addresses = sorted({rival.address for rival in rivals})
    patience = timing.ended_timeout if is_over else timing.duplicate_timeout
    replies = network.probe(addresses, min(patience, left)) if addresses else []
    for rival, reply in zip(addresses, replies, strict=True):
        if reply is not None and reply.node_key == key:
            raise DuplicateNodeError(
                f"node id {identity.node_id!r} is in use by a live node at {rival} "
                f"(boot epoch {reply.boot_epoch}); stop that node, or give this one another node_id"
            )
    last = max((member.boot_epoch for member in earlier), default=0)
    if last >= LAST_EPOCH:
        raise MembershipError(
            f"members say that node id {identity.node_id!r} has had boot epoch {last}, which no clock tells and "
            f"nothing is above; choose another node_id, or wait {timing.burial / 60:.0f} minutes until they forget it"
        )
    boot_epoch = max(clock.wall_ns(), last + 1, identity.last_boot_epoch + 1, ended + 1)
    if kept is None:
        return Claim(boot_epoch, 0)
    is_continued = 0 < ended >= max(last, identity.last_boot_epoch)
    return Claim(boot_epoch, kept.since if is_continued else boot_epoch)


def own_record(identity: Identity, address: str) -> Member:
    """Return this node's record, still without a boot.

    Raises :class:`~p2pkv.errors.ConfigError` if peers would refuse it.
    """
    own = Member(
        identity.node_id,
        0,
        address,
        transports=dict(identity.transports),
        weight=identity.weight,
    )
    wrong = flaw(own)
    if wrong is not None:
        raise ConfigError(f"this node can't be a member: {wrong}")
    return own
