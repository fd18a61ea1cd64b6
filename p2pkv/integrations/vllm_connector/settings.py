"""What vLLM tells its connector at start, read once: which instance this is, which rank, and the settings of its nodes.

A block's bytes depend on more than its tokens. Whatever that is goes into the :class:`Fingerprint`: it is the node's
namespace, so that instances which would not have computed the same bytes never share a page, and it travels with
every hand-off, so that a block of another kind is refused instead of misread.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pkv.attach.auto import decided
from p2pkv.config import MIN_POOL_SIZE, Config
from p2pkv.errors import ConfigError
from p2pkv.instances.announcing import described
from p2pkv.instances.heartbeat import Instance as Announced
from p2pkv.instances.heartbeat import Mode, Role
from p2pkv.integrations.engine import numbered
from p2pkv.integrations.identity import config_digest
from p2pkv.integrations.vllm_connector import installed
from p2pkv.integrations.vllm_connector.groups import Groups, Kind, read_groups
from p2pkv.integrations.vllm_connector.shares import Split

_log = logging.getLogger(__name__)

OWN_KEYS = frozenset({"load_deadline", "layer_deadline", "stow_after", "share_prefixes", "fetch_prefixes"})
"""Keys of ``kv_connector_extra_config`` that are the connector's; all others are the node's."""

_STRONG_HASHES = ("sha256", "sha256_cbor")
"""Of vLLM's block hashes. The others can be made to collide, and then a page would hold another prompt's bytes."""

_SHARED_OTHERWISE = frozenset({"groups", "tp_size", "pp_size"})


OWN_EVENTS = "tcp://127.0.0.1:0"
"""Where a node tells its events if only this process wants them."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two instances must have in common for the blocks of one to mean the same to the other."""

    fields: Mapping[str, str]

    def difference(self, other: Mapping[str, object]) -> str | None:
        """Say in what ``other``'s fields differ from these; None if in nothing."""
        return (
            ", ".join(
                f"{name} is {other.get(name)!r} there and {self.fields.get(name)!r} here"
                for name in sorted(self.fields.keys() | other.keys())
                if self.fields.get(name) != other.get(name)
            )
            or None
        )

    def namespace(self, tenant: str) -> str:
        """Return the name under which these blocks are published."""
        return " ".join([tenant, "vllm", *(f"{name}={value}" for name, value in sorted(self.fields.items()))])


@dataclass(frozen=True, slots=True)
class Instance:
    """One vLLM instance as its connector sees it."""

    config: Config
    """The settings as given; :meth:`worker_config` and :meth:`scheduler_config` make a process's own of them."""
    may_attach: bool
    """Whether processes of this instance may be attached; with ``auto`` each of them has looked for itself."""
    is_producer: bool
    is_consumer: bool
    reads_prefixes: bool
    writes_prefixes: bool
    fetch_prefixes: str
    """How much of what others have is fetched: ``always`` all, ``never`` any, or what is ``measured`` to pay."""
    load_deadline: float
    """Seconds from the start of a load until what is not there has failed."""
    layer_deadline: float | None
    """Seconds that a step may wait for hand-offs that are loaded by layer; None: none is."""
    stow_after: float
    """Seconds after which what nobody has taken is copied to the buddy pool; infinity: there is none."""
    groups: Groups
    hash_size: int
    """Tokens that a request's hash covers more than the one before it."""
    world_size: int
    split: Split
    first_index: int
    """Number of this instance's first process among those of all its data-parallel siblings."""
    identity: Mapping[str, str]
    """The part of the fingerprint that is known before there are KV caches."""

    @property
    def handed_over(self) -> dict[str, str]:
        """The part of it that matters to hand-offs: ranks may share the model otherwise, in blocks of other sizes."""
        kept = {name: value for name, value in self.identity.items() if name not in _SHARED_OTHERWISE}
        return kept | {"kinds": self.groups.kinds}

    @property
    def follows_hints(self) -> bool:
        """Whether pages are this instance's own to bring, keep and share; attached they are its host's node's."""
        return self.writes_prefixes and not self.config.attach

    tells_events: bool
    """Whether vLLM tells KV events, and so of blocks here too."""
    announced: Announced | None
    """What routers are told of it; None if they are told nothing, or by another of its processes."""

    @classmethod
    def read(cls, vllm_config: Any, kv_cache_config: Any) -> Instance:
        """Take what vLLM offers. Raises :class:`~p2pkv.errors.ConfigError` for what can't be served."""
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise ConfigError(
                    f"{name} is {getattr(parallel, name)}; p2pkv knows whole blocks only, set it to 1"
                )
        groups = read_groups(kv_cache_config)
        given = transfer.kv_connector_extra_config or {}
        asked = Config.load(given, host_keys=OWN_KEYS)
        config = decided(asked)
        wants_prefixes = _flag(given, "share_prefixes") and _can_share_prefixes(
            vllm_config, groups, _hash_size(kv_cache_config, groups)
        )
        recomputes = transfer.kv_load_failure_policy == "recompute"
        if wants_prefixes and transfer.is_kv_consumer and not recomputes:
            _log.warning(
                "prefixes of other instances are not read: a page that is evicted in the wrong moment would fail a "
                "request; set kv_load_failure_policy to 'recompute' to have them"
            )
        publishes = wants_prefixes and transfer.is_kv_producer
        world_size = parallel.world_size
        identity = _identity(vllm_config, kv_cache_config, groups)
        return cls(
            config=config,
            may_attach=bool(asked.attach),
            is_producer=transfer.is_kv_producer,
            is_consumer=transfer.is_kv_consumer,
            reads_prefixes=wants_prefixes and transfer.is_kv_consumer and recomputes,
            writes_prefixes=publishes,
            fetch_prefixes=_one_of(given, "fetch_prefixes", ("always", "measured", "never")),
            load_deadline=_seconds(given, "load_deadline", 10.0),
            layer_deadline=_layer_deadline(given, vllm_config, groups, publishes=publishes),
            stow_after=_seconds(given, "stow_after", 2.0) if config.buddy_pool_nbytes else math.inf,
            groups=groups,
            hash_size=_hash_size(kv_cache_config, groups),
            world_size=world_size,
            split=_split(vllm_config),
            first_index=parallel.data_parallel_index * (world_size + 1),
            identity=identity,
            tells_events=wants_prefixes and transfer.is_kv_producer and _tells_events(vllm_config),
            announced=_announced(config, transfer, parallel, identity["model"]),
        )

    def worker_config(self, rank: int, namespace: str) -> Config:
        """Return the settings of one rank's node."""
        # nothing is ever put to it: what it wants, it gets; what it offers may be stowed
        stows = self.config.buddy_pool_size if self.is_producer else 0
        config = dataclasses.replace(self.config, namespace=namespace, buffer_size=0, buddy_pool_size=stows)
        if not self.writes_prefixes:
            # what it never publishes needs no room; what it reads of others' needs a cache all the same
            pool_size = MIN_POOL_SIZE if self.reads_prefixes else 0
            config = dataclasses.replace(
                config,
                pool_size=pool_size,
                disk_path=None,
                disk_size=0,
                kv_events="",
                kv_events_replay="",
                indexer="",
            )
        elif self.tells_events and not config.kv_events and not config.attach:
            config = dataclasses.replace(config, kv_events=OWN_EVENTS)
        return self._numbered(config, self.first_index + rank)

    def scheduler_config(self, namespace: str) -> Config:
        """Return the settings of the scheduler's node, which looks pages up and holds none."""
        config = dataclasses.replace(
            self.config,
            namespace=namespace,
            pool_size=MIN_POOL_SIZE,
            disk_path=None,
            disk_size=0,
            buffer_size=0,
            buddy_pool_size=0,
            kv_events="",
            kv_events_replay="",
            indexer="",
        )
        return self._numbered(config, self.first_index + self.world_size)

    def _numbered(self, config: Config, index: int) -> Config:
        """Return the settings of process ``index``; attached, it may have two nodes, and takes two ports of metrics."""
        own = numbered(config, index, tag="-")
        if not self.may_attach:
            return own
        return dataclasses.replace(own, metrics_port=config.metrics_port and config.metrics_port + 2 * index)


def _identity(vllm_config: Any, kv_cache_config: Any, groups: Groups) -> dict[str, str]:
    specs = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    name = model.served_model_name
    return {
        "vllm": installed.version(),
        "model": str(name[0] if isinstance(name, (list, tuple)) else name or model.model),
        # of a model from a hub vLLM makes it the commit; for others it is what was asked for
        "revision": str(model.revision),
        "config": config_digest(model.hf_config),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "groups": str(groups),
        "attention": ", ".join(specs),
        "tp_size": str(parallel.tensor_parallel_size),
        "pp_size": str(parallel.pipeline_parallel_size),
    }


def _split(vllm_config: Any) -> Split:
    """Return how the ranks share the model's heads; with MLA each has all that is kept."""
    model = vllm_config.model_config
    n_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    return Split(vllm_config.parallel_config.tensor_parallel_size, n_heads)


def _announced(config: Config, transfer: Any, parallel: Any, model: str) -> Announced | None:
    """Return what routers are to be told; of data-parallel siblings behind one address by the first."""
    has_own_address = parallel.data_parallel_index == 0 or getattr(
        parallel, "data_parallel_external_lb", False
    )
    is_known = bool(config.router_addresses or config.engine_url)  # vLLM does not say where it serves
    if not is_known or not has_own_address:
        return None
    role = Role.BOTH
    if transfer.is_kv_producer != transfer.is_kv_consumer:
        role = Role.PREFILL if transfer.is_kv_producer else Role.DECODE
    # no page size: nobody but vLLM can compute its block hashes
    return described(config, Announced(url="", role=role, mode=Mode.VLLM, model=model))


def _tells_events(vllm_config: Any) -> bool:
    told = getattr(vllm_config, "kv_events_config", None)
    return told is not None and bool(told.enable_kv_cache_events)


def _hash_size(kv_cache_config: Any, groups: Groups) -> int:
    return int(kv_cache_config.hash_block_size or groups.each[0].block_size)


def _can_share_prefixes(vllm_config: Any, groups: Groups, hash_size: int) -> bool:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    sizes = sorted({group.block_size for group in groups.each})
    why = None
    if algorithm not in _STRONG_HASHES:
        why = f"prefix_caching_hash_algo is {algorithm!r}, which does not exclude collisions"
    elif any(group.kind is Kind.STATE for group in groups.each):
        why = "of layers with a state only the state after the whole prompt is kept"
    elif any(size % hash_size for size in sizes):
        why = f"blocks of {sizes} tokens are hashed by {hash_size}"
    if why is not None:
        _log.warning("prefixes are not shared with other instances: %s", why)
    return why is None


def _flag(settings: Mapping[str, object], key: str) -> bool:
    value = settings.get(key, True)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {value!r}")
    return value


def _layer_deadline(
    given: Mapping[str, object], vllm_config: Any, groups: Groups, *, publishes: bool
) -> float | None:
    """Return the setting. Raises ConfigError where a load that fails could not be told from one that is right."""
    if given.get("layer_deadline", 0) == 0 or not vllm_config.kv_transfer_config.is_kv_consumer:
        return None
    parallel, scheduler = vllm_config.parallel_config, getattr(vllm_config, "scheduler_config", None)
    why = None
    if publishes:
        why = "an instance that publishes prefixes would publish what it computed from a load that failed"
    elif not groups.is_plain:
        why = "of models whose layers keep different KV vLLM can't take a load that failed within a step"
    elif getattr(vllm_config, "speculative_config", None) is not None:
        why = "with speculative decoding vLLM asks whether loads have failed before all layers have run"
    elif parallel.pipeline_parallel_size != 1 or getattr(scheduler, "async_scheduling", False):
        why = (
            "vLLM begins a request's next step before it hears that a load of this one has failed; serve with "
            "--no-async-scheduling and one pipeline stage"
        )
    if why is not None:
        raise ConfigError(f"layer_deadline can't be used here: {why}; or set it to 0")
    return _seconds(given, "layer_deadline", 0.0)


def _one_of(settings: Mapping[str, object], key: str, known: Sequence[str]) -> str:
    """Return a setting that is one of ``known``, the first one if it is not set."""
    value = settings.get(key, known[0])
    if value not in known:
        raise ConfigError(f"{key} must be one of {', '.join(known)}, not {value!r}")
    return str(value)


def _seconds(settings: Mapping[str, object], key: str, default: float) -> float:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{key} must be a number of seconds, not {value!r}")
    if not 0 < value <= 3600:
        raise ConfigError(f"{key} must be above 0 and at most 3600 seconds, not {value}")
    return float(value)
