"""What routers beside each other tell each other: how many requests and tokens each has under way at which instance.

Every number stands for itself: a message has those that have changed, and once a second all. What is lost or comes
twice does no harm, and what is not said again counts no more after :data:`LIFE_S`. Only the receiver's own clock is
looked at. Nothing here waits, nor knows of sockets; ``docs/xpyd.md`` has the message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from p2pkv.address import split_address
from p2pkv.errors import ConfigError, ControlError, VersionError

VERSION = 1
SHARE_S = 0.05
"""Between two messages, if anything has changed. In simulation four routers before busy agents were 9 % worse at p90
than one with it, and 15 % with twice as much (``python -m demo.xpyd.simulation --agents 120 --routers 4``)."""
LIFE_S = 3.0
"""A replica that has said nothing for so long has nothing under way; nor has it at an instance that it has not named
for so long."""
MOST_REPLICAS = 64
_WHOLE_S = 1.0
"""All is said again so often, by who has nothing under way as well: so it is known to be there."""
_MESSAGE_NBYTES = 12 * 1024
"""Of one message's instances, or of a heartbeat in it, which leaves room for the rest below a heartbeat's bound."""
_MOST_MESSAGES = 8
"""At a time; what has no room waits for the next."""
_MOST_KEPT = 256 * 1024
"""Bytes of instances' names that are kept of one replica."""
_MOST_NAME = 1024
_MOST_REQUESTS, _MOST_TOKENS = 1_000_000, 1_000_000_000
_MOST_ADDRESS = 260

Counts = Mapping[str, tuple[int, int]]
"""Requests and tokens under way, by instance."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One message."""

    replica: str
    """Of its sender, another one after each start."""
    sequence: int
    """It grows with each message."""
    address: str = ""
    """Where the sender takes messages, as others reach it."""
    at: dict[str, tuple[int, int]] = {}
    """Requests and tokens at each instance that is named."""
    beside: tuple[str, ...] = ()
    """Where those take messages that the sender hears itself; with what is said once a second."""
    beat: bytes = b""
    """An instance's heartbeat that the sender was told and the receiver was not, as it came."""
    has_left: bool = False
    """It is the last one."""
    version: int = VERSION


class _Kind(msgspec.Struct):
    version: int = VERSION
    replica: str = ""


_kinds = msgspec.msgpack.Decoder(_Kind)
_loads = msgspec.msgpack.Decoder(ReplicaLoad)


def unpack(message: bytes) -> ReplicaLoad | None:
    """Read a replica's message and check it; None for what is none, a heartbeat say.

    Raises :class:`VersionError` for another version, :class:`ControlError` for nonsense.
    """
    try:
        kind = _kinds.decode(message)
        if not kind.replica:
            return None
        if kind.version != VERSION:
            raise VersionError(
                f"another router's load has version {kind.version}, this one reads {VERSION}; upgrade one"
            )
        load = _loads.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"a message to the router can't be read: {error}") from error
    if not 0 <= load.sequence < 1 << 63 or not 0 < len(load.replica) <= 64:
        raise ControlError("another router's load has an impossible sequence or sender")
    for name, (n_requests, n_tokens) in load.at.items():
        if not (
            0 < len(name) <= _MOST_NAME
            and 0 <= n_requests <= _MOST_REQUESTS
            and 0 <= n_tokens <= _MOST_TOKENS
        ):
            raise ControlError(
                f"another router's load at {name[:100]!r} is {n_requests} requests, {n_tokens} tokens"
            )
    if len(load.beside) > MOST_REPLICAS:
        raise ControlError(f"another router names {len(load.beside)} more; at most {MOST_REPLICAS}")
    for address in (load.address, *load.beside):
        if address and not _is_address(address):
            raise ControlError(f"another router says that one is at {address[:100]!r}")
    return load


def _is_address(address: str) -> bool:
    try:
        return len(address) <= _MOST_ADDRESS and split_address("router", address)[1] > 0
    except ConfigError:
        return False


class ToldLoad:
    """What this router tells the others."""

    def __init__(self, address: str = "") -> None:
        self.replica = secrets.token_hex(8)
        """This router's name among them."""
        self.address = address
        self._sequence = 0
        self._told: dict[str, tuple[int, int]] = {}
        self._left: list[str] = []  # to be said of the last whole
        self._whole_at = float("-inf")

    def messages(self, own: Counts, now: float, beside: Sequence[str] = ()) -> list[bytes]:
        """Return what is to be sent now, for all the others alike: often nothing. ``beside``: where who is heard is."""
        changed = [name for name, counts in own.items() if self._told.get(name) != counts]
        changed += [name for name in self._told if name not in own]
        is_whole = not self._left and now - self._whole_at >= _WHOLE_S
        if is_whole:
            self._whole_at = now
            self._left = list(own)
        waiting = list(dict.fromkeys([*changed, *self._left]))
        if not waiting and not is_whole:
            return []
        packed: list[bytes] = []
        said = 0
        for part in _parts(waiting):
            if len(packed) == _MOST_MESSAGES:
                break
            named = tuple(beside) if is_whole and not packed else ()
            packed.append(self._pack({name: own.get(name, (0, 0)) for name in part}, beside=named))
            said += len(part)
            for name in part:
                if name in own:
                    self._told[name] = own[name]
                else:
                    self._told.pop(name, None)
        is_said = set(waiting[:said])
        self._left = [name for name in self._left if name not in is_said]
        return packed

    def passed_on(self, beat: bytes) -> bytes | None:
        """Return a message with an instance's heartbeat in it; None if that is too long."""
        return self._pack({}, beat=beat) if len(beat) <= _MESSAGE_NBYTES else None

    def good_bye(self) -> bytes:
        """Return the last message."""
        return self._pack({}, has_left=True)

    def _pack(
        self,
        at: dict[str, tuple[int, int]],
        *,
        beside: tuple[str, ...] = (),
        beat: bytes = b"",
        has_left: bool = False,
    ) -> bytes:
        self._sequence += 1
        return msgspec.msgpack.encode(
            ReplicaLoad(
                replica=self.replica,
                sequence=self._sequence,
                address=self.address,
                at=at,
                beside=beside,
                beat=beat,
                has_left=has_left,
            )
        )


def _parts(names: list[str]) -> Iterator[list[str]]:
    """Cut names into those of one message each; at least one, if it is empty."""
    part: list[str] = []
    nbytes = 0
    for name in names:
        nbytes += len(name.encode()) + 16
        if part and nbytes > _MESSAGE_NBYTES:
            yield part
            part, nbytes = [], len(name.encode()) + 16
        part.append(name)
    yield part


@dataclass(slots=True)
class Replica:
    """One other router, as it was heard."""

    sequence: int = -1
    heard: float = 0.0
    address: str = ""
    at: dict[str, tuple[int, int]] = field(default_factory=dict)
    named: dict[str, float] = field(default_factory=dict)
    """When it named each instance last."""
    nbytes: int = 0
    """Of the names."""


class HeardLoad:
    """What the others have under way. ``own`` is this router's name among them: its own messages change nothing."""

    def __init__(self, own: str) -> None:
        self._own = own
        self.replicas: dict[str, Replica] = {}
        self._changed: set[str] = set()

    def note(self, load: ReplicaLoad, now: float) -> bool:
        """Take a message; whether it was taken. One that is late, repeated or has no room is not."""
        if load.replica == self._own:
            return True
        replica = self.replicas.get(load.replica)
        if replica is None:
            if load.has_left or len(self.replicas) >= MOST_REPLICAS:
                return load.has_left
            replica = self.replicas[load.replica] = Replica()
        if load.sequence <= replica.sequence:
            return False
        replica.sequence, replica.heard, replica.address = load.sequence, now, load.address
        if load.has_left:
            self._drop(load.replica)
            return True
        for name, counts in load.at.items():
            self._set(replica, name, counts, now)
        return True

    def expire(self, now: float, late: float = 0.0) -> list[str]:
        """Drop what was not said again in time; return the names of the replicas that are gone by that.

        ``late``: for so many seconds this process has listened to nobody; these count against nobody.
        """
        gone = []
        for key, replica in list(self.replicas.items()):
            replica.heard += late
            if now - replica.heard > LIFE_S:
                gone.append(key)
                self._drop(key)
                continue
            for name in [name for name, at in replica.named.items() if now - at > LIFE_S + late]:
                self._forget(replica, name)
            if late:
                replica.named = {name: at + late for name, at in replica.named.items()}
        return gone

    def addresses(self) -> list[str]:
        """Return where those take messages that are heard."""
        return [replica.address for replica in self.replicas.values() if replica.address]

    def sums(self) -> dict[str, tuple[int, int]]:
        """Return what all others have under way together."""
        total: dict[str, tuple[int, int]] = {}
        for replica in self.replicas.values():
            for name, (n_requests, n_tokens) in replica.at.items():
                before = total.get(name, (0, 0))
                total[name] = before[0] + n_requests, before[1] + n_tokens
        return total

    def take_changed(self) -> dict[str, tuple[int, int]]:
        """Return the sums that may be others than at the last call; zeros for who has nothing any more."""
        changed, self._changed = self._changed, set()
        found = {}
        for name in changed:
            counts = [replica.at[name] for replica in self.replicas.values() if name in replica.at]
            found[name] = sum(n for n, _ in counts), sum(n for _, n in counts)
        return found

    def _set(self, replica: Replica, name: str, counts: tuple[int, int], now: float) -> None:
        if counts == (0, 0):
            self._forget(replica, name)
            return
        if name not in replica.named:
            if replica.nbytes + len(name) > _MOST_KEPT:
                return
            replica.nbytes += len(name)
        replica.named[name] = now
        if replica.at.get(name) != counts:
            replica.at[name] = counts
            self._changed.add(name)

    def _forget(self, replica: Replica, name: str) -> None:
        if replica.named.pop(name, None) is not None:
            replica.nbytes -= len(name)
            del replica.at[name]
            self._changed.add(name)

    def _drop(self, key: str) -> None:
        self._changed.update(self.replicas.pop(key).at)
