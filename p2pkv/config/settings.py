"""A node's settings: what they are.

Every setting has a default. The same keys work in Python, as JSON, as ``P2PKV_<KEY>`` environment variables and in the
extra configuration of SGLang and vLLM. An unknown key is refused with the nearest name, but in the environment, where
others write too: there it is a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from p2pkv.config.checks import DATA_PORTS, check
from p2pkv.config.sources import gather
from p2pkv.config.tenants import Tenants, check_tenants, read_tenants
from p2pkv.store_url import StoreUrl, is_store_url, read_store_url
from p2pkv.transports import AllOptions, encrypted, former_names, read_options, take_former
from p2pkv.values import (
    as_bool,
    as_folder,
    as_number,
    as_ports,
    as_tuple,
    parse_size,
)


class _DrawnId(str):
    """A node id that nobody chose: another one at each start."""


def _default_node_id() -> str:
    # Random, because two containers of one host may share both host name and process id.
    return _DrawnId(f"{socket.gethostname()[:96]}-{secrets.token_hex(3)}")


def _takes_former(config: type[Config]) -> type[Config]:
    """Let calls of the class name settings that have become options of transports."""
    made = config.__init__

    @functools.wraps(made)
    def make(self: Config, **settings: Any) -> None:
        taken: dict[str, Any] = take_former(settings)
        made(self, **taken)

    config.__init__ = make  # type: ignore[method-assign]
    return config


@_takes_former
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one node, checked when made. Raises :class:`~p2pkv.errors.ConfigError`."""

    namespace: str = "default"
    """What makes bytes incompatible: model, dtype, layout, page size, TP and PP rank and size, tenant."""
    node_id: str = dataclasses.field(default_factory=_default_node_id)
    """Unique among the live nodes of a cluster; a restarted node may have its id again."""
    listen: str = "127.0.0.1:0"
    """``HOST:PORT`` of the control socket; port 0 takes a free one. Data ports bind the same host."""
    data_ports: str = ""
    """The TCP ports that peers reach this node's data and directory at, such as ``7500-7599``; empty: any that is
    free. A node takes the first three that are free."""
    cluster: str = "p2pkv"
    """The cluster's name. Nodes of clusters with different names that meet refuse each other."""
    join: tuple[str, ...] | list[str] | str = ()
    """Addresses ``HOST:PORT`` of nodes to meet; a list or a comma-separated string."""
    must_join: bool | str = False
    """Start only where another node of the cluster answers within five seconds; not for the first of them."""
    membership: str = "embedded"
    """``embedded`` (gossip, nothing to install), ``static`` (exactly the nodes named in ``join``), ``etcd://HOST:PORT``
    or ``kubernetes`` (nodes find each other by their records there; ``docs/membership.md`` has the options), or the
    name of an engine that another package provides."""
    secret_file: str | None = None
    """The cluster's secret, mode 0600. Without one a private one is made and the node stays on loopback."""
    accepted_secret_files: tuple[str, ...] | list[str] | str = ()
    """Secrets that other nodes may go by besides, while a cluster is moved from one to another: the one of before, or
    the next. ``docs/security.md`` has the three steps."""
    tenants: Tenants | str = dataclasses.field(default_factory=dict, hash=False)
    """Namespaces with a secret of their own, and so with a pool and quotas of their own, by their first word: such as
    ``{"acme": {"secret_file": "/etc/p2pkv/acme", "pool_size": "8GiB", "requests": 64}}``, or JSON of it;
    ``docs/operations.md`` has what each may say."""
    transports: tuple[str, ...] | list[str] | str = "auto"
    """Transports in order of preference, or ``auto``."""
    transport_options: Mapping[str, Mapping[str, object]] | str = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Options of single transports, by transport and option, such as ``{"tcp": {"streams": 4}}``, or JSON of it;
    ``docs/transports.md`` lists them, and ``p2pkv doctor`` shows those in force."""
    encrypt: tuple[str, ...] | list[str] | str = ()
    """Transports, by name, that encrypt what they carry between nodes. Nodes that do so, and those that don't, read
    nothing from each other over them; ``docs/security.md`` says which transports can, and what it protects."""
    pool_size: int | str = "256MiB"
    """Memory for published pages; an int in bytes or a text such as ``64MiB``. 0: no cache and no part of the
    directory, for a node that makes and takes offers only."""
    huge_pages: str = "off"
    """What the pool's memory is made of: normal pages (``off``), or huge ones of ``2MiB`` or ``1GiB`` that the machine
    has set aside."""
    prefault: str = "start"
    """When the pool's memory is touched: before the node serves (``start``), so that a shortage is an error, or
    afterwards (``behind``), so that a large node serves at once."""
    pin_share: float = 0.25
    """How much of the pool the pins of ``Node.pin`` may hold together; half of it at most."""
    prefetch_share: float = 0.5
    """How much of the pool one prefetch may fill."""
    hot_share: float = 0.0
    """How much of the pool pages of other nodes may have that come there because calls here fetch them often; 0: none
    come. ``docs/operations.md`` says when it pays."""
    drain: float = 10.0
    """Seconds in which ``p2pkv node`` hands its pages over to other nodes when it is to end; 0: it leaves at once."""
    deadline: float = 1.0
    """Seconds a call may take when it does not say otherwise."""
    hedge: bool | str = True
    """Whether a read from a node that is late is left for another one that holds the page too."""
    touch: bool | str = True
    """Whether the owners of pages that are read here hear of it, so that their pools keep what others use."""
    replicas: int = 2
    """Nodes that hold each directory entry."""
    compression: str = "off"
    """Whether pages of 16-bit floats are made smaller in the pool, on the wire and on disk, without loss: never
    (``off``), where they get smaller (``lossless``), or where that pays on this machine too (``auto``).
    ``docs/codec.md`` has how."""
    directory_check: float = 600.0
    """Seconds in which a node compares all its directory entries with their owners, to put what was lost."""
    verify: str = "generation"
    """``generation``: reads are proven by the page's generation word; ``checksum``: by its checksum as well."""
    disk_path: str | None = None
    """Folder of the disk tier, one a node; without one a folder of this user's, named after node and namespace."""
    disk_size: int | str = 0
    """Bytes of that folder, never exceeded; 0: no disk tier. Needs a ``node_id``: by it the folder is found again."""
    disk_layout: str = "bucket"
    """How pages lie on disk: ``bucket``, ``file`` or ``offset``."""
    disk_fsync: str = "seal"
    """What is forced to the device: ``never``, ``seal`` or ``batch``."""
    disk_write: str = "write_through"
    """When pages are written: when published (``write_through``), or before the pool evicts them (``on_evict``)."""
    disk_admission: str = "all"
    """Which pages are written: ``all``, or those published or fetched here twice (``second_use``)."""
    disk_compression: str = "off"
    """What is done to pages before they are written: nothing (``off``), or ``zstd``, which needs libzstd."""
    buffer_size: int | str = "64MiB"
    """Receive buffer for rows that are put to this node before it granted them."""
    buddy_pool_size: int | str = 0
    """Pinned host memory for what the receive buffer has no room for; 0: none, such rows wait with their producers."""
    device_staging_size: int | str = "64MiB"
    """Page-locked host memory that pages in device memory go through; there only once some is registered."""
    device_direct_size: int | str = "16GiB"
    """Memory of this host's pools that may be page-locked for devices to copy pages from; 0: all are staged."""
    device_kernel_blocks: int = 0
    """Blocks of a kernel that copies small pieces, each up to a multiprocessor meanwhile; 0: copy engines do all."""
    cuda_library: str = "auto"
    """The NVIDIA driver's library: ``auto`` is libcuda.so.1, wherever the loader finds it; else a path."""
    transfer_lease: float = 60.0
    """Seconds an offer stays valid when it does not say otherwise, and unclaimed rows are kept."""
    copy_kernel: str = "auto"
    """How page bytes are copied in this process: ``auto`` measures what is fastest here, or a kernel's name, of which
    ``p2pkv doctor`` lists those of this CPU."""
    copy_threads: int = 2
    """How many threads copy a batch of 2 MiB or more: 2 lets one helper of the process join in where a core is idle and
    that makes it faster; 1 leaves each batch to the thread that asks."""
    raise_nofile: bool | str = True
    """Raise the process's soft limit of descriptors to the hard one; false where the program calls select(2)."""
    attach_listen: str = ""
    """``unix:/PATH`` where engines of this host attach to this node, whose pool is theirs then; empty: nowhere. The
    folder has to be this user's alone. ``auto``: where engines look that have ``attach`` so."""
    attach_share: float = 0.0
    """How much of the pool the pages may have that one attached engine published: above it the engine's own oldest go,
    and nobody else's. 0: as much as there is; ``docs/attach.md`` says who is charged for what."""
    attach_requests: int = 8
    """How many requests of one attached engine are served at once, 8 at most; further ones wait, within their
    deadlines."""
    keeper: str = ""
    """Who keeps the pool's memory while this node is restarted, so that it goes on with its pages: ``systemd``, for a
    service that has a descriptor store, or ``unix:/PATH`` of a ``p2pkv keeper``; empty: nobody. Needs a ``node_id``."""
    attach: str = ""
    """``unix:/PATH`` of the host's node to attach to: this process then has no pool, no disk and no part of the
    directory of its own; empty: it is a node by itself. ``auto``: it attaches if a node of this user and this secret
    listens at its start, and is a node by itself if not. ``docs/attach.md`` has what an attached engine can do."""
    metrics_port: int | None = None
    """Where to serve Prometheus metrics; None serves none, 0 takes a free port."""
    metrics_host: str = ""
    """The host to serve them at; by default that of ``listen``."""
    dashboard_token: str = dataclasses.field(default="", repr=False)
    """What who looks at the page at ``/`` of that port has to know, where it is not on loopback; empty: nobody sees it
    from elsewhere. At least 16 letters, digits, ``.``, ``_``, ``~`` or ``-``."""
    kv_events: str = ""
    """``tcp://HOST:PORT`` to publish KV events at, which say what this node has; empty: nowhere. Port 0 takes a free
    one."""
    kv_events_replay: str = ""
    """``tcp://HOST:PORT`` where subscribers ask for events that they missed; empty: nowhere."""
    kv_events_topic: str = ""
    """The first frame of each message of events, which subscribers choose by."""
    kv_events_hashes: str = "bytes"
    """What pages are called by there: ``bytes``, their keys; ``numbers``, 8 bytes of these, which all of SGLang's own
    readers, and vLLM's, take."""
    kv_events_exposed: bool | str = False
    """Let both be reached by other machines. Nothing of them is encrypted, and whoever connects is served."""
    indexer: str = ""
    """``HOST:PORT`` to answer indexer queries at, over HTTP; empty: nowhere. Port 0 takes a free one."""
    indexer_token: str = dataclasses.field(default="", repr=False)
    """What who asks there has to know, where it is not on loopback; as for ``dashboard_token``."""
    tracing: bool | str = False
    """Have spans of OpenTelemetry for calls; needs ``opentelemetry-api``, and a provider that the program sets up."""
    routers: tuple[str, ...] | list[str] | str = ()
    """Heartbeat addresses ``HOST:PORT`` of routers, for nodes within an engine: they tell them of it, and those routers
    that have told the node of themselves."""
    engine_url: str = ""
    """``http://HOST:PORT`` where routers reach that engine, where it can't be known from within."""
    engine_role: str = ""
    """What that engine does, if not what its own settings say: ``prefill``, ``decode`` or ``both``."""

    def __post_init__(self) -> None:
        _set = object.__setattr__
        _set(self, "join", as_tuple("join", self.join))
        _set(self, "accepted_secret_files", as_tuple("accepted_secret_files", self.accepted_secret_files))
        _set(self, "transports", as_tuple("transports", self.transports))
        _set(self, "encrypt", as_tuple("encrypt", self.encrypt))
        _set(self, "tenants", read_tenants(self.tenants))
        options = encrypted(tuple(self.encrypt), read_options(self.transport_options))
        _set(self, "transport_options", options)
        _set(self, "routers", as_tuple("routers", self.routers))
        _set(self, "pool_size", parse_size("pool_size", self.pool_size))
        _set(self, "disk_size", parse_size("disk_size", self.disk_size))
        _set(self, "buffer_size", parse_size("buffer_size", self.buffer_size))
        _set(self, "buddy_pool_size", parse_size("buddy_pool_size", self.buddy_pool_size))
        _set(self, "device_staging_size", parse_size("device_staging_size", self.device_staging_size))
        _set(self, "device_direct_size", parse_size("device_direct_size", self.device_direct_size))
        _set(self, "device_kernel_blocks", as_number("device_kernel_blocks", self.device_kernel_blocks, int))
        _set(self, "transfer_lease", as_number("transfer_lease", self.transfer_lease, float))
        _set(self, "pin_share", as_number("pin_share", self.pin_share, float))
        _set(self, "prefetch_share", as_number("prefetch_share", self.prefetch_share, float))
        _set(self, "hot_share", as_number("hot_share", self.hot_share, float))
        _set(self, "attach_share", as_number("attach_share", self.attach_share, float))
        _set(self, "attach_requests", as_number("attach_requests", self.attach_requests, int))
        _set(self, "drain", as_number("drain", self.drain, float))
        _set(self, "deadline", as_number("deadline", self.deadline, float))
        _set(self, "replicas", as_number("replicas", self.replicas, int))
        _set(self, "copy_threads", as_number("copy_threads", self.copy_threads, int))
        _set(self, "directory_check", as_number("directory_check", self.directory_check, float))
        _set(self, "must_join", as_bool("must_join", self.must_join))
        _set(self, "kv_events_exposed", as_bool("kv_events_exposed", self.kv_events_exposed))
        _set(self, "hedge", as_bool("hedge", self.hedge))
        _set(self, "touch", as_bool("touch", self.touch))
        _set(self, "tracing", as_bool("tracing", self.tracing))
        _set(self, "raise_nofile", as_bool("raise_nofile", self.raise_nofile))
        if self.metrics_port is not None:
            _set(self, "metrics_port", as_number("metrics_port", self.metrics_port, int))
        check(self)
        if self.disk_path is not None:
            # here, so that all who add to it, or compare it, have the same
            _set(self, "disk_path", as_folder(self.disk_path))
        check_tenants(self)
        if self.listen.startswith("*:"):  # ZMQ's word for it, which nobody else knows
            _set(self, "listen", f"0.0.0.0{self.listen[1:]}")
        _set(self, "node_id", str(self.node_id))  # the wire knows plain strings only

    @property
    def has_drawn_id(self) -> bool:
        """Whether nobody chose ``node_id``: another start has another one."""
        return isinstance(self.node_id, _DrawnId)

    @property
    def join_addresses(self) -> tuple[str, ...]:
        """``join`` as a tuple."""
        return tuple(self.join)

    @property
    def store(self) -> StoreUrl | None:
        """The store that ``membership`` names, if it names one."""
        return read_store_url(self.membership) if is_store_url(self.membership) else None

    @property
    def outward_addresses(self) -> tuple[str, ...]:
        """Addresses in the direction of peers: they tell which of this machine's own is reached from there."""
        return self.join_addresses or (self.store.addresses if self.store is not None else ())

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """``routers`` as a tuple."""
        return tuple(self.routers)

    @property
    def transport_names(self) -> tuple[str, ...]:
        """``transports`` as a tuple; ``("auto",)`` where the node chooses."""
        return tuple(self.transports)

    @property
    def data_port_range(self) -> tuple[int, int]:
        """First and last of ``data_ports``; 0 and 0: any."""
        return as_ports("data_ports", self.data_ports)

    @property
    def ports_advice(self) -> str:
        """An error of listening on ``data_ports`` ends with this."""
        return (
            f"; data_ports needs {DATA_PORTS} free ones for each node of this host" if self.data_ports else ""
        )

    @property
    def options(self) -> AllOptions:
        """``transport_options`` as mappings."""
        assert not isinstance(self.transport_options, str)
        return self.transport_options

    @property
    def tenants_by_name(self) -> Tenants:
        """``tenants`` as a mapping of mappings."""
        assert not isinstance(self.tenants, str)
        return self.tenants

    @property
    def attach_path(self) -> str:
        """The path of ``attach``, unless that is ``auto``; empty: this process is a node by itself."""
        return self.attach.removeprefix("unix:")

    @property
    def attach_listen_path(self) -> str:
        """The path of ``attach_listen``, unless that is ``auto``; empty: nobody attaches here."""
        return self.attach_listen.removeprefix("unix:")

    @property
    def pool_nbytes(self) -> int:
        """``pool_size`` in bytes."""
        return int(self.pool_size)

    @property
    def disk_nbytes(self) -> int:
        """``disk_size`` in bytes."""
        return int(self.disk_size)

    @property
    def buffer_nbytes(self) -> int:
        """``buffer_size`` in bytes."""
        return int(self.buffer_size)

    @property
    def buddy_pool_nbytes(self) -> int:
        """``buddy_pool_size`` in bytes."""
        return int(self.buddy_pool_size)

    @property
    def device_direct_nbytes(self) -> int:
        """``device_direct_size`` in bytes."""
        return int(self.device_direct_size)

    @property
    def device_staging_nbytes(self) -> int:
        """``device_staging_size`` in bytes."""
        return int(self.device_staging_size)

    @property
    def registered_nbytes(self) -> int:
        """What a node registers with its transports by itself, in bytes."""
        return self.pool_nbytes + self.buffer_nbytes + self.buddy_pool_nbytes

    @classmethod
    def load(
        cls,
        settings: Mapping[str, object] | str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        host_keys: Collection[str] = (),
    ) -> Config:
        """Make a configuration from ``settings`` (a mapping, or the path of a JSON file) and the environment.

        ``settings`` wins over ``P2PKV_*`` variables (default: ``os.environ``), which win over the defaults.
        ``host_keys`` are the host engine's own keys in the same mapping: they are let through. Raises
        :class:`~p2pkv.errors.ConfigError` for unknown keys, naming the nearest one; of unknown variables it warns.
        """
        names = [*(field.name for field in dataclasses.fields(cls)), *former_names()]
        values = gather(names, settings, os.environ if environ is None else environ, host_keys)
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value
