"""What a serving instance tells the routers about itself, every few seconds, over ZMQ with the cluster's CURVE keys.

An instance is one engine behind one HTTP address. Heartbeats carry everything a router has to know of it, so that a
router that was just started knows as much as one that has run for days. They are sent by our integrations inside the
engines, or by ``p2pkv announce`` beside one; ``docs/xpyd.md`` has every field.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec
import zmq

from p2pkv.address import split_address
from p2pkv.control.secret import ClusterKeys
from p2pkv.directory.routers import MOST_ROUTERS
from p2pkv.errors import ConfigError, ControlError, VersionError
from p2pkv.instances.teller import Teller
from p2pkv.message_types import worked_out

_log = logging.getLogger(__name__)

VERSION = 1
INTERVAL_S = 3.0
"""Between two heartbeats."""
_RETRY_S = 0.5
"""The same while a router is not connected."""
MAX_BYTES = 16384
"""Of one heartbeat; whoever sends more is disconnected."""
_MAX_TEXT = 1024
_MOST_RANKS = 1 << 16


class Role(str, Enum):
    """What an instance does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """An ordinary engine, which computes prompts itself."""


class Mode(str, Enum):
    """How a router hands a request to a prefill and a decode instance."""

    SGLANG = "sglang"
    """The same body to both at once, with ``bootstrap_host``, ``bootstrap_port`` and a fresh ``bootstrap_room``."""
    VLLM = "vllm"
    """Prefill with ``max_tokens`` 1 first; its ``kv_transfer_params`` go with the request to the decode."""
    VLLM_ADDRESSES = "vllm-addresses"
    """As ``VLLM``, with both KV addresses in the request id, as older connectors want it."""


class State(str, Enum):
    """Whether an instance takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has; takes nothing new."""
    FAILING = "failing"
    """There, but its health check fails."""
    LEFT = "left"
    """Said once, as a good-bye."""


class Instance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an instance is: all that stays the same while it runs.

    Fields that have their defaults are not sent, so that a router which does not know one refuses only who uses it.
    """

    url: str
    """Where it serves HTTP: ``http://HOST:PORT``, or with https."""
    role: Role
    mode: Mode = Mode.VLLM
    id: str = ""
    """Unique among the instances; by default its address."""
    model: str = ""
    """The model's name as requests have it; without one every model is taken."""
    bootstrap_host: str = ""
    """SGLang prefills: where decodes find them; by default the host of ``url``."""
    bootstrap_port: int | None = None
    """SGLang prefills: ``--disaggregation-bootstrap-port``; None: the decode's own default."""
    kv_address: str = ""
    """``vllm-addresses``: ``HOST:PORT`` of the KV connector."""
    dp_rank: int | None = None
    """It is one of several data parallel ranks behind ``url``; None: the engine deals out requests itself."""
    capacity: int = 0
    """Requests it may have at once; 0: as many as come."""
    node_id: str = ""
    """Its p2pkv node, by which the directory names it as an owner of pages."""
    namespace: str = ""
    """The namespace of that node."""
    page_size: int = 0
    """Tokens a page; 0: its page keys can't be computed from outside."""
    tokenizer: str = ""
    """``bytes``: a begin token 256 and one token a byte; empty: only prompts of token ids have keys."""
    key_prefix: str = ""
    """What its page keys start with, before the chained hash."""

    @property
    def host(self) -> str:
        """Host of the URL, without brackets."""
        return split_address("url", self.url.split("://", 1)[1].split("/", 1)[0])[0]


def checked(instance: Instance) -> Instance:
    """Return the instance with its defaults filled in. Raises :class:`ConfigError` for what can't be one."""
    url = instance.url.rstrip("/")
    scheme, separator, address = url.partition("://")
    if scheme not in ("http", "https") or not separator or "/" in address or "@" in address:
        raise ConfigError(f"an instance's url is http://HOST:PORT or https://HOST:PORT, not {instance.url!r}")
    split_address("url", address)
    for name in instance.__struct_fields__:
        value = getattr(instance, name)
        if isinstance(value, str) and (len(value) > _MAX_TEXT or not value.isprintable()):
            raise ConfigError(
                f"instance {instance.url[:100]!r}: {name} has unprintable or too many characters"
            )
    port = instance.bootstrap_port
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"instance {url}: bootstrap_port is {port}")
    if instance.dp_rank is not None and not 0 <= instance.dp_rank < _MOST_RANKS:
        raise ConfigError(f"instance {url}: dp_rank is {instance.dp_rank}")
    if min(instance.capacity, instance.page_size) < 0:
        raise ConfigError(f"instance {url}: capacity and page_size can't be negative")
    if instance.mode is Mode.VLLM_ADDRESSES:
        split_address("kv_address", instance.kv_address)
    name = address if instance.dp_rank is None else f"{address}@{instance.dp_rank}"
    is_named = instance if instance.id else msgspec.structs.replace(instance, id=name)
    return msgspec.structs.replace(is_named, url=url)


@worked_out
class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One report. ``boot`` and ``sequence`` order the reports of an instance: an older one changes nothing."""

    instance: Instance
    boot: int
    """Nanoseconds of the sender's clock when it started."""
    sequence: int
    state: State
    running: int = 0
    """Requests it works on."""
    waiting: int = 0
    """Requests that wait for their turn in it."""
    kv_tokens: int = 0
    """Tokens whose KV it holds for requests, prompts and generated ones alike."""
    kv_capacity: int = 0
    """Tokens it has room for; 0: it does not say."""
    routers: tuple[str, ...] = ()
    """Heartbeat addresses of all routers that it tells: by these they find each other."""
    version: int = VERSION


def pack(heartbeat: Heartbeat) -> bytes:
    """Encode a heartbeat as msgpack."""
    return msgspec.msgpack.encode(heartbeat)


def unpack(message: bytes) -> Heartbeat:
    """Read a heartbeat and check it.

    Raises :class:`VersionError` for another version, :class:`ControlError` or :class:`ConfigError` for nonsense.
    """
    try:
        version = msgspec.msgpack.decode(message, type=_Versioned).version
        if version != VERSION:
            raise VersionError(f"a heartbeat has version {version}, this router reads {VERSION}; upgrade one")
        heartbeat = msgspec.msgpack.decode(message, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"a heartbeat can't be read: {error}") from error
    numbers = (heartbeat.boot, heartbeat.sequence, heartbeat.running, heartbeat.waiting)
    if min(*numbers, heartbeat.kv_tokens, heartbeat.kv_capacity) < 0:
        raise ControlError(
            f"a heartbeat of {heartbeat.instance.id or heartbeat.instance.url} has negative numbers"
        )
    if len(heartbeat.routers) > MOST_ROUTERS:
        raise ControlError(f"a heartbeat names {len(heartbeat.routers)} routers; at most {MOST_ROUTERS}")
    for router in heartbeat.routers:
        split_address("router", router)
    return msgspec.structs.replace(heartbeat, instance=checked(heartbeat.instance))


@worked_out
class _Versioned(msgspec.Struct):
    version: int


class Load(msgspec.Struct, frozen=True):
    """How an instance is now."""

    state: State
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0


class Heart:
    """Sends an instance's heartbeats to every router, from a thread of its own until :meth:`close`.

    ``look`` is called before each one, on that thread. Routers need not be there: each gets the newest report when
    it comes. The log says when a router has taken the first one, and why one takes none. ``found`` returns the
    addresses of routers that are told besides ``routers``; it is called before each heartbeat.

    :meth:`close` says good-bye, which routers that listen get at once.
    """

    def __init__(
        self,
        instance: Instance,
        routers: Sequence[str],
        keys: ClusterKeys,
        look: Callable[[], Load],
        *,
        interval: float = INTERVAL_S,
        found: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._instance = checked(instance)
        self._look = look
        self._interval = interval
        self._keys = keys
        self._named = tuple(routers)
        self._found = found
        self._boot = time.time_ns()
        self._sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tellers: dict[str, Teller] = {}  # by address; used by the thread, once that runs
        for router in self._named:
            self._tellers[router] = self._teller(router)
        self._closing = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="p2pkv-heart", daemon=True)
        self._thread.start()

    def _teller(self, router: str) -> Teller:
        return Teller(self._context, router, self._keys, who=self._instance.id)

    @property
    def instance(self) -> Instance:
        """What is told at present."""
        return self._instance

    def change(self, instance: Instance) -> None:
        """Tell ``instance`` from now on, the first time at once. Raises :class:`ConfigError` for what can't be one."""
        self._instance = checked(instance)
        self.beat_now()

    def beat_now(self) -> None:
        """Send the next heartbeat without waiting: something has changed."""
        self._due.set()

    def close(self) -> None:
        """Say good-bye and stop. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._due.set()
            self._thread.join()
            self._context.term()

    def _beat(self) -> None:
        try:
            while not self._closing.is_set():
                self._follow()
                # without a router nobody asks how the engine is
                is_heard = bool(self._tellers) and self._send(self._look())
                self._due.wait(self._interval if is_heard else min(self._interval, _RETRY_S))
                self._due.clear()
        except Exception:  # noqa: BLE001 - the top of a thread
            _log.exception("instance %s can't be looked at; it is announced no more", self._instance.id)
        self._send(Load(State.LEFT))
        for teller in self._tellers.values():
            teller.close()

    def _follow(self) -> None:
        """Tell the routers that are known now, and nobody else."""
        known = dict.fromkeys((*self._named, *self._found()))
        for router in [router for router in self._tellers if router not in known]:
            self._tellers.pop(router).close()
        for router in list(known)[:MOST_ROUTERS]:
            if router not in self._tellers:
                self._tellers[router] = self._teller(router)

    def _send(self, load: Load) -> bool:
        """Send a report to the routers that are connected; whether all are."""
        self._sequence += 1
        message = pack(
            Heartbeat(
                instance=self._instance,
                boot=self._boot,
                sequence=self._sequence,
                state=load.state,
                running=load.running,
                waiting=load.waiting,
                kv_tokens=load.kv_tokens,
                kv_capacity=load.kv_capacity,
                routers=tuple(self._tellers)[:MOST_ROUTERS],
            )
        )
        # those that are not connected yet get the next one
        heard = [self._tell(teller, message) for teller in self._tellers.values()]
        return all(heard)

    def _tell(self, teller: Teller, message: bytes) -> bool:
        instance = self._instance

        def on_first() -> None:
            _log.info("%s is announced to %s as a %s", instance.id, teller.address, instance.role.value)

        return teller.send(message, on_first=on_first)
