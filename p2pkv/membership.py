"""What a membership engine of another package is made with, and what it keeps (docs/membership.md)."""

from p2pkv.directory.membership.base import Identity, Listeners, Membership, Network, ProbeReply
from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import Member, State, View, node_key

__all__ = [
    "Clock",
    "Identity",
    "Listeners",
    "Member",
    "Membership",
    "Network",
    "ProbeReply",
    "State",
    "Timing",
    "View",
    "node_key",
]
