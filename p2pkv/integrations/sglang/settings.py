"""What SGLang tells its storage backend at start, read once: who this rank is, and the settings of its node.

SGLang's page hashes say which tokens a page holds and nothing else. Whatever else makes the bytes differ is put into
the node's namespace here or, where it depends on the host pool, into the pool's key prefix (``pools.py``).
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from p2pkv.attach.auto import decided
from p2pkv.config import MIN_POOL_SIZE, Config
from p2pkv.errors import ConfigError
from p2pkv.integrations.engine import numbered
from p2pkv.integrations.sglang.installed import has_no_states, kv_kind

_log = logging.getLogger(__name__)

HOST_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""SGLang's own keys of ``--hicache-storage-backend-extra-config``."""

MAX_DEADLINE_S = 5.0
"""SGLang waits 10 s for its storage threads when it detaches a backend; a call must be over well before."""

_NOT_IN_KEYS = frozenset({"tp_rank", "tp_size", "tp_lcm_size", "dp_rank", "dp_size"})
"""Replicas (dp) have the same pages; the tensor-parallel rank is the pools' business, some share across it."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One scheduler process of a server: its model, and its place among the ranks."""

    model: str
    tp_rank: int
    tp_size: int
    is_replicated: bool
    """Every tensor-parallel rank has the same KV (MLA): one of them writes, all read."""
    index: int
    """Number of this process among those of its server, which share one configuration."""
    topology: tuple[tuple[str, int], ...]
    """Every other rank and size that is not trivial, also those that this version of p2pkv has never heard of."""
    is_page_first: bool
    kv_kind: str
    """Precision and variant of the model, as the server was told."""
    writes: bool
    """False of ranks whose KV another one publishes. States are each rank's own, whoever publishes the KV."""
    n_shares: int
    """Ranks of a server of ``tp_lcm_size`` that have what this one has; its pages are stored by such shares."""

    @classmethod
    def read(cls, offered: object) -> Rank:
        """Take what ``HiCacheStorageConfig`` offers in this version of SGLang."""
        numbers = {
            name: value
            for name in dir(offered)
            if name.endswith(("_rank", "_size")) and isinstance(value := getattr(offered, name), int)
        }
        for name in ("tp_rank", "tp_size"):
            if name not in numbers:
                raise ConfigError(
                    f"SGLang's storage configuration has no {name}; without it ranks would share keys"
                )
        index = 0
        for part in ("dp", "attn_cp", "pp", "tp"):
            index = index * numbers.get(f"{part}_size", 1) + numbers.get(f"{part}_rank", 0)
        n_shares = 1
        if getattr(offered, "should_split_heads", False):
            n_shares, rest = divmod(numbers.get("tp_lcm_size", 0), numbers["tp_size"])
            if n_shares < 1 or rest:
                raise ConfigError(
                    f"tp_lcm_size must be a multiple of the {numbers['tp_size']} ranks of this server, and is "
                    f"{numbers.get('tp_lcm_size')}"
                )
        return cls(
            model=str(getattr(offered, "model_name", None) or ""),
            tp_rank=numbers["tp_rank"],
            tp_size=numbers["tp_size"],
            is_replicated=bool(getattr(offered, "is_mla_model", False)),
            index=index,
            topology=tuple(
                (name, value)
                for name, value in sorted(numbers.items())
                if name not in _NOT_IN_KEYS and value != (0 if name.endswith("_rank") else 1)
            ),
            is_page_first=bool(getattr(offered, "is_page_first_layout", False)),
            kv_kind=kv_kind(),
            writes=bool(getattr(offered, "is_storage_writer", True)) or not has_no_states(),
            n_shares=n_shares,
        )

    def namespace(self, tenant: str) -> str:
        """Return what all this rank's pages have in common, whatever their pool."""
        places = "".join(f" {name}={value}" for name, value in self.topology)
        kind = "replicated" if self.is_replicated else "sharded"
        order = " page_first" if self.is_page_first else ""
        return f"{tenant} sglang model={self.model!r} {kind}{order}{places} {self.kv_kind}".rstrip()


def node_config(offered: object, rank: Rank) -> Config:
    """Make the node's configuration of ``extra_config``. Raises :class:`~p2pkv.errors.ConfigError`.

    The ranks of a server are given the same settings, but each is a node: all but the first add their number to
    ``node_id``, to ``disk_path`` and to the ports, where those are given.
    """
    settings = getattr(offered, "extra_config", None) or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"extra_config must be a JSON object, not {type(settings).__name__}")
    if rank.n_shares > 1 and not settings.get("interface_v1"):
        raise ConfigError(
            "tp_lcm_size splits pages by their heads, which p2pkv does in SGLang's host pool only; "
            "add interface_v1: 1 to the extra configuration"
        )
    config = decided(Config.load(settings, host_keys=HOST_KEYS))
    if config.deadline > MAX_DEADLINE_S:
        raise ConfigError(
            f"deadline is {config.deadline} s, but SGLang waits 10 s at most for its storage threads; "
            f"at most {MAX_DEADLINE_S} s"
        )
    tenant = config.namespace
    if not rank.model and tenant == Config().namespace:
        tenant = secrets.token_hex(16)
        _log.warning(
            "SGLang names no model, so nobody shares this server's KV; set 'namespace' to a name that all servers of "
            "this model have, and no others"
        )
    config = dataclasses.replace(config, namespace=rank.namespace(tenant))
    if not rank.writes:
        # what this rank never publishes needs no room, neither in memory nor on disk
        config = dataclasses.replace(config, pool_size=MIN_POOL_SIZE, disk_path=None, disk_size=0)
    return numbered(config, rank.index, tag="-rank")
