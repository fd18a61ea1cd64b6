"""What the HiCache backend is told: settings, formats and ranks, and which of them may share pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hicache_backends import PAGES, FailingNode, Open, storage_config
from host_pools import MHA, MLA, HostPoolFake
from p2pkv import Config, ConfigError, UsageError
from p2pkv.integrations.sglang_hicache import P2PKVHiCache

POOLS = [("mha", layout) for layout in MHA] + [("mla", layout) for layout in MLA] + [("mixed", "page_first")]


ELSEWHERE = [
    ({"model_name": "other"}, {}, {}),
    ({"tp_rank": 1, "tp_size": 2}, {}, {}),
    ({"tp_size": 2}, {}, {}),
    ({"pp_rank": 1, "pp_size": 2}, {}, {}),
    ({"pp_size": 2}, {}, {}),
    ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}, {}),
    ({"dcp_rank": 1, "dcp_size": 2}, {}, {}),
    ({"newly_invented_rank": 1, "newly_invented_size": 2}, {}, {}),
    ({"is_mla_model": True}, {}, {}),
    ({}, {"dtype": "int16"}, {}),
    ({}, {"layout": "page_head"}, {}),
    ({}, {"layout": "page_first_direct"}, {}),
    ({}, {"page_size": 32, "n_pages": 8}, {}),
    ({}, {"heads": 8}, {}),
    ({}, {}, {"namespace": "another tenant"}),
]


@pytest.mark.parametrize(("rank", "geometry", "settings"), ELSEWHERE)
def test_whatever_makes_bytes_differ_never_hits(
    open_backend: Open, rank: dict[str, Any], geometry: dict[str, Any], settings: dict[str, Any]
) -> None:
    ours, theirs = HostPoolFake(), HostPoolFake(**{"layout": "page_first"} | geometry)
    writer, same, other = open_backend(ours), open_backend(ours), open_backend(theirs, settings, **rank)
    assert writer.batch_set_v1(PAGES[:1], ours.indices(0)) == [True]
    assert writer.set(PAGES[1], ours.flat_page(1))
    assert same.batch_exists(PAGES) == 2
    for page in PAGES[:2]:
        assert other.batch_exists([page]) == 0
        assert not other.exists(page)
        assert other.batch_get_v1([page], theirs.indices(0)) == [False]
        assert other.get(page, theirs.flat_page(0)) is None


@pytest.mark.parametrize(
    "rank", [{"tp_rank": 1, "tp_size": 2}, {"dp_rank": 1}, {"tp_rank": 3, "tp_size": 4, "dp_rank": 2}]
)
def test_ranks_that_have_the_same_kv_share_it(open_backend: Open, rank: dict[str, int]) -> None:
    is_mla = "tp_rank" in rank
    kind = "mla" if is_mla else "mha"
    ours, theirs = HostPoolFake(kind=kind), HostPoolFake(kind=kind)
    ours.fill(0, 1)
    sizes = {"tp_size": rank.get("tp_size", 1), "is_mla_model": is_mla}
    writer, reader = open_backend(ours, **sizes), open_backend(theirs, **sizes | rank)
    assert writer.batch_set_v1(PAGES[:1], ours.indices(0)) == [True]
    assert reader.batch_get_v1(PAGES[:1], theirs.indices(0)) == [True]
    assert theirs.content(0) == ours.content(0)


def test_sglangs_own_keys_pass_and_unknown_ones_name_the_nearest() -> None:
    known = ["prefetch_threshold", "prefetch_timeout_base", "hicache_storage_pass_prefix_keys", "tp_lcm_size"]
    backend = P2PKVHiCache(storage_config(extra_config=dict.fromkeys(known, 1)), start_node=FailingNode)
    assert backend.node.config.deadline == Config().deadline
    with pytest.raises(ConfigError, match=r"unknown setting 'pool_sise'; did you mean 'pool_size'\?"):
        P2PKVHiCache(storage_config(extra_config={"pool_sise": 1}))


def test_settings_that_would_hang_or_mix_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 s at most"):
        P2PKVHiCache(storage_config(extra_config={"deadline": 9}))
    with pytest.raises(ConfigError, match="extra_config must be a JSON object"):
        P2PKVHiCache(storage_config(extra_config=[1]))
    split = {"should_split_heads": True, "tp_size": 2}
    with pytest.raises(ConfigError, match="interface_v1: 1"):
        P2PKVHiCache(storage_config(tp_lcm_size=4, **split, extra_config={}))
    with pytest.raises(ConfigError, match="tp_lcm_size must be a multiple of the 2 ranks of this server"):
        P2PKVHiCache(storage_config(tp_lcm_size=3, **split))
    with pytest.raises(ConfigError, match="no tp_rank"):
        P2PKVHiCache(SimpleNamespace(tp_size=2, extra_config={}))


def test_servers_that_name_no_model_share_nothing_unless_told_to(caplog: pytest.LogCaptureFixture) -> None:
    def namespace(**settings: str) -> str:
        offered = SimpleNamespace(tp_rank=0, tp_size=1, extra_config=settings)  # the least any SGLang offers
        return P2PKVHiCache(offered, start_node=FailingNode).node.config.namespace

    assert namespace() != namespace()
    assert "set 'namespace'" in caplog.text
    assert namespace(namespace="mine") == namespace(namespace="mine")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        # a host pool keeps both as bytes
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}),
        ({"quantization": "fp8"}, {}),
        ({"revision": "4f3c1e"}, {"revision": "main"}),
        # SGLang's way to a longer context: keys are rotated differently
        ({"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'}, {}),
        ({"speculative_draft_model_path": "draft/a"}, {"speculative_draft_model_path": "draft/b"}),
        ({"speculative_draft_model_path": "draft/a"}, {}),
        ({"model": {"rope_theta": 1e4}}, {"model": {"rope_theta": 1e6}}),
        ({"scales": '{"layer 0": 1.0}'}, {"scales": '{"layer 0": 2.0}'}),
        ({"scales": '{"layer 0": 1.0}'}, {}),
    ],
)
def test_models_of_one_name_that_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    def namespace(told: dict[str, Any]) -> str:
        told_sglang(monkeypatch, tmp_path, **told)
        return P2PKVHiCache(storage_config(), start_node=FailingNode).node.config.namespace

    assert namespace(ours) == namespace(ours)
    assert namespace(ours) != namespace(theirs)


def test_where_equal_files_lie_makes_no_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def namespace(folder: str) -> str:
        (tmp_path / folder).mkdir()
        model = {"rope_theta": 1e4, "_name_or_path": folder, "transformers_version": folder}
        told_sglang(monkeypatch, tmp_path / folder, scales="{}", model=model)
        return P2PKVHiCache(storage_config(), start_node=FailingNode).node.config.namespace

    assert namespace("here") == namespace("there")


def test_scales_that_can_not_be_read_stop_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told_sglang(monkeypatch, tmp_path, quantization_param_path=str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match=r"--quantization-param-path .*gone.json can't be read"):
        P2PKVHiCache(storage_config(), start_node=FailingNode)


def told_sglang(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    scales: str | None = None,
    model: dict[str, Any] | None = None,
    **told: Any,
) -> None:
    """Let this process be a server that was told so; ``scales`` is a file's content, ``model`` the configuration."""
    args = SimpleNamespace(
        **{"kv_cache_dtype": "auto", "quantization": None, "revision": None, "json_model_override_args": "{}"}
        | told
    )
    if scales is not None:
        (folder / "scales.json").write_text(scales)
        args.quantization_param_path = str(folder / "scales.json")
    config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: model or {}))
    modules = {"runtime_context": {"get_server_args": lambda: args}}
    modules["arg_groups"] = {}
    modules["arg_groups.model_override_base"] = {"model_config_of": lambda _: config}
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, attributes in modules.items():
        found = ModuleType(f"sglang.srt.{name}")
        vars(found).update(attributes)
        monkeypatch.setitem(sys.modules, found.__name__, found)


def test_ranks_that_never_publish_have_no_room_for_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"pool_size": "1GiB", "node_id": "server", "disk_path": "/pages", "disk_size": "1GiB"}

    def node(tp_rank: int, states: object) -> Config:
        told_sglang(monkeypatch, tmp_path)
        hybrid = ModuleType("sglang.srt.configs.hybrid_arch")
        hybrid.mambaish_config = lambda _: states  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sglang.srt.configs", ModuleType("sglang.srt.configs"))
        monkeypatch.setitem(sys.modules, "sglang.srt.configs.hybrid_arch", hybrid)
        rank = {"tp_rank": tp_rank, "tp_size": 2, "is_mla_model": True, "is_storage_writer": tp_rank == 0}
        offered = storage_config(extra_config=settings, **rank)
        return P2PKVHiCache(offered, start_node=FailingNode).node.config

    assert node(0, None).pool_nbytes == node(1, object()).pool_nbytes == 2**30
    reader = node(1, None)
    assert (reader.pool_nbytes, reader.disk_path, reader.disk_nbytes) == (64 * 1024, None, 0)


def test_a_pool_too_small_for_a_batch_is_said_with_the_size_to_set(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPoolFake(n_pages=4, page_size=64)
    page = sum(len(piece.tobytes()) for piece in pool._pieces(0))

    def said(pool_size: str) -> str:
        caplog.clear()
        offered = storage_config(extra_config={"pool_size": pool_size})
        P2PKVHiCache(offered, start_node=FailingNode).register_mem_pool_host(pool)
        return caplog.text

    needed = -(-128 * page // 2**20)
    assert f"set pool_size to {needed}MiB or more" in said(f"{needed - 1}MiB")
    assert not said(f"{needed}MiB")


def test_the_ranks_of_a_server_are_nodes_of_their_own() -> None:
    settings = {"node_id": "server", "listen": "127.0.0.1:7000", "metrics_port": 9000}
    settings["kv_events"] = "tcp://127.0.0.1:5557"
    made = []
    for dp in range(2):
        for pp in range(2):
            for tp in range(2):
                ranks = {"tp_rank": tp, "tp_size": 2, "pp_rank": pp, "pp_size": 2, "dp_rank": dp}
                made.append(
                    P2PKVHiCache(storage_config(**ranks, extra_config=settings), start_node=FailingNode)
                )
    configs = [backend.node.config for backend in made]
    assert configs[0].node_id == "server"
    for values in zip(*[(c.node_id, c.listen, c.metrics_port, c.kv_events) for c in configs], strict=True):
        assert len(set(values)) == 8


def test_a_pool_that_can_not_be_stored_is_refused_at_start() -> None:
    class Opaque(HostPoolFake):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError(f"Unsupported layout: {self.layout}")

    class Elsewhere(HostPoolFake):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            return [4096], [4096]

    backend = P2PKVHiCache(storage_config(), start_node=FailingNode)
    with pytest.raises(UsageError, match="Unsupported layout: page_first"):
        backend.register_mem_pool_host(Opaque())
    with pytest.raises(UsageError, match="outside of the pool's buffers"):
        backend.register_mem_pool_host(Elsewhere())


def test_registering_the_kv_pool_by_name_too_changes_nothing(open_backend: Open) -> None:
    pool = HostPoolFake()
    backend = open_backend(pool)
    backend.register_mem_host_pool_v2(pool, "kv")
    backend.on_host_pools_registered()
    assert backend.batch_set_v1(PAGES, pool.indices(*range(8))) == [True] * 8


def test_the_backend_is_one_of_sglangs_where_sglang_is_installed() -> None:
    script = """
import sys, types
class HiCacheStorage: pass
for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.mem_cache.hicache_storage"].HiCacheStorage = HiCacheStorage
from p2pkv.integrations.sglang_hicache import P2PKVHiCache
assert issubclass(P2PKVHiCache, HiCacheStorage)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
