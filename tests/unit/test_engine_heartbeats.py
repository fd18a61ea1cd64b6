"""vLLM's and SGLang's integrations tell routers of the engine they are in, if they are given routers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import zmq

from heartbeats import Listener, served
from hicache_backends import Open
from host_pools import HostPoolFake
from p2pkv.config import Config
from p2pkv.control.secret import cluster_keys
from p2pkv.control.sockets import ControlClient, Request, Socket
from p2pkv.control.wire import Kind
from p2pkv.directory.routers import pack_news
from p2pkv.errors import ConfigError
from p2pkv.instances.heartbeat import Heartbeat, Load, Mode, Role, State
from p2pkv.integrations.sglang import heartbeat as server_heartbeat
from p2pkv.integrations.sglang.heartbeat import announce_server
from p2pkv.integrations.vllm_connector.settings import Instance
from vllm_engine import EngineFake
from vllm_fakes import kv_cache_config, vllm_config

ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.BOTH}


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def url() -> Iterator[str]:
    with served() as url:
        yield url


def tell_of_router(node: str, router: str) -> None:
    """Tell a node of a router, as that does."""
    context: zmq.Context[Socket] = zmq.Context()
    client = ControlClient(context, cluster_keys(None))
    try:
        reply = client.ask(Request(node, Kind.GOSSIP, pack_news(router, 60.0)), 10.0)
        assert reply is not None
        assert reply.ok
    finally:
        client.close()
        context.term()


def is_ready(heartbeat: Heartbeat) -> bool:
    return heartbeat.state is State.READY


def has_left(heartbeat: Heartbeat) -> bool:
    return heartbeat.state is State.LEFT


def load(heartbeat: Heartbeat) -> Load:
    return Load(heartbeat.state, heartbeat.running, heartbeat.waiting)


def test_a_vllm_instance_is_announced_until_it_shuts_down(listener: Listener, url: str) -> None:
    settings = {"pool_size": "1MiB", "node_id": "prefill-0", "routers": [listener.address], "engine_url": url}
    engine = EngineFake(settings, role="kv_producer")
    try:
        heartbeat = listener.hear(is_ready)
    finally:
        engine.close()
    told = heartbeat.instance
    assert (told.url, told.role, told.mode, told.model) == (url, Role.PREFILL, Mode.VLLM, "tiny")
    assert told.node_id == engine.node.node_id
    assert "vllm" in told.namespace
    assert told.page_size == 0, "nobody but vLLM can compute its block hashes"
    assert load(heartbeat) == Load(State.READY, running=3, waiting=2)
    listener.hear(has_left)


@pytest.mark.parametrize("kv_role", ROLES)
def test_what_a_vllm_instance_does_follows_from_its_role(kv_role: str) -> None:
    routers = {"routers": "127.0.0.1:1", "engine_url": "http://10.0.0.1:8100"}

    def told(**settings: str) -> Role:
        config = vllm_config(routers | settings, kv_role, "recompute")
        announced = Instance.read(config, kv_cache_config()).announced
        assert announced is not None
        return announced.role

    assert told() is ROLES[kv_role]
    assert told(engine_role="prefill") is Role.PREFILL


def test_without_routers_and_a_url_nobody_is_told_anything(listener: Listener) -> None:
    engine = EngineFake({"pool_size": "1MiB"})
    try:
        assert not [thread.name for thread in threading.enumerate() if thread.name == "p2pkv-heart"]
    finally:
        engine.close()
    assert listener.is_silent()


def test_an_engine_tells_the_routers_that_have_told_its_node_that_they_are_there(
    listener: Listener, url: str
) -> None:
    engine = EngineFake({"pool_size": "1MiB", "engine_url": url})
    try:
        tell_of_router(engine.node.address, listener.address)
        heartbeat = listener.hear(is_ready)
        assert heartbeat.routers == (listener.address,)
    finally:
        engine.close()
    listener.hear(has_left)


def test_a_vllm_instance_without_a_url_does_not_start() -> None:
    with pytest.raises(ConfigError, match="engine_url"):
        Instance.read(vllm_config({"routers": "127.0.0.1:1"}, "kv_both", "fail"), kv_cache_config())


def test_data_parallel_siblings_behind_one_address_speak_once() -> None:
    config = vllm_config({"routers": "127.0.0.1:1", "engine_url": "http://10.0.0.1:1"}, "kv_both", "fail")
    config.parallel_config.data_parallel_index = 1
    assert Instance.read(config, kv_cache_config()).announced is None
    config.parallel_config.data_parallel_external_lb = True
    assert Instance.read(config, kv_cache_config()).announced is not None


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch, url: str) -> Iterator[SimpleNamespace]:
    """Let this process be one of a SGLang server's; yield what that was told."""
    port = int(url.rpartition(":")[2])
    told = SimpleNamespace(
        host="127.0.0.1",
        port=port,
        served_model_name="tiny",
        ssl_certfile=None,
        disaggregation_mode="prefill",
        disaggregation_bootstrap_port=8998,
        kv_cache_dtype="auto",
        quantization=None,
        revision=None,
        json_model_override_args="{}",
    )
    context = ModuleType("sglang.srt.runtime_context")
    for name in ("server_args", "serving", "disagg"):
        setattr(context, f"get_{name}", lambda: told)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    yield told
    server_heartbeat.end()


def test_a_sglang_server_is_announced_by_what_its_own_settings_say(
    sglang: SimpleNamespace, listener: Listener, url: str
) -> None:
    config = Config(routers=listener.address)
    announce_server(config, 1)
    announce_server(config, 0)
    told = listener.hear(is_ready).instance
    assert (told.url, told.role, told.mode, told.model) == (url, Role.PREFILL, Mode.SGLANG, "tiny")
    assert told.bootstrap_port == 8998
    server_heartbeat.end()
    listener.hear(has_left)


def test_a_sglang_server_that_listens_everywhere_names_the_address_routers_reach(
    sglang: SimpleNamespace, listener: Listener, url: str
) -> None:
    sglang.host, sglang.disaggregation_mode = "0.0.0.0", "null"
    announce_server(Config(routers=listener.address), 0)
    told = listener.hear(is_ready).instance
    assert (told.url, told.role, told.bootstrap_port) == (url, Role.BOTH, None)


def test_a_sglang_server_tells_the_routers_that_have_told_its_node(
    sglang: SimpleNamespace, listener: Listener, open_backend: Open
) -> None:
    backend = open_backend(HostPoolFake("page_first"))
    tell_of_router(backend.node.address, listener.address)
    assert listener.hear(is_ready).routers == (listener.address,)
    backend.close()


def test_transfers_and_hicache_in_one_server_speak_once(
    sglang: SimpleNamespace, listener: Listener, url: str, open_backend: Open
) -> None:
    announce_server(Config(routers=listener.address), 0)
    first = listener.hear(is_ready)
    pool = HostPoolFake("page_first")
    backend = open_backend(pool, settings={"routers": listener.address})
    heartbeat = listener.hear(lambda heard: bool(heard.instance.node_id))
    assert heartbeat.boot == first.boot
    told = heartbeat.instance
    assert (told.url, told.role, told.bootstrap_port) == (url, Role.PREFILL, 8998)
    assert (told.node_id, told.page_size) == (backend.node.node_id, pool.page_size)
    # what a router makes of it is what the backend publishes under
    assert backend._keys(["page"]) == [told.key_prefix + "page"]
    assert "sglang" in told.namespace

    backend.close()  # as when SGLang detaches it: the server itself goes on
    listener.hear(is_ready)


def test_hicache_outside_of_sglang_needs_to_be_told_its_url(listener: Listener, open_backend: Open) -> None:
    with pytest.raises(ConfigError, match="engine_url"):
        open_backend(HostPoolFake("page_first"), settings={"routers": listener.address})
