"""SGLang replaces its weights: no page that was computed with some is ever found with others."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hicache_backends import PAGES, FailingNode, Open, storage_config
from host_pools import HostPoolFake
from p2pkv.integrations.sglang import weights as module
from p2pkv.integrations.sglang.keys import KeyPrefix
from p2pkv.integrations.sglang.settings import Rank
from p2pkv.integrations.sglang.weights import Weights
from p2pkv.integrations.sglang_hicache import P2PKVHiCache


class Server:
    """A model of one: which weights its KV is of, and what of that p2pkv was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights = Weights("default")
        self.prefix = KeyPrefix("kv", Rank.read(storage_config()), self.weights, is_shared=False)
        self.has = 0
        """The true weights; equal numbers are equal weights."""
        self.is_mixed = False
        """Its caches have KV of other weights than these."""
        self.n_versions = 0

    def update(self, new: int, *, told: bool, flushes: bool, fails: bool, is_partial: bool) -> None:
        self.has = new
        if not flushes or fails:
            self.is_mixed = True
        elif not is_partial:
            self.is_mixed = False
        self.weights.updated(
            f"v{new}" if told and not fails else None,
            self.name,
            has_mixed_kv=not flushes or fails,
            is_partial=is_partial,
        )


@pytest.mark.parametrize("seed", range(20))
def test_no_page_of_other_weights_is_ever_found(seed: int) -> None:
    rng = random.Random(seed)
    servers = [Server(f"server {i}") for i in range(3)]
    stored: dict[
        str, tuple[int, str | None]
    ] = {}  # by key: whose KV it is, and the server if it is of several
    n_weights, n_hits, n_shared = 0, 0, 0
    for _ in range(3000):
        server = rng.choice(servers)
        dice = rng.random()
        if dice < 0.05:  # other weights, or those that another server has already
            if rng.random() < 0.5:
                n_weights += 1
                new = n_weights
            else:
                new = rng.choice(servers).has
            fails = rng.random() < 0.1
            if fails:
                n_weights += 1
                new = n_weights  # half of them: nobody else's
            server.update(
                new, told=rng.random() < 0.7, flushes=rng.random() < 0.8, fails=fails, is_partial=False
            )
        elif dice < 0.07:  # in parts: nobody has what is there between them
            for _ in range(rng.randrange(1, 4)):
                n_weights += 1
                server.update(n_weights, told=True, flushes=rng.random() < 0.8, fails=False, is_partial=True)
                stored[server.prefix.keys(["part"])[0]] = (server.has, server.name)
            server.is_mixed = server.weights._has_mixed_kv
            server.weights.completed(server.name)
        elif dice < 0.10:
            server.is_mixed = False
            server.weights.flushed(server.name)
        elif dice < 0.12:
            server.weights.told(f"v{server.has}" if server.has else "default", server.name)
        else:
            page = f"{rng.randrange(20)}"
            (key,) = server.prefix.keys([page])
            if rng.random() < 0.5:
                stored[key] = (server.has, server.name if server.is_mixed else None)
            elif key in stored:
                of, mixed_by = stored[key]
                n_hits += 1
                n_shared += mixed_by is None
                if mixed_by is None:
                    assert of == server.has, (
                        f"seed {seed}: KV of weights {of}, {server.name} has {server.has}"
                    )
                else:
                    where = (mixed_by, True)
                    assert where == (server.name, server.is_mixed), f"seed {seed}: KV of mixed weights"
    assert min(n_hits, n_shared) > 100, "the model would not see sharing that is gone"


def test_servers_that_are_told_the_same_version_share(open_backend: Open) -> None:
    ours, theirs = HostPoolFake(), HostPoolFake()
    first, second = Weights("default"), Weights("default")
    writer, reader = open_backend(ours, weights=first), open_backend(theirs, weights=second)
    ours.fill(0, 1)
    assert writer.batch_set_v1(PAGES[:1], ours.indices(0)) == [True]
    assert reader.batch_exists(PAGES[:1]) == 1

    second.updated("v2", "b", has_mixed_kv=False)
    assert reader.batch_exists(PAGES[:1]) == 0
    assert reader.batch_get_v1(PAGES[:1], theirs.indices(0)) == [False]
    first.updated("v2", "a", has_mixed_kv=False)
    assert writer.batch_exists(PAGES[:1]) == 0, "its own pages of the old weights"
    ours.fill(1, 2)
    assert writer.batch_set_v1(PAGES[:1], ours.indices(1)) == [True]
    assert reader.batch_get_v1(PAGES[:1], theirs.indices(0)) == [True]
    assert theirs.content(0) == ours.content(1)

    first.updated(None, "a", has_mixed_kv=False)
    assert writer.batch_exists(PAGES[:1]) == 0
    assert reader.batch_exists(PAGES[:1]) == 1
    second.updated(None, "b", has_mixed_kv=False)
    assert first.name != second.name, "nobody knows whether they are the same"


def sglang_with(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Let this process be a server of SGLang's that was told ``parts``."""
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for part, values in parts.items():
        setattr(sys.modules["sglang.srt.runtime_context"], f"get_{part}", lambda values=values: values)
    monkeypatch.setattr(module, "_weights", None)
    monkeypatch.setattr(module, "_server", "")


def one_rank() -> ModuleType:
    """Return the part of torch by which ranks agree on a name, of which there is one."""
    torch = ModuleType("torch")
    distributed = SimpleNamespace(get_world_size=lambda group: 1)
    tensor = lambda values, dtype: SimpleNamespace(tolist=lambda: values)  # noqa: E731
    vars(torch).update(uint8="uint8", tensor=tensor, distributed=distributed)
    return torch


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    sglang_with(monkeypatch, serving=SimpleNamespace(weight_version="v1"))
    monkeypatch.setitem(sys.modules, "torch", one_rank())
    registered: dict[str, Any] = {}
    module.watch(lambda target, hook, kind: registered.update({target.rpartition(".")[2]: hook}), "around")
    return registered


def request(version: str | None = None, *, flush: bool = True) -> SimpleNamespace:
    return SimpleNamespace(weight_version=version, flush_cache=flush)


def test_every_way_to_other_weights_is_watched(hooks: dict[str, Any]) -> None:
    manager = SimpleNamespace(tp_cpu_group=None, _session=None)
    served = module.served()
    assert served.name == "version 'v1'"

    def done(manager: object, request: object) -> SimpleNamespace:
        return SimpleNamespace(success=True)

    def failed(manager: object, request: object) -> SimpleNamespace:
        return SimpleNamespace(success=False)

    for update in ("update_weights_from_disk", "update_weights_from_ipc"):
        assert hooks[update](done, manager, request("v2")).success
        assert served.name == "version 'v2'"
        hooks[update](done, manager, request())
        own = served.name
        assert own.startswith("update ")
        hooks["handle_update_weight_version"](lambda *_: None, manager, SimpleNamespace(new_version="v3"))
        assert served.name == "version 'v3'"
        hooks[update](failed, manager, request("v4"))
        assert served.name not in (own, "version 'v4'")
        hooks[update](done, manager, request("v5", flush=False))
        assert served.name.startswith("update ")
        assert hooks["flush_cache"](lambda scheduler, **_: False, object()) is False
        assert served.name.startswith("update ")
        assert hooks["flush_cache"](lambda scheduler, **_: True, object(), empty_cache=True)
        assert served.name == "version 'v5'"

    for update in ("update_weights_from_distributed", "update_weights_from_tensor"):
        manager._session = None
        hooks[update](failed, manager, request("v6"))
        assert served.name == ("version 'v5'" if update.endswith("distributed") else "version 'v7'")
        manager._session = object()
        hooks[update](done, manager, request("v7"))
        assert served.name.startswith("update "), "others may follow"
        manager._session = None
        hooks["end_weight_update"](lambda manager, request: SimpleNamespace(success=True), manager, object())
        assert served.name == "version 'v7'"


def test_an_update_that_raises_leaves_weights_that_nobody_else_has(hooks: dict[str, Any]) -> None:
    def raises(manager: object, request: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks["update_weights_from_disk"](raises, SimpleNamespace(tp_cpu_group=None), request("v2"))
    assert module.served().name.startswith("update ")


def test_routers_hear_of_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "p2pkv.integrations.sglang.hicache.announce_server",
        lambda *_, key_prefix, **__: told.append(key_prefix),
    )
    weights = Weights("default")
    backend = P2PKVHiCache(storage_config(), start_node=FailingNode, weights=weights)
    backend.register_mem_pool_host(HostPoolFake())
    weights.updated("v2", "a", has_mixed_kv=False)
    before, after = told
    assert before != after
    backend.close()
    weights.updated("v3", "a", has_mixed_kv=False)
    assert len(told) == 2
