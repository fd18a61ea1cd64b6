"""What settings may be, each by itself and beside the others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from p2pkv import plugins
from p2pkv.address import check_endpoint, is_loopback, split_address
from p2pkv.errors import ConfigError
from p2pkv.store_url import STORES, is_store_url, read_store_url, without_user
from p2pkv.values import check_choice, is_unicode, shown

if TYPE_CHECKING:
    from p2pkv.config.settings import Config

DATA_PORTS = 3
"""A node listens on so many besides its control socket: for pages, for transfers, for its part of the directory."""
DISK_LAYOUTS = ("bucket", "file", "offset")
"""How pages lie on disk; ``docs/disk.md`` says which is good for what."""
DISK_FSYNC = ("never", "seal", "batch")
"""What is forced to the device, and when."""
DISK_WRITE = ("write_through", "on_evict")
"""When a page goes to the disk."""
DISK_ADMISSION = ("all", "second_use")
"""Which pages go to the disk."""
DISK_COMPRESSION = ("off", "zstd")
"""In which form the disk keeps pages."""
COMPRESSION = ("off", "lossless", "auto")
"""In which form the pool keeps pages."""
ENGINE_ROLES = ("", "prefill", "decode", "both")
"""Empty: what the engine's own settings say."""
HUGE_PAGES = {"off": 0, "2MiB": 2 << 20, "1GiB": 1 << 30}
"""Bytes of a huge page by its name; those of x86-64 and of 64-bit ARM with 4 KiB pages."""
MAX_NODE_ID = 128
MIN_POOL_SIZE = 64 * 1024
MEMBERSHIP_ENGINES = ("embedded", "static")
"""Those of p2pkv; others come from packages."""
MAX_SIZE = 2**60
MAX_REPLICAS = 8
MIN_STAGING_SIZE = 1 << 16
AUTO = "auto"
"""``attach`` and ``attach_listen`` are this where nodes and engines find each other (``p2pkv/attach/auto.py``)."""
MAX_SOCKET_PATH = 107
"""Bytes of the path of a Unix socket."""
MAX_ATTACH_REQUESTS = 8
"""Of one attached engine at once: each takes a thread and a place for a request, 1.6 MiB of memory."""
MAX_BUFFER_SIZE = 2**43
"""So many bytes the receive buffer's allocator can count in blocks of 4 KiB."""
MAX_KERNEL_BLOCKS = 256
"""No device has more multiprocessors."""


_TEXTS = (
    *("data_ports", "cluster", "namespace", "node_id", "listen", "membership", "secret_file", "verify"),
    *("cuda_library", "huge_pages", "prefault", "copy_kernel", "compression"),
    *("disk_path", "disk_layout", "disk_fsync", "disk_write", "disk_admission", "disk_compression"),
    *("engine_url", "engine_role", "metrics_host", "dashboard_token"),
    *("attach", "attach_listen", "keeper"),
    *("kv_events", "kv_events_replay", "kv_events_topic", "kv_events_hashes"),
    *("indexer", "indexer_token"),
)


def check(config: Config) -> None:
    """Raise :class:`~p2pkv.errors.ConfigError` for the first setting that can't be as it is."""
    _check_texts(config)
    _check_values(config)
    _check_addresses(config)
    _check_attaching(config)
    _check_keeper(config)


def _check_texts(config: Config) -> None:
    for name in _TEXTS:
        value = getattr(config, name)
        if value is None and name in ("secret_file", "disk_path"):
            continue
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, not {type(value).__name__}")
        # neither native code nor the system takes anything else
        if "\0" in value or not is_unicode(value):
            raise ConfigError(f"{name} must be valid Unicode without zero bytes, not {shown(value)}")
    for name in ("dashboard_token", "indexer_token"):
        token = getattr(config, name)
        if token and not re.fullmatch(r"[A-Za-z0-9._~-]{16,256}", token):
            raise ConfigError(f"{name} must be 16 to 256 letters, digits, '.', '_', '~' or '-'")
    if config.secret_file == "":
        raise ConfigError("secret_file is empty; name a file, or leave it out for a private secret")
    if config.accepted_secret_files and config.secret_file is None:
        raise ConfigError("accepted_secret_files are accepted besides secret_file; set that, too")


def _check_values(config: Config) -> None:
    if not 1 <= len(config.node_id) <= MAX_NODE_ID or not config.node_id.isprintable():
        raise ConfigError(f"node_id must be 1 to {MAX_NODE_ID} printable characters, not {config.node_id!r}")
    if not 1 <= len(config.cluster.encode()) <= MAX_NODE_ID or not config.cluster.isprintable():
        raise ConfigError(
            f"cluster must be 1 to {MAX_NODE_ID} bytes of printable characters, not {shown(config.cluster)}"
        )
    if is_store_url(config.membership):
        read_store_url(config.membership)
    elif config.membership not in MEMBERSHIP_ENGINES:
        engines = (*MEMBERSHIP_ENGINES, *plugins.names(plugins.MEMBERSHIP))
        check_choice("membership", without_user(config.membership), (*engines, *STORES))
    check_choice("verify", config.verify, ("generation", "checksum"))
    check_choice("compression", config.compression, COMPRESSION)
    check_choice("huge_pages", config.huge_pages, tuple(HUGE_PAGES))
    check_choice("prefault", config.prefault, ("start", "behind"))
    check_choice("engine_role", config.engine_role, ENGINE_ROLES)
    for name in ("pool_size", "disk_size"):
        if getattr(config, name) > MAX_SIZE:
            raise ConfigError(f"{name} is {getattr(config, name)} bytes; no machine has more than {MAX_SIZE}")
    if config.pool_nbytes < MIN_POOL_SIZE and config.pool_nbytes != 0:
        raise ConfigError(
            f"pool_size is {config.pool_nbytes} bytes; at least {MIN_POOL_SIZE} are needed, or 0 for a node "
            "without a cache"
        )
    if not 0 < config.deadline <= 3600:
        raise ConfigError(f"deadline must be above 0 and at most 3600 seconds, not {config.deadline}")
    if not 0 <= config.drain <= 3600:
        raise ConfigError(f"drain must be 0 to 3600 seconds, not {config.drain}")
    shares = (("pin_share", 0.5), ("prefetch_share", 1.0), ("hot_share", 0.5), ("attach_share", 1.0))
    for name, most in shares:
        if not 0 <= getattr(config, name) <= most:
            raise ConfigError(f"{name} must be 0 to {most:g} of the pool, not {getattr(config, name)}")
    if not 1 <= config.directory_check <= 86400:
        raise ConfigError(f"directory_check must be 1 to 86400 seconds, not {config.directory_check}")
    for name in ("buffer_size", "buddy_pool_size"):
        if not 0 <= getattr(config, name) <= MAX_BUFFER_SIZE:
            raise ConfigError(f"{name} must be 0 to {MAX_BUFFER_SIZE} bytes, not {getattr(config, name)}")
    if config.device_direct_nbytes < 0:
        raise ConfigError(f"device_direct_size must be 0 or more bytes, not {config.device_direct_nbytes}")
    if not 0 <= config.device_kernel_blocks <= MAX_KERNEL_BLOCKS:
        raise ConfigError(
            f"device_kernel_blocks must be 0 to {MAX_KERNEL_BLOCKS}, not {config.device_kernel_blocks}; 8 to 16 are "
            "as fast as PCIe"
        )
    if not MIN_STAGING_SIZE <= config.device_staging_nbytes <= MAX_BUFFER_SIZE:
        raise ConfigError(
            f"device_staging_size must be {MIN_STAGING_SIZE} to {MAX_BUFFER_SIZE} bytes, not "
            f"{config.device_staging_nbytes}"
        )
    if not 0 < config.transfer_lease <= 3600:
        raise ConfigError(
            f"transfer_lease must be above 0 and at most 3600 seconds, not {config.transfer_lease}"
        )
    if not 1 <= config.replicas <= MAX_REPLICAS:
        raise ConfigError(f"replicas must be 1 to {MAX_REPLICAS}, not {config.replicas}")
    if config.copy_threads not in (1, 2):
        raise ConfigError(f"copy_threads must be 1 or 2, not {config.copy_threads}")
    if config.metrics_port is not None and not 0 <= config.metrics_port <= 65535:
        raise ConfigError(f"metrics_port must be 0 to 65535, not {config.metrics_port}")
    if not config.transport_names:
        raise ConfigError("transports is empty; name at least one, or leave it at 'auto'")
    if "auto" in config.transport_names and len(config.transport_names) > 1:
        raise ConfigError("transports: 'auto' chooses by itself and can't stand beside other names")
    _check_disk(config)


def _check_disk(config: Config) -> None:
    check_choice("disk_layout", config.disk_layout, DISK_LAYOUTS)
    check_choice("disk_fsync", config.disk_fsync, DISK_FSYNC)
    check_choice("disk_write", config.disk_write, DISK_WRITE)
    check_choice("disk_admission", config.disk_admission, DISK_ADMISSION)
    check_choice("disk_compression", config.disk_compression, DISK_COMPRESSION)
    if config.disk_path == "":
        raise ConfigError(f"disk_path must be the path of a folder, not {config.disk_path!r}")
    if config.disk_nbytes < 0:
        raise ConfigError(f"disk_size must not be negative, and is {config.disk_nbytes}")
    if config.disk_path is not None and not config.disk_nbytes:
        raise ConfigError(f"disk_path is {config.disk_path!r}, but disk_size is 0; set it as well")
    if config.disk_nbytes and not config.pool_nbytes:
        raise ConfigError("disk_size is set, but pool_size is 0: pages come to the disk through the pool")
    if config.disk_nbytes and config.has_drawn_id:
        raise ConfigError(
            "disk_size is set, but node_id is not: a node finds its disk again by its id; set node_id as well"
        )


def _check_addresses(config: Config) -> None:
    host, port = split_address("listen", config.listen)
    first, last = config.data_port_range
    indexer_port = _check_indexer(config)
    for name, own in (("listen", port), ("metrics_port", config.metrics_port), ("indexer", indexer_port)):
        if own and first <= own <= last:
            raise ConfigError(
                f"{name} has port {own}, which is one of data_ports {config.data_ports}: another node of this host "
                "could take it; keep them apart"
            )
    for name, addresses in (("join", config.join_addresses), ("routers", config.router_addresses)):
        for address in addresses:
            if split_address(name, address)[1] == 0:
                raise ConfigError(f"{name} address {address!r} needs a port other than 0")
    if config.secret_file is None and not is_loopback(host):
        raise ConfigError(
            f"listen is {config.listen!r}, which other machines can reach, but there is no secret_file; "
            "give every node the same secret_file, or listen on 127.0.0.1"
        )
    for name in ("kv_events", "kv_events_replay"):
        if endpoint := getattr(config, name):
            check_endpoint(name, endpoint, is_exposed=bool(config.kv_events_exposed))
    check_choice("kv_events_hashes", config.kv_events_hashes, ("bytes", "numbers"))
    if config.kv_events_replay and not config.kv_events:
        raise ConfigError("kv_events_replay is set, but kv_events is not: there is nothing to repeat")
    if config.kv_events and not config.pool_nbytes:
        raise ConfigError("kv_events is set, but pool_size is 0: a node without a cache has nothing to tell")
    if config.must_join and not config.join_addresses and config.store is None:
        raise ConfigError("must_join is set, but join is not: whom to join is not known")
    if config.membership == "static" and not config.join_addresses:
        raise ConfigError("membership is 'static', so join must name every node of the cluster")


def _check_attaching(config: Config) -> None:
    for name in ("attach", "attach_listen", "keeper"):
        value = getattr(config, name)
        path = value.removeprefix("unix:")
        if value == ("systemd" if name == "keeper" else AUTO):
            continue
        if value and (path == value or not path.startswith("/")):
            raise ConfigError(
                f"{name} must be {'systemd' if name == 'keeper' else AUTO}, or unix: and an absolute path, as "
                f"unix:/run/user/1000/p2pkv/host, not {shown(value)}"
            )
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"{name} has a path of {len(path.encode())} bytes, and a Unix socket takes {MAX_SOCKET_PATH}; choose a "
                "shorter one"
            )
    if config.attach_listen and not config.pool_nbytes:
        raise ConfigError("attach_listen is set, but pool_size is 0: engines attach to a node for its pool")
    if not 1 <= config.attach_requests <= MAX_ATTACH_REQUESTS:
        raise ConfigError(f"attach_requests must be 1 to {MAX_ATTACH_REQUESTS}, not {config.attach_requests}")
    if config.attach_share and config.disk_nbytes and config.disk_write == "on_evict":
        raise ConfigError(
            "attach_share is set, and disk_write is 'on_evict': what goes for being above a share is not the oldest of "
            "the pool, which is what is written ahead, and so would not reach the disk; use 'write_through'"
        )
    if not config.attach:
        return
    for name, is_set in (
        ("attach_listen", config.attach_listen),
        ("attach_share", config.attach_share),
        ("keeper", config.keeper),
        ("disk_size", config.disk_nbytes),
        ("kv_events", config.kv_events),
        ("indexer", config.indexer),
    ):
        if is_set:
            raise ConfigError(
                f"attach is set, so {name} must not be: that is the business of the host's node"
            )


def _check_keeper(config: Config) -> None:
    if not config.keeper:
        return
    if config.has_drawn_id:
        raise ConfigError(
            "keeper is set, but node_id is not: what is kept is found again by it; set node_id as well"
        )
    if not config.pool_nbytes and not config.tenants:
        raise ConfigError("keeper is set, but pool_size is 0: there is nothing to keep")
    if config.huge_pages != "off":
        raise ConfigError(
            "keeper and huge_pages are both set, and a node that goes on with its memory does not do that with huge "
            "pages yet; leave one of them out"
        )


def _check_indexer(config: Config) -> int | None:
    """Return the port of ``indexer``, if there is one."""
    if not config.indexer:
        return None
    host, port = split_address("indexer", config.indexer[:300])
    if not config.indexer_token and not is_loopback(host):
        raise ConfigError(
            f"indexer is {shown(config.indexer)}, which other machines can reach, and whoever does sees which pages "
            "lie where; set indexer_token, or listen on 127.0.0.1"
        )
    if not config.pool_nbytes:
        raise ConfigError(
            "indexer is set, but pool_size is 0: a node without a cache has no directory to ask"
        )
    return port
