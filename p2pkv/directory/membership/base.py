"""The membership interface, and the network the engines stand on.

An engine keeps one :class:`~p2pkv.directory.view.View` up to date and says when it changes. Promises:

* a node that dies is dead in everybody's view within 3 seconds, however many die at once, where most of those that live
  answer in time; where they don't, as much later as they take longer;
* a node that merely answers late, by a second or so, is not taken for dead;
* a node that merely can't run Python for a while is not suspected: probes are answered without the
  interpreter;
* a node that itself could not run suspects nobody for what it missed;
* two live nodes never keep one id: one of them is refused or expelled;
* with no peer in reach the node is a cluster of its own, at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from p2pkv.directory.membership.timing import Clock, Timing
from p2pkv.directory.view import DEFAULT_CLUSTER, View
from p2pkv.transports.base import Resource


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """What a node answers to a probe, whether or not its interpreter runs."""

    node_key: int
    boot_epoch: int
    digest: int


class Late(NamedTuple):
    """The answer to a probe or an exchange that had ended without it."""

    address: str
    asked_at: float
    """When it was asked for, by the engine's clock."""
    reply: ProbeReply | None = None
    view: bytes | None = None


class Network(Protocol):
    """The control plane as membership needs it. Used by one thread at a time, except for :meth:`wake`."""

    @property
    def address(self) -> str:
        """Our own advertised control address, ``host:port``."""

    def announce(self, node_key: int, boot_epoch: int) -> None:
        """Answer probes and exchanges as this node from now on. Before it, and after withdraw: neither."""

    def withdraw(self) -> None:
        """Answer no probe and no exchange any more. Idempotent."""

    def set_view(self, blob: bytes, digest: int) -> None:
        """Answer exchanges with ``blob`` and probes with ``digest`` from now on."""

    def probe(
        self, addresses: Sequence[str], timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[ProbeReply | None]:
        """Probe all in parallel; return when all answered or after ``timeout``. None: no answer.

        ``meanwhile`` is called now and then while somebody is silent. It may take in what was :meth:`received`, and
        ask nobody.
        """

    def exchange(self, addresses: Sequence[str], blob: bytes, timeout: float) -> list[bytes | None]:
        """Hand our view to all in parallel, return theirs; each queues ours for its engine. None: silent."""

    def tell(self, messages: Sequence[tuple[str, bytes]], timeout: float) -> list[ProbeReply | None]:
        """Hand news to peers in parallel, as (address, message); each queues it for its engine. None: silent."""

    def late(self, stretch: float) -> list[Late]:
        """Return the answers that have come since to probes and exchanges that have ended; never blocks.

        They are waited for for four seconds, times ``stretch``.
        """

    def received(self, timeout: float) -> list[bytes]:
        """Return the views and news peers handed to us since the last call; without any, block at most ``timeout``."""

    def resolve(self, address: str) -> Sequence[str]:
        """Return the addresses that one by name stands for now, perhaps none; never blocks."""

    def listen_also(self, address: str) -> bool:
        """Serve a second control address; False if it isn't one of this host's, or is taken."""

    def listen_no_more(self) -> None:
        """Give up all addresses of :meth:`listen_also`: others may have them."""

    def why_silent(self, address: str, tell: Callable[[str], None]) -> None:
        """Find out why nobody answers at ``address`` and ``tell`` it, from whichever thread; never blocks."""

    def wake(self) -> None:
        """Make a blocked :meth:`received`, or the next one, return. Thread-safe."""


class KeptBoots(NamedTuple):
    """The boots of a node in which its pool was the same memory; zeros for a new one, or where that is not known."""

    since: int
    last: int
    """Its process is proven to have ended."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says about itself."""

    node_id: str
    transports: Mapping[str, str] = field(default_factory=dict)
    """Name to domain."""
    weight: float = 1.0
    cluster: str = DEFAULT_CLUSTER
    """Nodes of another one are refused."""
    last_boot_epoch: int = 0
    """The highest this node remembers of itself, if it remembers; the next one is above it."""
    kept: KeptBoots | None = None
    """Which boots had this node's pool, if its memory outlives them; None: it does not."""


class Claim(NamedTuple):
    """What a node starts as."""

    boot_epoch: int
    kept_since: int
    """As :attr:`~p2pkv.directory.view.Member.kept_since`."""


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Listeners:
    """Whom an engine tells, from its own thread and with no lock held; the first change comes from ``start``.

    They must return soon: while they run the node neither probes nor learns (peers don't suffer from it).
    """

    on_change: Callable[[View, View], None] = _ignore
    """``(old, new)``: somebody came, went, or changed state."""
    on_resurrected: Callable[[], None] = _ignore
    """Peers had taken this node for dead, and dropped its entries: publish them again."""
    on_expelled: Callable[[str], None] = _ignore
    """This node is no member any more, for this reason, and will be again if ``on_reboot`` is told. By then its view
    is empty."""
    on_reboot: Callable[[int], None] = _ignore
    """This node goes on under this higher boot epoch: the cluster knew one above that of its start, or it had been
    expelled and nobody has its id any more. What it has published counts no more until it is published again."""
    on_claimed: Callable[[Claim], None] = _ignore
    """This node is about to start under this boot epoch, and has told nobody yet."""
    on_confirmed: Callable[[], None] = _ignore
    """The view holds all that this node was told, changed or not; said twice a second while the engine runs."""


class Membership(Resource):
    """One node's part in the cluster, from ``start`` to ``close``."""

    @abstractmethod
    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        join: Sequence[str],
        listeners: Listeners | None = None,
        clock: Clock | None = None,
        timing: Timing | None = None,
        random: Random | None = None,
    ) -> None:
        """Keep all this for ``start``; ask nobody yet.

        ``join`` are the configured addresses. Whoever tests an engine gives it a ``clock``, a ``timing`` and a source
        of random numbers; an engine that has no use for them ignores them.
        """

    @abstractmethod
    def start(self, deadline_s: float) -> None:
        """Become a member, within ``deadline_s`` seconds.

        Raises :class:`~p2pkv.errors.DuplicateNodeError` if a live node has this id, and
        :class:`~p2pkv.errors.MembershipError` if this node can't be a member for another reason.
        """

    @abstractmethod
    def view(self) -> View:
        """Return what is believed now, this node included; empty before ``start`` and while expelled. Never blocks."""

    @property
    def is_alone(self) -> bool:
        """Whether this node knows no other although ``join`` names some; never where the engine can't tell."""
        return False

    @property
    @abstractmethod
    def boot_epoch(self) -> int:
        """The boot epoch of this node, 0 before ``start``; a higher one only after ``on_reboot`` was told."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return what happened so far, by the names of the metrics."""

    def drain(self) -> None:
        """Tell peers soon that this node is about to leave: it holds no entries of the directory any more.

        Never blocks. An engine that can't tell them does nothing; then they hear of it when the node has left.
        """

    def settle(self) -> None:
        """Tell peers soon that all this node has was announced in this boot: what was said in earlier ones is over.

        Never blocks. An engine that can't tell them does nothing: then readers find, and miss, what a killed process
        had no time to take back.
        """

    @abstractmethod
    def close(self) -> None:
        """Say good-bye to the peers, within half a second, and stop. The network is the caller's to close."""
