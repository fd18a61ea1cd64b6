"""What may become of a page at a node, and what is said of it. Mirrors ``native/src/page/page_history.h``."""

from __future__ import annotations

from enum import IntEnum


class PageEvent(IntEnum):
    """What became of a page. The number is on the wire; one that a node does not know it leaves out."""

    STORED = 0
    WRITTEN = 1
    EVICTED = 16
    RETRACTED = 17
    CLEARED = 18
    BUMPED = 19
    NO_ROOM = 20
    TOO_LATE = 21
    EVICTED_FROM_DISK = 22
    TAKEN_FROM_DISK = 23
    BAD_ON_DISK = 24
    DISK_CLEARED = 25
    ENTRY_DROPPED = 32
    ENTRY_DOUBTED = 33
    OWNER_GONE = 34
    MISSED_NOT_FOUND = 48
    MISSED_REJECTED = 49
    MISSED_PEER_LOST = 50
    MISSED_TIMED_OUT = 51
    MISSED_CHECKSUM = 52
    MISSED_NOT_PROMOTED = 53
    MISSED_UNREADABLE = 54

    @property
    def is_departure(self) -> bool:
        """Whether a page that was at the node is not there since, or was not taken."""
        return PageEvent.EVICTED <= self <= PageEvent.DISK_CLEARED


SENTENCES = {
    PageEvent.STORED: "came into its pool",
    PageEvent.WRITTEN: "was written to its disk",
    PageEvent.EVICTED: "was evicted from its pool, to make room",
    PageEvent.RETRACTED: "was taken back there",
    PageEvent.CLEARED: "was cleared there with all others",
    PageEvent.BUMPED: "was of before a bump of the namespace",
    PageEvent.NO_ROOM: "was not taken: its pool had no room, everything was held",
    PageEvent.TOO_LATE: "was not taken: the publish had no time left for it",
    PageEvent.EVICTED_FROM_DISK: "was evicted from its disk, to make room",
    PageEvent.TAKEN_FROM_DISK: "was taken back from its disk",
    PageEvent.BAD_ON_DISK: "failed a check when it was read from its disk, and was dropped",
    PageEvent.DISK_CLEARED: "was cleared from its disk with all others, by a clear or a bump",
    PageEvent.ENTRY_DROPPED: "left its part of the directory: the owner has it no more",
    PageEvent.ENTRY_DOUBTED: "left its part of the directory: a reader found the entry stale",
    PageEvent.OWNER_GONE: "left its part of the directory: the owner is no member any more",
    PageEvent.MISSED_NOT_FOUND: "was missed by a fetch there: nobody was known to have it",
    PageEvent.MISSED_REJECTED: "was missed by a fetch there: it was another page by then",
    PageEvent.MISSED_PEER_LOST: "was missed by a fetch there: its owner was lost",
    PageEvent.MISSED_TIMED_OUT: "was missed by a fetch there: it did not come in time",
    PageEvent.MISSED_CHECKSUM: "was missed by a fetch there: its bytes were damaged",
    PageEvent.MISSED_NOT_PROMOTED: "was missed by a fetch there: its owner's disk did not bring it in time",
    PageEvent.MISSED_UNREADABLE: "was missed by a fetch there: it came packed and can't be unpacked",
}
